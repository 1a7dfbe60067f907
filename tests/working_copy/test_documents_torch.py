"""Packed rows equal unpacked ones in exports of PyTorch and in models of onnxruntime-genai's builder."""

from __future__ import annotations

import contextlib
import io

import onnx
import pytest

import onnxtrain
from working_copy.packed_rows import check_packing, mixed_loss

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

WORDS = 97
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=WORDS,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        )
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**{key: value for key, value in SIZES.items() if "key_value" not in key})
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)
    ),
}


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids=None):
        more = {} if position_ids is None else {"position_ids": position_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **more).logits


class Positioned(Logits):
    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, None, position_ids)


def export(name, path, *, attention, positions, dynamo, mask=True):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.set_attn_implementation(attention)
    names = ["input_ids", *(["attention_mask"] if mask else []), *(["position_ids"] if positions else [])]
    tokens = torch.ones(2, 6, dtype=torch.long)
    inputs = tuple(torch.arange(6).expand(2, 6) if key == "position_ids" else tokens for key in names)
    if dynamo:
        sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("T", max=64)}
        more = {"dynamic_shapes": dict.fromkeys(names, sizes), "external_data": False, "verbose": False}
    else:
        more = {"dynamic_axes": {key: {0: "N", 1: "T"} for key in (*names, "logits")}, "opset_version": 18}
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(
            (Logits if mask else Positioned)(model),
            inputs,
            path,
            dynamo=dynamo,
            input_names=names,
            output_names=["logits"],
            **more,
        )
    return path


@pytest.mark.thorough
@pytest.mark.sampled(4)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("positions", [False, True], ids=["counted positions", "position_ids"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_traced_exports(name, positions, attention, tmp_path):
    path = export(name, tmp_path / "model.onnx", attention=attention, positions=positions, dynamo=False)
    check_packing(path, WORDS)


@pytest.mark.sweep
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_exports_of_the_new_exporter(name, tmp_path):
    path = export(name, tmp_path / "model.onnx", attention="sdpa", positions=True, dynamo=True)
    check_packing(path, WORDS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.sweep)])
def test_exports_with_positions_and_without_a_mask(name, tmp_path):
    """They compare positions, by which transformers separates sequences; the working copy does so once more."""
    path = export(name, tmp_path / "model.onnx", attention="sdpa", positions=True, dynamo=True, mask=False)
    check_packing(path, WORDS)


@pytest.mark.sweep
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["opt", "gpt_neox", "bloom"])
def test_more_architectures(name, tmp_path):
    """OPT sums its mask to positions, GPT-NeoX rotates, BLOOM has biases by distance."""
    path = export(name, tmp_path / "model.onnx", attention="eager", positions=False, dynamo=False)
    check_packing(path, WORDS)


@pytest.mark.thorough
def test_an_export_whose_documents_are_mixed_has_another_loss(tmp_path, monkeypatch):
    path = export("gpt2", tmp_path / "model.onnx", attention="sdpa", positions=False, dynamo=False)
    right = check_packing(path, WORDS)[0]
    assert abs(mixed_loss(path, WORDS, monkeypatch) - right) > 2e-5 * right  # small, since the weights are random


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("LlamaForCausalLM", "fp32"),
        pytest.param("LlamaForCausalLM", "fp16", marks=pytest.mark.sweep),
        ("LlamaForCausalLM", "int4"),
        pytest.param("Gemma2ForCausalLM", "fp32", marks=pytest.mark.sweep),
    ],
)
def test_models_of_the_builder(name, precision, tmp_path):
    """GroupQueryAttention, MultiHeadAttention of float16 models, int4 weights, capped scores with windows."""
    pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    from zoo import genai_models

    genai_models.checkpoint(name, tmp_path / "checkpoint")
    path = genai_models.build(tmp_path / "checkpoint", tmp_path / precision, precision)
    operators = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    assert operators & {"GroupQueryAttention", "MultiHeadAttention"}
    options = {"lora": onnxtrain.Lora(rank=2)} if precision == "int4" else {}
    check_packing(path, genai_models.WORDS, **options)
