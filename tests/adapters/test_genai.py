"""Models of onnxruntime-genai: slots in what its builder writes, and adapters that it generates with."""

import subprocess
import sys

import numpy as np
import pytest

import onnxtrain
from onnxtrain import Lora
from onnxtrain.adapters import add_slots, convert_adapter, merge_adapter
from onnxtrain.adapters.layers import find_layers
from onnxtrain.adapters.values import matrix
from onnxtrain.errors import OptionError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model.file import ModelFile

torch = pytest.importorskip("torch")
genai = pytest.importorskip("onnxruntime_genai")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from adapters.test_peft import adapted, llama, losses_of_peft  # noqa: E402 - it needs them, too

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

TOKENS = np.arange(3, 12, dtype=np.int32)


@pytest.fixture(scope="module", params=["fp32", "int4"])
def folder(request, tmp_path_factory):
    """What the builder writes for a small Llama."""
    place = tmp_path_factory.mktemp("genai")
    model = llama()
    model.config.bos_token_id, model.config.eos_token_id = 1, 2
    model.save_pretrained(place / "checkpoint")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t0"
    )
    fast.save_pretrained(place / "checkpoint")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", "checkpoint", "-o", request.param]
    command += ["-p", request.param, "-e", "cpu", "-c", "cache"]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    return place / request.param


def logits(folder, adapter=None):
    """What onnxruntime-genai computes for the tokens."""
    model = genai.Model(str(folder))
    generator = genai.Generator(model, genai.GeneratorParams(model))
    loaded = genai.Adapters(model)  # as long as the generator
    if adapter is not None:
        loaded.load(str(adapter), "tuned")
        generator.set_active_adapter(loaded, "tuned")
    generator.append_tokens(TOKENS[None])
    return np.array(generator.get_output("logits"))


def with_model(folder, place):
    """The folder of a generative model with another model in it."""
    place.mkdir()
    for path in folder.iterdir():
        if not path.name.startswith("model.onnx"):
            (place / path.name).write_bytes(path.read_bytes())
    return place


def test_it_generates_with_an_adapter_of_peft(folder, tmp_path):
    tuned, first = adapted(tmp_path)
    convert_adapter(folder / "model.onnx", first, tmp_path / "tuned.onnx_adapter")
    place = with_model(folder, tmp_path / "slots")
    names = add_slots(folder / "model.onnx", place / "model.onnx")
    assert "model.layers.1.self_attn.o_proj" in names
    base, slots = logits(folder), logits(place)
    assert slots.tobytes() == base.tobytes()
    got = logits(place, tmp_path / "tuned.onnx_adapter")
    assert np.abs(got - base).max() > 0.01
    if folder.name == "fp32":
        with torch.no_grad():
            expected = tuned(input_ids=torch.from_numpy(TOKENS[None].astype(np.int64)), use_cache=False).logits.numpy()
        np.testing.assert_allclose(got, expected[:, -got.shape[1] :], atol=1e-5)


def test_merging(folder, tmp_path):
    tuned, first = adapted(tmp_path)
    place = with_model(folder, tmp_path / "merged")
    if folder.name == "fp32":
        merge_adapter(folder / "model.onnx", first, place / "model.onnx")
        with torch.no_grad():
            expected = tuned(input_ids=torch.from_numpy(TOKENS[None].astype(np.int64)), use_cache=False).logits.numpy()
        got = logits(place)
        np.testing.assert_allclose(got, expected[:, -got.shape[1] :], atol=1e-5)
        return
    with pytest.raises(OptionError, match="is quantized to 4 bits, which its adapter does not fit into"):
        merge_adapter(folder / "model.onnx", first, place / "model.onnx")
    costs = merge_adapter(folder / "model.onnx", first, place / "model.onnx", requantize=True)
    assert costs
    assert all(cost.lost > 0 for cost in costs)
    assert np.abs(logits(place) - logits(folder)).max() > 0.01


def dequantized(folder):
    """The checkpoint with the weights that the model of the builder has."""
    model = llama()
    modules = dict(model.named_modules())
    for layer in find_layers(infer_shapes(ModelFile.load(folder / "model.onnx").training_model())):
        if layer.kind != "MatMulNBits":
            continue
        weight = matrix(layer)
        for part in layer.parts or (None,):
            columns = slice(None) if part is None else slice(part.start, part.start + part.size)
            name = layer.name if part is None else part.name
            with torch.no_grad():
                modules[name].weight.copy_(torch.from_numpy(weight[:, columns].T.copy()))
    return model


def test_losses_are_those_of_peft(folder, tmp_path):
    drawn = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    data = drawn[:, :-1], drawn[:, 1:]
    inner = dequantized(folder)
    tuned, first = adapted(tmp_path, inner=inner)
    expected = losses_of_peft(tuned, data, lambda values: torch.optim.SGD(values, lr=0.1))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    learner = onnxtrain.Trainer(
        folder / "model.onnx", loss="softmax_cross_entropy", optimizer=onnxtrain.SGD(0.1), lora=Lora(adapter=first)
    )
    feeds = {"input_ids": data[0].numpy(), "attention_mask": np.ones((2, 12), np.int64)}
    got = [learner.train_step(feeds, data[1].numpy()) for _ in expected]
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 2e-5
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
