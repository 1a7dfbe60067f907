"""Norms of windows and normalization by near channels, written as sums: values, gradients, and what stays."""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxtrain import custom_ops_library, testing

X = np.random.default_rng(0).normal(size=(2, 5, 9, 8)).astype(np.float32)

TAKEN = {
    "LpPool": "kernel_shape = [2, 2], strides = [2, 2]",
    "LpPool of absolute values": "kernel_shape = [3, 2], p = 1, pads = [1, 0, 1, 1]",
    "LpPool with padding": "kernel_shape = [3, 3], strides = [2, 1], pads = [1, 2, 0, 1]",
    "LpPool of the same size": 'kernel_shape = [3, 2], auto_pad = "SAME_UPPER", strides = [2, 2]',
    "LpPool dilated": "kernel_shape = [2, 3], dilations = [3, 2]",
    "GlobalLpPool": "p = 2",
    "GlobalLpPool of absolute values": "p = 1",
    "LRN": "size = 3",
    "LRN with a root": "size = 5, alpha = 0.5, beta = 0.5, bias = 2.0",
    "LRN of more channels": "size = 7, alpha = 0.3, beta = 0.75",
    "LRN with a power": "size = 9, alpha = 0.3, beta = 1.3",
}
LEFT = {
    "LpPool of cubes": "kernel_shape = [2, 2], p = 3",
    "LpPool of parts": "kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1",
    "GlobalLpPool of cubes": "p = 3",
}


def lowered(case, attributes, x=X, kernels=True):
    operator, kind = case.split()[0], {"float32": "float", "float64": "double"}[str(x.dtype)]
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> f ({kind}[2, 5, 9, 8] x) => ({kind}[] y)
        {{ y = {operator} <{attributes}> (x) }}"""
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    cotangent = np.random.default_rng(1).normal(size=expected.shape).astype(x.dtype)
    return testing.projected_gradient(proto, ["x"], {"y": cotangent}, kernels=kernels), expected


def has(graph, case):
    return case.split()[0] in {node.op_type for node in graph.node}


def results(proto, feeds):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)


@pytest.mark.parametrize("case", TAKEN)
def test_values_are_those_of_the_operator(case):
    found, expected = lowered(case, TAKEN[case])
    plain, _ = lowered(case, TAKEN[case], kernels=False)
    assert not has(found.graph, case)
    assert has(plain.graph, case)
    y, gradient = results(found, {"x": X})
    np.testing.assert_allclose(y, expected, rtol=3e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, results(plain, {"x": X})[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", LEFT)
def test_others_stay(case):
    assert has(lowered(case, LEFT[case])[0].graph, case)


@pytest.mark.parametrize("case", ["LpPool", "GlobalLpPool"])
def test_the_gradient_of_zeros_is_zero(case):
    found, _ = lowered(case, TAKEN[case])
    y, gradient = results(found, {"x": np.zeros_like(X)})
    assert not y.any()
    assert not gradient.any()
