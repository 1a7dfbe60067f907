"""Gradients of a softmax whose NaN the model replaces."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.build_gradients import build_gradients
from onnxtrain.lowering.pipeline import lower_graph

INF = np.float32(np.inf)
X = np.asarray([[0.5, -1, 2], [-INF, -INF, -INF], [1, -INF, 0]], np.float32)
W = np.asarray([[1, 2, -1], [3, 1, 1], [0.5, 1, 2]], np.float32)
GRADIENT = 'dx = ai.onnx.preview.training.Gradient<xs = ["x"], y = "y">(x)'
IMPORTS = '<ir_version: 10, opset_import: ["": 18, "ai.onnx.preview.training": 1]>'
GIVEN = "<float zero = {0}, float half = {0.5}, float[3, 3] zeros = {0, 0, 0, 0, 0, 0, 0, 0, 0}>"
REPLACED = {
    "by zero": "e = IsNaN(p) c = Where(e, zero, p)",
    "by zeros": "e = IsNaN(p) c = Where(e, zeros, p)",
    "by a mask": "low = ReduceMax<keepdims = 1>(x, last) e = IsInf(low) c = Where(e, zero, p)",
    "behind a cast": "low = ReduceMax<keepdims = 1>(x, last) e = IsInf(low) d = Cast<to = 1>(p) c = Where(e, zero, d)",
    "by a half": "e = IsNaN(p) c = Where(e, half, p)",
}


def model(body: str, gradient: str = GRADIENT) -> ir.Model:
    text = f"{IMPORTS} f (float[3, 3] x, float[3, 3] w) => (float[3, 3] dx) {GIVEN} {{ {body} {gradient} }}"
    return infer_shapes(ir.from_proto(parser.parse_model(text)))


def lowered(body: str, gradient: str = GRADIENT) -> onnx.ModelProto:
    return ir.to_proto(lower_graph(model(body, gradient)))


def run(proto: onnx.ModelProto) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return ReferenceEvaluator(proto).run(None, {"x": X, "w": W})[0]


def expected() -> np.ndarray:
    """dx = p (w - sum w p), and zeros in the row without a number."""
    with np.errstate(invalid="ignore"):
        p = np.exp(X - X.max(1, keepdims=True))
        p = np.nan_to_num(p / p.sum(1, keepdims=True))
    return p * (W - (W * p).sum(1, keepdims=True))


@pytest.mark.parametrize("replaced", REPLACED)
def test_rows_without_a_number_have_a_gradient_of_zero(replaced):
    body = f"last = Constant<value_ints = [-1]>() p = Softmax<axis = -1>(x) {REPLACED[replaced]} l = Mul(c, w)"
    np.testing.assert_allclose(run(lowered(f"{body} y = ReduceSum<keepdims = 0>(l)")), expected(), atol=1e-6)


def test_what_the_model_makes_of_it_is_read_and_not_made_again():
    body = f"p = Softmax<axis = -1>(x) {REPLACED['by zero']} l = Mul(c, w) y = ReduceSum<keepdims = 0>(l)"
    assert [node.op_type for node in lowered(body).graph.node].count("IsNaN") == 1


@pytest.mark.parametrize("body", ["c = Identity(p)", "e = IsNaN(p) h = Cast<to = 1>(e) c = Add(p, h)"])
def test_nan_stays_where_the_model_does_not_replace_it(body):
    found = run(lowered(f"p = Softmax<axis = -1>(x) {body} l = Mul(c, w) y = ReduceSum<keepdims = 0>(l)"))
    assert np.isnan(found[1]).all()
    np.testing.assert_allclose(found[[0, 2]], expected()[[0, 2]], atol=1e-6)


def test_in_a_branch():
    inside = f"{{ p = Softmax<axis = -1>(x) {REPLACED['by zero']} l = Mul(c, w) }}"
    branches = f"then_branch = g () => (float[3, 3] l) {inside}, else_branch = h () => (float[3, 3] m) {{ m = Abs(x) }}"
    body = f"t = Constant<value_int = 1>() b = Cast<to = 9>(t) k = If<{branches}>(b) y = ReduceSum<keepdims = 0>(k)"
    np.testing.assert_allclose(run(lowered(body)), expected(), atol=1e-6)


def test_in_a_second_derivative():
    """The second gradient goes through the nodes of the first: its row that is masked is zero, not NaN."""
    first = GRADIENT.replace("dx", "d")
    second = GRADIENT.replace('y = "y"', 'y = "z"')
    text = (
        f"p = Softmax<axis = -1>(x) {REPLACED['by zero']} l = Mul(c, w) y = ReduceSum<keepdims = 0>(l) {first} "
        f"s = Mul(d, w) z = ReduceSum<keepdims = 0>(s) {second}"
    )
    found = run(lowered(text, gradient=""))
    assert not np.isnan(found).any()
    np.testing.assert_array_equal(found[1], np.zeros(3))
    assert np.abs(found[0]).max() > 0.1


def test_what_is_emitted_counts_as_carrying_a_gradient():
    """Passes that recompute nodes in the backward pass rely on it."""
    made = model(
        f"last = Constant<value_ints = [-1]>() p = Softmax<axis = -1>(x) {REPLACED['by a mask']} "
        "l = Mul(c, w) y = ReduceSum<keepdims = 0>(l)"
    )
    (backward,) = build_gradients(made)
    emitted = backward.nodes[-2:]
    assert [node.op_type for node in emitted] == ["IsNaN", "Where"]
    assert {*emitted} <= {*made.graph}
