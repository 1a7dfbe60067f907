"""Random-weight language models for adapter benchmarks, in the file formats in which they are shipped."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT = """
import json, sys
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast
folder, (layers, width, inner, heads, pairs, vocabulary, dtype) = sys.argv[1], json.loads(sys.argv[2])
LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
    num_attention_heads=heads, num_key_value_heads=pairs, max_position_embeddings=4096, tie_word_embeddings=False,
    use_cache=False, dtype=dtype, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
random, dtype = torch.Generator().manual_seed(0), getattr(torch, dtype)
tensors = {"model.norm.weight": torch.ones(width, dtype=dtype)}
def draw(name, *shape):
    tensors[name + ".weight"] = torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=random)
draw("model.embed_tokens", vocabulary, width)
draw("lm_head", vocabulary, width)
for layer in range(layers):
    path = f"model.layers.{layer}."
    for part, outputs in {"q": width, "k": width * pairs // heads, "v": width * pairs // heads, "o": width}.items():
        draw(path + f"self_attn.{part}_proj", outputs, width)
    for part, sizes in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
        draw(path + f"mlp.{part}_proj", *sizes)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[path + norm + ".weight"] = torch.ones(width, dtype=dtype)
save_file(tensors, folder + "/model.safetensors", metadata={"format": "pt"})
words = Tokenizer(models.BPE(vocab={f"t{index}": index for index in range(320)}, merges=[]))
PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0").save_pretrained(folder)
"""

EXPORT = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
from transformers import LlamaForCausalLM
inner = LlamaForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager").eval()
class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = inner
    def forward(self, input_ids):
        return self.inner(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits
sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("T", max=4096)}
torch.onnx.export(Logits(), (torch.ones(2, 64, dtype=torch.int64),), sys.argv[2] + "/model.onnx",
    dynamic_shapes=(sizes,), input_names=["input_ids"], output_names=["logits"], dynamo=True, opset_version=18,
    external_data=True)
"""

FORMS = {"float16": ("fp16", "cuda"), "bfloat16": ("bf16", "cuda"), "int4": ("int4", "cpu")}
"""Weight types of onnxruntime-genai's builder, with a provider that supports them."""


@dataclass(frozen=True)
class Sizes:
    """A Llama.

    Attributes:
        layers: Number of layers.
        width: Hidden size.
        inner: Intermediate size of the MLP.
        heads: Query heads.
        pairs: Key and value heads.
        vocabulary: Vocabulary size.
        dtype: Element type of the checkpoint.
    """

    layers: int
    width: int
    inner: int
    heads: int
    pairs: int
    vocabulary: int
    dtype: str = "float32"

    @property
    def parameters(self) -> int:
        """Number of weights."""
        attention = 2 * self.width**2 * (1 + self.pairs / self.heads)
        layer = int(attention) + 3 * self.width * self.inner + 2 * self.width
        return self.layers * layer + 2 * self.vocabulary * self.width + self.width

    def __str__(self) -> str:
        return (
            f"Llama of {self.parameters:,} parameters ({self.layers} layers of width {self.width}, "
            f"{self.vocabulary:,} tokens)"
        )


class Models:
    """The checkpoint and ONNX files of a model, in a folder; each is created at its first use.

    Args:
        folder: Folder of the files.
        sizes: Sizes of the model.
        python: An interpreter with PyTorch, transformers and onnxruntime-genai.
    """

    def __init__(self, folder: Path, sizes: Sizes, python: str) -> None:
        self.folder, self.sizes, self._python = folder, sizes, python

    @property
    def checkpoint(self) -> Path:
        """The folder of random weights that PEFT reads."""
        values = [*vars(self.sizes).values()]
        return self._made("checkpoint", lambda place: self._run("-c", CHECKPOINT, str(place), json.dumps(values)))

    def onnx(self, form: str) -> Path:
        """The folder of the model with weights of a type: PyTorch's export, or the builder's output."""
        checkpoint = self.checkpoint
        if form == "float32":
            return self._made(form, lambda place: self._run("-c", EXPORT, str(checkpoint), str(place)))
        precision, provider = FORMS[form]
        arguments = ("-i", str(checkpoint), "-p", precision, "-e", provider, "-c", str(self.folder / "cache"))
        builder = ("-m", "onnxruntime_genai.models.builder")
        return self._made(form, lambda place: self._run(*builder, *arguments, "-o", str(place)))

    @property
    def dequantized(self) -> Path:
        """The checkpoint with the dequantized weights of the int4 model."""
        model, checkpoint = self.onnx("int4") / "model.onnx", self.checkpoint
        return self._made("dequantized", lambda place: dequantize(model, checkpoint, place))

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        place = self.folder / name
        if not place.exists():
            unfinished = self.folder / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(place)
        return place

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._python, *arguments], check=True, capture_output=True)


def dequantize(model: Path, checkpoint: Path, place: Path) -> None:
    """Write a checkpoint whose linear layers have the dequantized weights of a quantized model."""
    from safetensors.numpy import load_file, save_file

    from onnxtrain.adapters.layers import find_layers
    from onnxtrain.adapters.values import matrix
    from onnxtrain.graph.shapes import infer_shapes
    from onnxtrain.model_file.file import ModelFile

    tensors = load_file(checkpoint / "model.safetensors")
    for layer in find_layers(infer_shapes(ModelFile.load(model).training_model())):
        if layer.kind == "MatMulNBits":
            weight = matrix(layer)
            for part in layer.parts or (None,):
                columns = slice(None) if part is None else slice(part.start, part.start + part.size)
                name = layer.name if part is None else part.name
                tensors[f"{name}.weight"] = weight[:, columns].T.copy()
    shutil.copy(checkpoint / "config.json", place)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
