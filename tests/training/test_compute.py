"""Matmuls, convolutions and attention in bfloat16: losses near those of float32, requirements, what is not rounded."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain.errors import GradientError, OptionError
from onnxtrain.runtime import native
from zoo import convolutional, decoder

STEPS = 20


@pytest.fixture
def anywhere(monkeypatch):
    """Skip the CPU check: kernels give the same bits without the instruction, so that every machine can test them."""
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)


def losses(model, data, compute, **options):
    trainer = onnxtrain.Trainer(model, optimizer="adamw(lr=2e-3)", precision=compute, threads=1, **options)
    return trainer, [trainer.train_step(*data) for _ in range(STEPS)]


def points(features=64, classes=5):
    random = np.random.default_rng(0)
    return random.standard_normal((32, features)).astype(np.float32), random.integers(0, classes, 32)


def language_model(monkeypatch, stored):
    """Return a decoder with sufficiently wide linear layers and weights stored in a type."""
    monkeypatch.setattr(decoder, "HIDDEN", 64)
    monkeypatch.setattr(decoder, "INNER", 96)
    model = decoder.decoder()
    for index, weight in enumerate(list(model.graph.initializer)):
        if not weight.name.endswith("proj.weight") or stored == "float":
            continue
        name, kind = weight.name, helper.np_dtype_to_tensor_dtype(np.dtype(stored))
        array = numpy_helper.to_array(weight).astype(stored)
        raw = helper.make_tensor(f"{name}.stored", kind, array.shape, array.tobytes(), raw=True)
        model.graph.initializer[index].CopyFrom(raw)
        model.graph.node.insert(0, helper.make_node("Cast", [f"{name}.stored"], [name], f"cast {name}", to=1))
    return model


def rounded_nodes(trainer):
    graph = trainer.executor.session._steps[0].step.model.graph
    return [node for node in graph if "compute" in node.attributes]


def test_a_network_learns_alike(anywhere):
    """Every loss of 20 steps is within a hundredth of float32's."""
    model, data = onnxtrain.examples.mlp((64, 96, 64, 5)), points()
    _, exact = losses(model, data, "float32", loss="softmax_cross_entropy")
    trainer, found = losses(model, data, "bfloat16", loss="softmax_cross_entropy")
    of_layers = {"Linear", "LinearGradient", "LinearWeightGradient"}
    assert {node.op_type for node in rounded_nodes(trainer)} == of_layers
    assert found != exact
    assert exact[-1] < 0.5 * exact[0]
    np.testing.assert_allclose(found, exact, rtol=0.01, atol=0.01 * exact[0])


def images():
    random = np.random.default_rng(2)
    return random.standard_normal((8, 16, 28, 28)).astype(np.float32), random.integers(0, 5, 8)


def test_a_convolutional_network_learns_alike(anywhere):
    """Every loss of 20 steps is within a hundredth of float32's, of the first loss."""
    model = convolutional.model()
    options = {"loss": "softmax_cross_entropy"}
    _, exact = losses(model, images(), "float32", **options)
    trainer, found = losses(model, images(), "bfloat16", **options)
    assert {"Conv", "ConvInputGradient", "ConvWeightGradient"} <= {node.op_type for node in rounded_nodes(trainer)}
    assert found != exact
    assert exact[-1] < 0.5 * exact[0]
    np.testing.assert_allclose(found, exact, atol=0.01 * exact[0])


@pytest.mark.parametrize("tokens", [8, 64])  # attention of 8 tokens stays in float32
@pytest.mark.parametrize("stored", ["float", np.float16, ml_dtypes.bfloat16], ids=["float", "float16", "bfloat16"])
def test_adapters_learn_alike(anywhere, monkeypatch, stored, tokens):
    """Every loss of 20 steps is within a hundredth of float32's; adapters themselves stay in float32."""
    model = language_model(monkeypatch, stored)
    words = np.random.default_rng(1).integers(0, decoder.VOCABULARY, (3, tokens + 1))
    lora = onnxtrain.Lora(rank=4, alpha=8, targets="*_proj")
    options = {"loss": "softmax_cross_entropy", "lora": lora}
    _, exact = losses(model, (words[:, :-1], words[:, 1:]), "float32", **options)
    trainer, found = losses(model, (words[:, :-1], words[:, 1:]), "bfloat16", **options)
    nodes = rounded_nodes(trainer)
    assert {"Attention", "AttentionGradient"} <= {node.op_type for node in nodes}
    bases = [node.inputs[1] for node in nodes if not node.op_type.startswith("Attention")]
    assert len(bases) >= 4 * 7 - 3  # two layers; without trainable weights before them, input gradients are missing
    assert all(min(value.shape) >= 64 for value in bases)
    if stored != "float":
        assert {value.dtype.numpy() for value in bases} == {np.dtype(stored)}
    assert found != exact
    assert exact[-1] < 0.8 * exact[0]
    np.testing.assert_allclose(found, exact, rtol=0.01)


def test_evaluation_is_that_of_the_saved_model(anywhere):
    model, (x, y) = onnxtrain.examples.mlp((64, 96, 5)), points()
    given = {"loss": "softmax_cross_entropy", "threads": 1}
    exact, rounded = (onnxtrain.Trainer(model, precision=compute, **given) for compute in ("float32", "bfloat16"))
    np.testing.assert_array_equal(rounded.predict(x), exact.predict(x))
    assert rounded.evaluate((x, y)) == exact.evaluate((x, y))


def test_a_training_model_says_it(anywhere):
    model = onnxtrain.examples.mlp((64, 96, 5))
    written = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer="adam", precision="bfloat16")
    assert ("onnxtrain.compute", "bfloat16") in {(entry.key, entry.value) for entry in written.metadata_props}
    onnx.checker.check_model(written)
    step = onnxtrain.lower(written, kernels=True)
    assert any(attribute.name == "compute" for node in step.graph.node for attribute in node.attribute)
    with pytest.raises(GradientError, match=r"asks for precision=.bfloat16."):
        onnxtrain.lower(written)
    default = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer="adam")
    assert all(entry.key != "onnxtrain.compute" for entry in default.metadata_props)


def refusal(**options):
    with pytest.raises(OptionError) as caught:
        onnxtrain.Trainer(onnxtrain.examples.mlp((64, 96, 5)), loss="softmax_cross_entropy", **options)
    return str(caught.value)


def test_a_cpu_without_the_instruction_is_refused(monkeypatch):
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(native, "instruction_set", lambda: "avx2")
    sentence = "precision='bfloat16' needs a CPU with AVX512-BF16; this one has avx2 without it"
    assert refusal(precision="bfloat16").startswith(sentence)


def test_a_session_without_kernels_is_refused():
    found = refusal(precision="bfloat16", runtime=onnxtrain.RuntimeOptions(kernels=False))
    assert found == "precision='bfloat16' needs the native kernels, which are not used here; leave it out."


def test_another_type_is_refused():
    assert refusal(precision="float16") == (
        "Precision: compute is 'float16'; it is 'float32' or 'bfloat16'. "
        "Models in float16 or bfloat16 train in float32 as they are."
    )
