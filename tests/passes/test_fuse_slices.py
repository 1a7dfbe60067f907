"""Slices that cut a tensor into consecutive parts become one Split; others stay."""

import numpy as np
import pytest
from onnx import parser
from ways import assert_same_results, operators, operators_of_step, passed, trained_both_ways

from onnxtrain.lowering.rules.rows import fuse_slices

CONSTANTS = (
    "int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4}, int64[1] six = {6}, int64[1] last = {-1}, "
    "int64[1] far = {9223372036854775807}, int64 end = {-1}, int64[1] three = {3}, int64[1] rows = {1}, "
    "float[6] g = {1, -2, 0.5, 3, -1, 2}"
)
COMPUTED = "shape = Shape(h) width = Gather(shape, last) third = Div(width, three) twice = Add(third, third) "
WAYS = {
    "constants": "a = Slice(h, zero, two, last) b = Slice(h, two, four, last) c = Slice(h, four, far, last) ",
    "bounds of a shape": COMPUTED
    + "a = Slice(h, zero, third, last) b = Slice(h, third, twice, last) c = Slice(h, twice, width, last) ",
    "in any order, one twice": "c = Slice(h, four, six, last) b = Slice(h, two, four, last) "
    "a0 = Slice(h, zero, two, last) a1 = Slice(h, zero, two, last) a = Add(a0, a1) ",
}
END = "p = Mul(a, b) y = Add(p, c)"


def model(nodes, more=""):
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> f (float[n, 3, 6] x) => (float[n, 3, 2] y{more}) <{CONSTANTS}> '
        f"{{ h = Mul(x, g) {nodes} }}"
    )


X = np.random.default_rng(0).normal(0, 0.2, (5, 3, 6)).astype(np.float32)


def test_slices_of_a_slice_are_a_split_of_a_split():
    given = model(
        "a = Slice(h, zero, four, last) c = Slice(h, four, far, last) "
        "a0 = Slice(a, zero, two, last) b = Slice(a, two, four, last) p = Mul(a0, b) y = Add(p, c)"
    )
    found = passed(given, fuse_slices)
    assert operators(found).count("Split") == 2
    assert "Slice" not in operators(found)
    assert_same_results(given, found, {"x": X}, atol=0)


@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_consecutive_slices_are_one_split(nodes):
    given = model(nodes + END)
    found = passed(given, fuse_slices)
    assert operators(found).count("Split") == 1
    assert "Slice" not in operators(found)
    assert_same_results(given, found, {"x": X}, atol=0)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("a = Slice(h, zero, two, last) b = Slice(h, two, four, last) y = Mul(a, b)", "the end is left out"),
        ("a = Slice(h, two, four, last) b = Slice(h, four, far, last) y = Mul(a, b)", "the begin is left out"),
        (
            "a = Slice(h, zero, four, last) b = Slice(h, two, far, last) c = Mul(a, b) y = Slice(c, two, far, last)",
            "they overlap",
        ),
        (
            "a = Slice(h, zero, two, last) i = Neg(h) b = Slice(i, two, far, last) "
            "c = Slice(b, two, far, last) y = Mul(a, c)",
            "of two tensors",
        ),
        ("a = Slice(h, zero, far, last, three) b = Slice(h, two, far, last, three) y = Mul(a, b)", "every third"),
    ],
)
def test_others_stay(nodes, reason):
    assert "Split" not in operators(passed(model(nodes), fuse_slices)), reason


def test_outputs_stay():
    found = passed(model(WAYS["constants"] + END, more=", float[n, 3, 2] b"), fuse_slices)
    assert operators(found).count("Slice") == 3


@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_training_is_as_without_kernels(nodes):
    (plain_losses, _), (losses, trainer) = trained_both_ways(model(nodes + END), "g", X, np.ones((5, 3, 2), np.float32))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    step = operators_of_step(trainer)
    assert "Pad" not in step
    assert "Concat" in step
