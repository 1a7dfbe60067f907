"""Batch normalization of frozen layers becomes part of the convolution before it; that of trained ones stays."""

import numpy as np
import pytest
from onnx import numpy_helper, parser
from ways import assert_same_results, operators, operators_of_step, passed, trained_both_ways

import onnxtrain
from onnxtrain.lowering.rules.batch_norm import fold_batch_norm

RANDOM = np.random.default_rng(0)
TENSORS = {
    "w": RANDOM.normal(size=(4, 1, 3, 3)),
    "b": RANDOM.normal(size=4),
    "scale": RANDOM.normal(1, 0.3, 4),
    "offset": RANDOM.normal(size=4),
    "mean": RANDOM.normal(size=4),
    "variance": RANDOM.uniform(0.1, 2, 4),
    "g": np.array([1.0, 0.5, -1.0, 2.0]).reshape(4, 1, 1),
}
CONV = "c = Conv <group = 2, pads = [1, 1, 1, 1]> (h, w{bias}) "
NORM = "n = BatchNormalization <epsilon = 0.01> (c, scale, offset, mean, variance) "


def model(nodes, more=""):
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> f (float[n, 2, 5, 5] x) => (float[n, 4, 5, 5] y{more}) {{ {nodes} }}'
    )
    proto.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in TENSORS.items() if name in nodes
    )
    return proto


X = RANDOM.normal(size=(3, 2, 5, 5)).astype(np.float32)


@pytest.mark.parametrize("bias", ["", ", b"])
def test_the_normalization_of_a_convolution_is_gone(bias):
    given = model(f"h = Abs(x) {CONV.format(bias=bias)}{NORM}y = Relu(n)")
    found = passed(given, fold_batch_norm)
    assert operators(found) == ["Abs", "Conv", "Relu"]
    assert_same_results(given, found, {"x": X}, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (CONV.format(bias="").replace("(h", "(x") + NORM + "y = Add(n, c)", "others read the convolution"),
        (NORM.replace("(c,", "(d,").replace("n =", "y =") + "", "there is no convolution"),
        (
            CONV.format(bias="").replace("(h, w", "(x, v") + "v = Neg(w) " + NORM + "y = Neg(n)",
            "the weight is computed",
        ),
    ],
)
def test_others_stay(nodes, reason):
    if "v = Neg(w)" in nodes:
        nodes = "v = Neg(w) " + nodes.replace("v = Neg(w) ", "")
    if "(d," in nodes:
        nodes = "d = Concat <axis = 1> (x, x) " + nodes
    given = model(nodes)
    assert operators(passed(given, fold_batch_norm)) == operators(given), reason


def test_a_convolution_that_is_an_output_stays():
    given = model(CONV.format(bias="").replace("(h", "(x") + NORM + "y = Relu(n)", more=", float[n, 4, 5, 5] c")
    assert "BatchNormalization" in operators(passed(given, fold_batch_norm))


NODES = f"h = Abs(x) {CONV.format(bias='')}{NORM}r = Relu(n) y = Mul(r, g)"


def test_a_frozen_backbone_has_no_normalization_and_trains_as_without_kernels():
    target = np.ones((3, 4, 5, 5), np.float32)
    (plain_losses, plain), (losses, trainer) = trained_both_ways(model(NODES), "g", X, target)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert "BatchNormalization" not in operators_of_step(trainer)
    assert "BatchNormalization" in operators_of_step(plain)
    np.testing.assert_allclose(trainer.predict(X), plain.predict(X), atol=1e-5)


@pytest.mark.parametrize("trained", ["w", "scale"])
def test_a_trained_layer_keeps_its_normalization(trained):
    trainer = onnxtrain.Trainer(
        model(NODES), loss="mean_squared_error", train=[trained, "g"], runtime=onnxtrain.RuntimeOptions(kernels=True)
    )
    trainer.train_step(X, np.ones((3, 4, 5, 5), np.float32))
    assert "BatchNormalization" in operators_of_step(trainer)


@pytest.mark.parametrize(("pixels", "folds"), [(5, True), (1, False)])
def test_weights_that_are_larger_than_their_result_are_not_copied(pixels, folds):
    given = model((CONV.format(bias="").replace("(h", "(x") + NORM + "y = Relu(n)").replace("5, 5", "5"))
    for value in (given.graph.input[0], given.graph.output[0]):
        for axis in (2, 3):
            value.type.tensor_type.shape.dim[axis].dim_value = pixels
    assert ("BatchNormalization" not in operators(passed(given, fold_batch_norm))) == folds
