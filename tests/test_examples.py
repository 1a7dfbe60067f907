import math

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onnxtrain import examples
from onnxtrain.errors import OptionError
from sentences import raises_sentence

TEXT = {
    "input_ids": np.array([[5, 7, 9, 11], [1, 2, 0, 0], [3, 0, 0, 0]]),
    "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]),
}


def images(*shape):
    return {"image": np.random.default_rng(0).random((3, *shape), np.float32)}


# Builder, its oldest opset, inputs of a batch of three, logits.
MODELS = {
    "mlp": (lambda **o: examples.mlp((6, 8, 5), **o), 7, {"input": np.eye(3, 6, dtype=np.float32)}, 5),
    "digits_cnn": (examples.digits_cnn, 11, images(1, 8, 8), 10),
    "lenet5": (examples.lenet5, 11, images(1, 28, 28), 10),
    "lenet5_caffe": (examples.lenet5_caffe, 11, images(1, 28, 28), 10),
    "lenet_300_100": (examples.lenet_300_100, 9, images(1, 28, 28), 10),
    "small_resnet": (examples.small_resnet, 9, images(3, 16, 16), 10),
    "small_transformer": (examples.small_transformer, 17, TEXT, 4),
}
# ONNX Runtime 1.31 has the operators of opset 26 and no later ones.
NEWEST = 26
ACTIVATIONS = {
    **dict.fromkeys(("relu", "leaky_relu", "elu", "selu", "sigmoid", "tanh", "softplus", "softsign"), 7),
    "hard_sigmoid": 7,
    "celu": 12,
    "hard_swish": 14,
    "mish": 18,
    "gelu": 20,
}


def run(model, feeds):
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], feeds)
    return logits


def weights(model, suffix):
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {name: array for name, array in tensors.items() if name.endswith(suffix)}


def test_every_public_model_is_covered():
    assert set(examples.__all__) == set(MODELS) | {"points"}


@pytest.mark.parametrize("name", MODELS)
def test_default_is_opset_18_ir_8_with_a_symbolic_batch(name):
    build, _, feeds, _ = MODELS[name]
    model = build()
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    assert model.ir_version == 8
    assert {value.name for value in model.graph.input} == set(feeds)
    for value in [*model.graph.input, *model.graph.output]:
        assert value.type.tensor_type.shape.dim[0].dim_param == "N"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("age", ["oldest", "default", "newest"])
def test_runs_at_its_opsets(name, age):
    build, oldest, feeds, classes = MODELS[name]
    logits = run(build(opset={"oldest": oldest, "default": 18, "newest": NEWEST}[age]), feeds)
    assert logits.shape == (3, classes)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    # Fresh weights neither vanish nor explode.
    assert 0.01 < logits.std() < 10


@pytest.mark.parametrize("name", MODELS)
def test_the_opset_does_not_change_the_function(name):
    build, oldest, feeds, _ = MODELS[name]
    np.testing.assert_allclose(run(build(opset=oldest), feeds), run(build(opset=NEWEST), feeds), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_refuses_opsets_that_lack_its_operators(name):
    build, oldest, _, _ = MODELS[name]
    with pytest.raises(OptionError, match=rf"{name}.* at opset {oldest - 1}; choose one from {oldest} to"):
        build(opset=oldest - 1)
    with pytest.raises(OptionError, match=r"at opset 1000; choose one from"):
        build(opset=1000)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name):
    build, *_ = MODELS[name]
    first, again, other = build(seed=1), build(seed=1), build(seed=2)
    assert first.SerializeToString() == again.SerializeToString()
    assert weights(first, "weight").keys() == weights(other, "weight").keys()
    for key, array in weights(first, "weight").items():
        assert not np.array_equal(array, weights(other, "weight")[key])


@pytest.mark.parametrize(("activation", "oldest"), ACTIVATIONS.items())
def test_mlp_activations(activation, oldest):
    feeds = MODELS["mlp"][2]
    logits = [run(examples.mlp((6, 8, 5), activation, opset=opset), feeds) for opset in (oldest, NEWEST)]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-6)
    if oldest > 7:
        with pytest.raises(OptionError, match=f"mlp with {activation} cannot be written at opset"):
            examples.mlp((6, 8, 5), activation, opset=oldest - 1)


def test_mlp_is_its_formula():
    model = examples.mlp((6, 8, 5), "tanh")
    matrices, biases = (list(weights(model, suffix).values()) for suffix in ("weight", "bias"))
    inputs = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    expected = np.tanh(inputs @ matrices[0].T + biases[0]) @ matrices[1].T + biases[1]
    np.testing.assert_allclose(run(model, {"input": inputs}), expected, atol=1e-6)


@pytest.mark.parametrize(("activation", "variance"), [("relu", 2 / 400), ("tanh", 2 / 700)])
def test_initialization_is_he_or_glorot(activation, variance):
    (weight,) = weights(examples.mlp((400, 300), activation), "weight").values()
    assert weight.var() == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize("sizes", [(), (4,), (4, 0)])
def test_mlp_refuses_sizes(sizes):
    with pytest.raises(OptionError, match=r"needs two or more positive layer sizes"):
        examples.mlp(sizes)


def test_mlp_refuses_an_unknown_activation():
    with raises_sentence("activation_option", what="activation", got="swoosh", known="relu"):
        examples.mlp((2, 2), "swoosh")


def test_transformer_refuses_heads_that_do_not_divide_the_width():
    with pytest.raises(OptionError, match=r"width is 32, which 5 heads cannot share"):
        examples.small_transformer(heads=5)


@pytest.mark.parametrize(
    ("name", "matrices", "vectors"),
    [
        ("digits_cnn", 25744, 122),
        ("lenet5", 61470, 236),
        ("lenet5_caffe", 430500, 580),
        ("lenet_300_100", 266200, 410),
    ],
)
def test_parameter_counts(name, matrices, vectors):
    tensors = [list(tensor.dims) for tensor in MODELS[name][0]().graph.initializer]
    assert sum(math.prod(shape) for shape in tensors if len(shape) > 1) == matrices
    assert sum(math.prod(shape) for shape in tensors if len(shape) == 1) == vectors


def test_resnet_has_inference_batch_normalization_and_any_resolution():
    model = examples.small_resnet(blocks=(2, 1), classes=3)
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert len(norms) == 8
    assert all(len(node.output) == 1 for node in norms)
    assert run(model, images(3, 20, 12)).shape == (3, 3)


def test_transformer_does_not_see_masked_tokens():
    model = examples.small_transformer()
    changed = TEXT | {"input_ids": np.where(TEXT["attention_mask"] == 1, TEXT["input_ids"], 42)}
    np.testing.assert_allclose(run(model, TEXT), run(model, changed), atol=1e-6)
    unmasked = changed | {"attention_mask": np.ones_like(TEXT["attention_mask"])}
    assert not np.allclose(run(model, TEXT)[1:], run(model, unmasked)[1:], atol=1e-3)
