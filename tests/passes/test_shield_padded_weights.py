"""Padded weights of convolutions, which ONNX Runtime's optimizer would fuse as padded inputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.rules.convolutions import shield_padded_weights

HEAD = '<ir_version: 8, opset_import: ["": 18]> g'
PADS = "<int64[8] p = {0, 0, 0, 0, 0, 0, 1, 1}>"


def shielded(body: str, weight: str = "float[2,3,2,2] w") -> onnx.ModelProto:
    text = f"{HEAD} (float[1,3,5,5] x, {weight}) => (float[1,2,a,b] y) {PADS} {{ {body} }}"
    model = infer_shapes(ir.from_proto(onnx.parser.parse_model(text)))
    shield_padded_weights(model)
    return ir.to_proto(model)


@pytest.mark.parametrize(
    ("weight", "body"),
    [
        ("float[2,3,2,2] w", "q = Pad(w, p)  y = Conv(x, q)"),
        ("float[3,2,2,2] w", "q = Pad(w, p)  t = Transpose<perm = [1, 0, 2, 3]>(q)  y = Conv(x, t)"),
    ],
)
def test_values_stay(weight: str, body: str) -> None:
    generator = np.random.default_rng(0)
    shape = (2, 3, 2, 2) if weight.startswith("float[2,3") else (3, 2, 2, 2)
    feeds = {"x": generator.normal(size=(1, 3, 5, 5)), "w": generator.normal(size=shape)}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    model = shielded(body, weight)
    expected = onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0]
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_padded_inputs_are_left_to_the_optimizer() -> None:
    assert [node.op_type for node in shielded("q = Pad(x, p)  y = Conv(q, w)").graph.node] == ["Pad", "Conv"]


@pytest.mark.parametrize("strides", [1, 2, 3])
@pytest.mark.parametrize("size", [7, 8])
def test_second_gradients_of_convolutions_with_strides(strides: int, size: int) -> None:
    text = f"""{HEAD} (float[1,1,{size},{size}] x) => (float y) <float[1,1,3,3] w = {{1,2,3,4,5,6,7,8,9}}>
        {{ c = Conv<strides = [{strides}, {strides}]>(x, w)  y = ReduceSumSquare<keepdims = 0>(c) }}"""
    model = onnxtrain.hessian_vector_product(onnx.parser.parse_model(text), "y", "w")
    x = np.random.default_rng(0).normal(size=(1, 1, size, size)).astype(np.float32)
    w = np.arange(1, 10, dtype=np.float32).reshape(1, 1, 3, 3)
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "w_vector": w})
    # The loss is quadratic in w: H w is the gradient at w.
    np.testing.assert_allclose(found[2], found[1], rtol=1e-4, atol=1e-3)
