"""Wrong symbolic dimensions: axes that share a name are not treated as equal."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxtrain

HEADER = '<ir_version: 10, opset_import: ["" : 18]>'
PRODUCT = "{ q = Mul(x, w) s = Mul(q, q) y = ReduceSum<keepdims=0>(s) }"


def shapes(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, tuple[int, ...]]:
    built = onnxtrain.gradient(model, "y", ["x", "w"])
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: value.shape for name, value in zip(names, session.run(names, feeds), strict=True)}


def named(model: onnx.ModelProto, name: str | int) -> onnx.ModelProto:
    """Give all axes of a model's inputs the same name."""
    for info in model.graph.input:
        for axis in info.type.tensor_type.shape.dim:
            if isinstance(name, int):
                axis.dim_value = name
            else:
                axis.dim_param = name
    return model


@pytest.mark.parametrize("name", ["?", "-1", "", "None", "unknown", "*", "unk__3", -1])
def test_axes_without_a_name_need_not_be_equal(name: str | int) -> None:
    model = named(parser.parse_model(f"{HEADER} g (float[a,b] x, float[c,d] w) => (float y) {PRODUCT}"), name)
    found = shapes(model, x=np.ones((3, 1), np.float32), w=np.ones((1, 2), np.float32))
    assert (found["x_grad"], found["w_grad"]) == ((3, 1), (1, 2))


def test_axes_without_a_name_in_bodies_need_not_be_equal() -> None:
    text = (
        f"{HEADER} g (float[3,1] x, float[1,2] w, bool c) => (float y)"
        " { z = If(c) <then_branch = t () => (float[a,b] p) { p = Mul(x, w) },"
        " else_branch = e () => (float[f,g] r) { r = Add(x, w) }>"
        " s = Mul(z, z) y = ReduceSum<keepdims=0>(s) }"
    )
    model = parser.parse_model(text.replace("a,b", "?,?").replace("f,g", "?,?"))
    found = shapes(model, x=np.ones((3, 1), np.float32), w=np.ones((1, 2), np.float32), c=np.array(True))
    assert (found["x_grad"], found["w_grad"]) == ((3, 1), (1, 2))


def test_a_name_with_two_sizes_names_none() -> None:
    """The values ``a`` and ``b`` prove that the exporter called every axis n; x and w broadcast."""
    model = parser.parse_model(
        f"{HEADER} g (float[n] x, float[n] w) => (float y)"
        "<float[2] two = {1, 2}, float[3] three = {1, 2, 3}, float[n] a, float[n] b>"
        "{ a = Neg(two) b = Neg(three) q = Mul(x, w) s = Mul(q, q) t = ReduceSum<keepdims=0>(s)"
        " u = ReduceSum<keepdims=0>(a) v = ReduceSum<keepdims=0>(b) y = Sum(t, u, v) }"
    )
    found = shapes(model, x=np.ones(1, np.float32), w=np.ones(5, np.float32))
    assert (found["x_grad"], found["w_grad"]) == ((1,), (5,))


def test_names_of_one_size_stay_equal() -> None:
    model = parser.parse_model(f"{HEADER} g (float[n,4] x, float[n,4] w) => (float y) {PRODUCT}")
    built = onnxtrain.gradient(model, "y", ["x", "w"])
    assert "NonZero" not in {node.op_type for node in built.graph.node}
