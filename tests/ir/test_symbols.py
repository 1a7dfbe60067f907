"""Sizes that exporters compute in the graph are followed; unknown ones stay open."""

from __future__ import annotations

import sys

import onnx_ir as ir
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions

HEADER = '<ir_version: 8, opset_import: ["": 18]>'
CONSTANTS = "<int64 zero = {0}, int64 one = {1}, int64[1] first = {0}, int64[1] minus = {-1}, int64[1] four = {4}>"


def shapes(text: str, inputs: str = "float[batch, seq, 8] x, float[batch, seq, 8] other") -> dict[str, tuple]:
    model = ir.from_proto(parser.parse_model(f"{HEADER} g ({inputs}) => (y) {CONSTANTS} {{ {text} }}"))
    infer_shapes(model)
    return {output.name: dimensions(output) for node in model.graph for output in node.outputs}


TAKEN_APART = "s = Shape(x) b = Gather(s, zero) n = Gather(s, one) b1 = Unsqueeze(b, first) n1 = Unsqueeze(n, first) "


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (TAKEN_APART + "t = Concat<axis=0>(b1, n1, four, minus) y = Reshape(x, t)", ("batch", "seq", 4, 2)),
        (TAKEN_APART + "t = Concat<axis=0>(minus, n1, four) y = Reshape(x, t)", (None, "seq", 4)),
        (TAKEN_APART + "t = Concat<axis=0>(b1, minus) y = Reshape(x, t)", ("batch", None)),
        (TAKEN_APART + "t = Concat<axis=0>(b1, four) y = ConstantOfShape(t)", ("batch", 4)),
        (TAKEN_APART + "y = Range(zero, n, one)", ("seq",)),
        ("s = Shape(x) t = Slice(s, first, four) u = Mul(t, one) y = ConstantOfShape(u)", ("batch", "seq", 8)),
        ("s = Shape(x) t = Slice(s, first, four) u = Div(t, one) y = ConstantOfShape(u)", ("batch", "seq", 8)),
        (
            TAKEN_APART + "e = Div(four, four) t = Concat<axis=0>(b1, n1, e, minus) y = Reshape(x, t)",
            ("batch", "seq", 1, 8),
        ),
        ("s = Shape(x) t = Add(s, zero) y = Reshape(other, t)", ("batch", "seq", 8)),
        ("a = Reshape(x, four) y = Add(a, a)", (4,)),
        # A slice up to a computed size is no list of sizes, and another slice of it is not taken for one either.
        (
            "n = Shape<start = 2>(x) t = Slice(x, first, n, first) c = ConstantOfShape(four) n4 = Shape(c)"
            " u = Slice(t, first, n4, minus) y = Identity(u)",
            (None, "seq", 4),
        ),
        (
            "s = Shape(x) three = Shape(s) filled = ConstantOfShape<value = int64[1] {1}>(three)"
            " m = Mul(filled, minus) e = Equal(s, m) t = Where(e, filled, s) y = Expand(x, t)",
            ("batch", "seq", 8),
        ),
    ],
)
def test_computed_shapes(text: str, shape: tuple) -> None:
    found = shapes(text)["y"]
    assert len(found) == len(shape)
    for got, expected in zip(found, shape, strict=True):
        assert got == expected if expected is not None else got not in ("batch", "seq", 8)


def test_what_follows_from_a_resolved_size_is_resolved() -> None:
    found = shapes(
        TAKEN_APART
        + "t = Concat<axis=0>(b1, n1, four, minus) heads = Reshape(x, t) turned = Transpose<perm=[0,2,1,3]>(heads)"
        " other_heads = Reshape(other, t) keys = Transpose<perm=[0,2,3,1]>(other_heads) y = MatMul(turned, keys)"
    )
    assert found["y"] == ("batch", 4, "seq", "seq")


def test_different_symbols_stay_different() -> None:
    found = shapes("y = Add(x, other)", "float[a, 8] x, float[b, 8] other")
    assert found["y"][0] not in ("a", "b")


def test_attention_needs_no_computed_axes() -> None:
    """Gradient of attention scores: inference proves that no axis was broadcast."""
    model = parser.parse_model(
        f"{HEADER} g (float[batch, seq, 8] x, float[batch, seq, 8] other) => (float y) {CONSTANTS} {{ {TAKEN_APART}"
        " t = Concat<axis=0>(b1, n1, four, minus) heads = Reshape(x, t) keys = Reshape(other, t)"
        " turned = Transpose<perm=[0,2,1,3]>(heads) columns = Transpose<perm=[0,2,3,1]>(keys)"
        " scores = MatMul(turned, columns) squares = Mul(scores, scores) y = ReduceSum<keepdims=0>(squares) }"
    )
    operators = [node.op_type for node in onnxtrain.gradient(model, xs=["x", "other"]).graph.node]
    assert "NonZero" not in operators
    assert operators.count("MatMul") == 3


@pytest.mark.parametrize(
    ("rest", "inferences", "last"),
    [
        ("y = Flatten<axis = 2>(heads)", 1, None),  # batch times seq has no name: another inference finds none, either
        ("y = Transpose<perm=[0,2,1,3]>(heads)", 1, ("batch", 4, "seq", 2)),
        ("y = Concat<axis = 2>(heads, heads)", 1, ("batch", "seq", 8, 2)),
        ("y = MaxPool<kernel_shape=[2, 2]>(heads)", 2, ("batch", "seq", 3, 1)),  # ONNX infers these sizes
    ],
)
def test_onnx_infers_again_where_it_may_find_more(rest, inferences, last, monkeypatch) -> None:
    module = sys.modules[infer_shapes.__module__]
    models = []
    infer = module.infer_within_bounds
    monkeypatch.setattr(module, "infer_within_bounds", lambda proto: models.append(proto) or infer(proto))
    text = TAKEN_APART + "t = Concat<axis=0>(b1, n1, four, minus) heads = Reshape(x, t) "
    found = shapes(text + rest)["y"]
    assert len(models) == inferences
    assert last is None or found == last
