"""Inputs for past keys and values, as the older exporter of PyTorch writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import DataError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.advice.doctor import diagnose
from onnxtrain.training.working_copy.kv_cache import leave_out_pasts

NAMES = [f"past_key_values.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_all_pasts_of_an_exported_cache_are_left_out(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=32, n_embd=8, n_layer=2, n_head=2, attn_implementation="eager"
    )
    network = transformers.GPT2LMHeadModel(config).eval()

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens, mask, *pasts):
            cache = transformers.DynamicCache()
            for layer in range(2):
                cache.update(pasts[2 * layer], pasts[2 * layer + 1], layer)
            found = self.network(tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
            return (found.logits, *(part for one in found.past_key_values.layers for part in (one.keys, one.values)))

    path = tmp_path / "gpt2.onnx"
    past = torch.zeros(1, 2, 3, 4)
    torch.onnx.export(
        Cached(),
        (torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 7, dtype=torch.int64), past, past, past, past),
        path,
        dynamo=False,
        input_names=["input_ids", "attention_mask", *NAMES],
        output_names=["logits", *(name.replace("past_key_values", "present") for name in NAMES)],
        dynamic_axes={"input_ids": {0: "b", 1: "t"}, "attention_mask": {0: "b", 1: "s"}}
        | {name: {0: "b", 2: "p"} for name in NAMES},
    )
    assert leave_out_pasts(ModelFile.load(path).training_model()) == NAMES
    assert any("Training begins without a past: 4 inputs" in finding.what for finding in diagnose(path))
    tokens = np.random.default_rng(0).integers(0, 17, size=(2, 5))
    found = onnxtrain.predict(path, {"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    empty = dict.fromkeys(NAMES, np.zeros((2, 2, 0, 4), np.float32))
    session = onnxruntime.InferenceSession(path)
    (expected,) = session.run(["logits"], {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **empty})
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["logits"], expected, atol=1e-5)
    labels = torch.as_tensor(tokens)
    without_cache = network.eval()(labels).logits  # the export puts the wrapper and its parts back into training mode
    wanted = torch.nn.functional.cross_entropy(without_cache.reshape(-1, 17), labels.reshape(-1)).item()
    trainer = onnxtrain.Trainer(path, loss="cross_entropy", output="logits")
    for pasts in ({}, empty):  # the file's own six inputs, and those that are left
        data = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **pasts}, tokens
        assert trainer.evaluate(data)["loss"] == pytest.approx(wanted, rel=1e-5)
    trainer.fit(data, epochs=1, batch_size=2, progress=False)


def _decoder(second: str, name: str = "past.1.key") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[b, 2, 3, 4] x, float[b, 2, p, 4] past_0_key, float[b, 2, {second}, 4] other)
        => (float[b, 2, s, 4] y, float z) {{
            c = Concat<axis=2>(past_0_key, x)  y = Mul(c, w)
            z = ReduceSum<keepdims=0>(other)
        }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32) * 2, "w"))
    model.graph.node[-1].input[0] = model.graph.input[2].name = name
    model.graph.node[0].input[0] = model.graph.input[1].name = "past.0.key"
    return model


def test_pasts_of_one_model_go_together_or_stay() -> None:
    def left_out(*given: str) -> list[str]:
        return leave_out_pasts(ModelFile.load(_decoder(*given)).training_model())

    assert left_out("p") == []
    assert left_out("p2") == []  # a symbol of its own, but a cache of the same kind by its name
    assert left_out("p2", "past.1.value") == []
    assert left_out("p", "past.1.encoder.key") == []
    assert left_out("encoder_length", "past.1.encoder.key") == ["past.0.key"]
    assert left_out("16") == ["past.0.key"]


def test_data_may_have_the_inputs_of_a_past_without_rows() -> None:
    model = _decoder("16")
    inputs = {"x": np.ones((2, 2, 3, 4), np.float32), "past.1.key": np.ones((2, 2, 16, 4), np.float32)}
    empty = inputs | {"past.0.key": np.zeros((2, 2, 0, 4), np.float32)}
    filled = inputs | {"past.0.key": np.zeros((2, 2, 5, 4), np.float32)}
    y = np.zeros((2, 2, 3, 4), np.float32)
    trainer = onnxtrain.Trainer(model, loss="mse", output="y")
    expected = trainer.evaluate((inputs, y))["loss"]
    for data in ((empty, y), empty | {"target": y}, [empty | {"target": y}], lambda: iter([(empty, y)])):
        assert trainer.evaluate(data)["loss"] == expected
    trainer.train_step(empty, y)
    trainer.fit((empty, y), progress=False)
    np.testing.assert_array_equal(onnxtrain.predict(model, empty)["y"], 2 * inputs["x"])
    sentence = r"past of shape \(2, 2, 5, 4\) in 'past.0.key'.*begin with an empty KV cache.*without rows"
    for use in (
        lambda: trainer.evaluate((filled, y)),
        lambda: trainer.evaluate(lambda: iter([(filled, y)])),
        lambda: trainer.fit(filled | {"target": y}, progress=False),
        lambda: trainer.train_step(filled, y),
        lambda: trainer.predict(filled),
        lambda: onnxtrain.predict(model, filled),
    ):
        with pytest.raises(DataError, match=sentence):
            use()
