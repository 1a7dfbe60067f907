"""Tensors that are trained in full beside adapters with patterns, rates of their own, PiSSA, LoftQ and requantizing."""

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxtrain
from adapters.test_heads import check_forms, data, outputs, serialized, trained
from adapters.test_quantized_bases import with_weights
from onnxtrain import Lora
from onnxtrain.adapters import merge_adapter
from zoo.decoder import parsed


def arrays(model):
    """Initializers by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("dora", [False, True])
def test_pissa_and_a_head_are_in_every_form(tmp_path, dora):
    """The saved adapter subtracts the initial values from the unchanged weights, and has the trained head."""
    model, (x, _) = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2), data()
    lora = Lora(rank=2, targets=["layer1", "layer2"], init="pissa", dora=dora, lr_ratio=2)
    expected = check_forms(model, trained(model, lora=lora), x, tmp_path, atol=1e-4)
    assert np.abs(expected - outputs(serialized(model), x)).max() > 0.1


def test_patterns_and_a_head_are_in_the_manifest_and_in_the_folder(tmp_path):
    model = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    lora = Lora(rank=2, targets=["layer1", "layer2"], rank_pattern={"layer2": 3}, alpha_pattern={"layer1": 5})
    check_forms(model, trained(model, lora=lora), data()[0], tmp_path)
    manifest = json.loads((tmp_path / "tuned.onnx_adapter.json").read_text())
    config = json.loads((tmp_path / "folder" / "adapter_config.json").read_text())
    for found in (manifest, config):
        assert found["rank_pattern"] == {"layer2": 3}
        assert found["alpha_pattern"] == {"layer1": 5}
    assert sorted(manifest["tensors"]) == ["layer3.bias", "layer3.weight"]
    assert config["modules_to_save"] == ["layer3"]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_head_keeps_the_rate_of_the_optimizer(tmp_path, resumed):
    """Only B and magnitudes have the rate of LoRA+, in a new training and in one that continues."""
    model, settings = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2), {"targets": "layer1", "rank": 2, "dora": True}
    if resumed:
        trained(model, lora=Lora(**settings)).save(tmp_path / "tuned.onnx_adapter")
        settings = {"adapter": tmp_path / "tuned.onnx_adapter"}
    steps = []
    for ratio in (1, 4):
        lora = Lora(**settings, lr_ratio=ratio)
        trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="sgd(lr=0.1)", lora=lora, train="layer3.*")
        before = trainer.get_weights()
        trainer.train_step(*data())
        steps.append({name: array - before[name] for name, array in trainer.get_weights().items()})
    for name in ("layer3.weight", "layer3.bias"):
        np.testing.assert_allclose(steps[1][name], steps[0][name], rtol=1e-5)
    for name in ("layer1.lora_B.weight", "layer1.lora_magnitude_vector"):
        assert np.abs(steps[0][name]).max() > 1e-4
        np.testing.assert_allclose(steps[1][name], 4 * steps[0][name], rtol=1e-2, atol=1e-6)


def test_requantized_merges_have_the_head(tmp_path):
    """New integers and scales of the adapted weight, and the values of the head; LoftQ starts from the float model."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((6, 8)).astype(np.float32)
    scale = np.float32(np.abs(weight).max() / 7)
    head = {"head__weight": random.standard_normal((8, 3)).astype(np.float32)}
    read = "h = MatMul(x, {}) a = Tanh(h) logits = MatMul(a, head__weight) }}"
    graph = "g (float[n,6] x) => (float[n,3] logits) { "
    original = with_weights(parsed(graph + read.format("fc__weight")), fc__weight=weight, **head)
    dequantize = "w = DequantizeLinear(fc__weight, fc__scale) "
    model = with_weights(
        parsed(graph + dequantize + read.format("w")),
        fc__weight=np.rint(weight / scale).astype(np.int8),
        fc__scale=scale,
        **head,
    )
    onnx.save(original, tmp_path / "float.onnx")
    lora = Lora(rank=2, targets="fc", init="loftq", original=tmp_path / "float.onnx")
    trainer = trained(model, lora=lora, train="head.*", epochs=5)
    x, found = data()[0], arrays(model)
    expected = trainer.predict(x)
    for form in ("tuned.onnx_adapter", "folder"):
        trainer.save(tmp_path / form)
        merge_adapter(model, tmp_path / form, tmp_path / "merged.onnx", requantize=True)
        merged = arrays(onnx.load(tmp_path / "merged.onnx"))
        np.testing.assert_array_equal(merged["head.weight"], trainer.get_weights()["head.weight"])
        assert np.abs(merged["head.weight"] - found["head.weight"]).max() > 0.01
        assert merged["fc.scale"] != found["fc.scale"]
        assert (merged["fc.weight"] != found["fc.weight"]).any()
        assert np.abs(outputs(tmp_path / "merged.onnx", x) - expected).mean() < 0.03
    assert np.abs(expected - outputs(serialized(model), x)).max() > 0.5
