"""Layers at zero variance, zero norm, ties, in half precision; errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from test_special_elementwise import gradients

from autodiff.case import normal
from onnxtrain.errors import GradientError
from onnxtrain.runtime.testing import projected_gradient

ONES = np.ones((1, 2, 4))
PER_CHANNEL = (np.ones(2), np.zeros(2))

CONSTANT_INPUTS: list[tuple[str, tuple[Any, ...], dict[str, Any], int]] = [
    ("LayerNormalization", (ONES, np.ones(4)), {}, 18),
    ("RMSNormalization", (0 * ONES, np.ones(4)), {}, 23),
    ("InstanceNormalization", (ONES, *PER_CHANNEL), {}, 18),
    ("GroupNormalization", (ONES, *PER_CHANNEL), {"num_groups": 2}, 21),
]


@pytest.mark.parametrize(("operator", "inputs", "attributes", "opset"), CONSTANT_INPUTS)
def test_equal_elements_leave_the_gradient_finite(
    operator: str, inputs: tuple[Any, ...], attributes: dict[str, Any], opset: int
) -> None:
    dy = np.array([[[1.0, -1.0, 2.0, -2.0], [0.0, 3.0, -3.0, 0.0]]])
    (dx,) = gradients(operator, *inputs, dy=dy, opset=opset, **attributes)
    assert np.isfinite(dx).all()
    # x - mean is zero, so that what is left of dx is dy over the deviation.
    np.testing.assert_allclose(dx / dx[0, 0, 0], dy / dy[0, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("p", [1, 2])
def test_a_zero_vector_has_no_direction(p: int) -> None:
    (dx,) = gradients("LpNormalization", [[0.0, 0.0], [3.0, 4.0]], dy=[[1.0, 2.0], [1.0, 0.0]], p=p)
    assert dx[0].tolist() == [0, 0]
    assert dx[1].any()


def test_the_first_of_equal_maxima_takes_the_gradient_of_a_global_pool() -> None:
    (dx,) = gradients("GlobalMaxPool", [[[1.0, 2.0, 2.0, 0.0]]])
    assert dx.tolist() == [[[0, 1, 0, 0]]]


def test_the_gradient_of_a_global_norm_is_zero_at_zero() -> None:
    (dx,) = gradients("GlobalLpPool", [[[0.0, 0.0], [3.0, 4.0]]], p=2)
    np.testing.assert_allclose(dx, [[[0, 0], [0.6, 0.8]]], rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("operator", ["Conv", "MatMul", "Gemm"])
def test_an_empty_batch_has_an_empty_gradient(operator: str, axis: int) -> None:
    shapes = {"Conv": ((0, 2, 3, 3), (2, 2, 2, 2)), "MatMul": ((0, 3), (3, 2)), "Gemm": ((0, 3), (3, 2))}
    inputs = [normal(*shape) for shape in shapes[operator]]
    (gradient,) = gradients(operator, *inputs, wrt=[axis])
    assert gradient.shape == inputs[axis].shape
    assert not gradient.any()


def test_layer_normalization_in_half_precision_agrees_with_single() -> None:
    x, scale, dy = normal(4, 8), normal(8, seed=1), normal(4, 8, seed=2)
    results = []
    for dtype in (np.float16, np.float32):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        infos = [helper.make_tensor_value_info(n, kind, a.shape) for n, a in (("x", x), ("scale", scale))]
        node = helper.make_node("LayerNormalization", ["x", "scale"], ["y"])
        output = helper.make_tensor_value_info("y", kind, x.shape)
        graph = helper.make_graph([node], "half", infos, [output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        built = projected_gradient(model, ["x", "scale"], {"y": dy.astype(dtype)})
        session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = {"x": x.astype(dtype), "scale": scale.astype(dtype)}
        results.append(session.run(["x_grad", "scale_grad"], feeds))
    for half, single in zip(*results, strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, single, atol=2e-2)


REFUSED: list[tuple[str, list[tuple[int, ...]], dict[str, Any], str]] = [
    ("Conv", [(1, 2, 3, 3), (2, 2, 2, 2)], {}, "needs the rank of 'a'"),
    ("Einsum", [(2, 3, 3)], {"equation": "...ii->...i"}, "needs the rank of 'a'"),
    ("LayerNormalization", [(2, 3, 4), (3, 4)], {"axis": 1}, "needs the rank of 'a'"),
    ("DeformConv", [(1, 1, 3, 3), (1, 1, 2, 2), (1, 8, 2, 2)], {}, "the kernel is of unknown size; set kernel_shape"),
]


@pytest.mark.parametrize(("operator", "shapes", "attributes", "message"), REFUSED)
def test_missing_shapes_are_reported(
    operator: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], message: str
) -> None:
    names = ["abc"[i] for i in range(len(shapes))]
    infos = [helper.make_tensor_value_info(n, 1, s) for n, s in zip(names, shapes, strict=True)]
    node = helper.make_node(operator, names, ["y"], **attributes)
    graph = helper.make_graph([node], "refused", infos, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    with pytest.raises(GradientError, match=message):
        projected_gradient(model, names, {"y": np.ones(())}, shapes="unknown")
