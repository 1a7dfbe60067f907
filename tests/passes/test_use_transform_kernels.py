"""Samples at points, Fourier transforms and determinants on the native kernels: values, gradients, and what stays."""

import numpy as np
import onnx
import onnxruntime
import pytest
from test_use_norm_kernels import has, results

from onnxtrain import testing

RANDOM = np.random.default_rng(0)
GRID = RANDOM.uniform(-1.4, 1.4, (2, 5, 4, 2)).astype(np.float32)
MATRICES = np.stack([np.diag([3.0, 0.0, 1.0]), np.ones((3, 3)), RANDOM.normal(size=(3, 3))])
WINDOW = np.hanning(12)
NUMBERS = "<int64 step = {5}, int64 length = {12}>"


def text(x, y, body, numbers="", more="", opset=20):
    return f"""<ir_version: 9, opset_import: ["": {opset}]> f ({x} x{more}) => (float[] y) {numbers} {{ y = {body} }}"""


def sampled(attributes="", channels=3):
    shape = f"float[2, {channels}, 6, 7]"
    return text(shape, "y", f"GridSample <{attributes}> (x, grid)", more=", float[2, 5, 4, 2] grid")


def transformed(attributes, size, parts=1, axis=1, length=None, opset=20):
    shape, numbers = f"float[17, {size}, {parts}]", f"<int64 axis = {{{axis}}}, int64 length = {{{length}}}>"
    numbers = numbers if length else f"<int64 axis = {{{axis}}}>"
    return text(shape, "y", f"DFT <{attributes}> (x, {'length' if length else ''}, axis)", numbers, opset=opset)


def framed(attributes="", parts=1, window=True, samples=44):
    inputs = "x, step, window, length" if window else "x, step, , length"
    more = ", float[12] window" if window else ""
    return text(f"float[3, {samples}, {parts}]", "y", f"STFT <{attributes}> ({inputs})", NUMBERS, more)


TAKEN = {
    "GridSample": sampled(),
    "GridSample at borders": sampled('padding_mode = "border", align_corners = 1'),
    "GridSample reflected": sampled('padding_mode = "reflection"', channels=18),
    "GridSample reflected between centres": sampled('padding_mode = "reflection", align_corners = 1', channels=1),
    "DFT": transformed("", 15),
    "DFT of complex numbers": transformed("", 12, parts=2),
    "DFT inverse": transformed("inverse = 1", 14, parts=2),
    "DFT one-sided": transformed("onesided = 1", 20),
    "DFT longer": transformed("", 9, length=16),
    "DFT shorter, from the end": transformed("", 9, axis=-2, length=6),
    "STFT": framed(),
    "STFT two-sided, of complex numbers": framed("onesided = 0", parts=2),
    "STFT without a window": framed(window=False, samples=42),
}
LEFT = {
    "GridSample of nearest pixels": sampled('mode = "nearest"'),
    "GridSample of cubes": sampled('mode = "cubic"'),
    "DFT of a prime length": transformed("", 17),
    "DFT inverse, one-sided": transformed("onesided = 1, inverse = 1", 9, parts=2),
}


def lowered(case, text, kernels=True):
    proto = onnx.parser.parse_model(text.replace("<> ", ""))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {"grid": GRID, "window": WINDOW.astype(np.float32)}
    (shape,) = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input if v.name == "x"]
    feeds = {v.name: feeds[v.name] for v in proto.graph.input if v.name != "x"}
    feeds["x"] = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
    cotangent = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    return testing.projected_gradient(proto, list(feeds), {"y": cotangent}, kernels=kernels), expected, feeds


@pytest.mark.parametrize("case", TAKEN)
def test_values_are_those_of_the_operator(case):
    found, expected, feeds = lowered(case, TAKEN[case])
    plain, _, _ = lowered(case, TAKEN[case], kernels=False)
    assert {node.domain for node in found.graph.node if node.op_type in ("GridSample", "Fourier")} == {"onnxtrain"}
    assert not any(node.op_type in ("DFT", "STFT") for node in found.graph.node)
    assert has(plain.graph, case)
    (y, *ours), (_, *theirs) = results(found, feeds), results(plain, feeds)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=5e-5)  # ONNX Runtime errs more than the kernel
    for gradient, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("case", LEFT)
def test_others_stay(case):
    found = lowered(case, LEFT[case])[0]
    assert "" in {node.domain for node in found.graph.node if node.op_type == case.split()[0]}


def test_singular_matrices_have_cofactors():
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 20]> f (float[3, 3, 3] x) => (float[3] y) { y = Det (x) }"""
    )
    x, weights = MATRICES.astype(np.float32), np.array([1, -2, 0.5], np.float32)
    found, plain = (testing.projected_gradient(proto, ["x"], {"y": weights}, kernels=k) for k in (True, False))
    assert [node.op_type for node in found.graph.node if node.domain] == ["DetGradient"]
    ours, theirs = (results(each, {"x": x})[1] for each in (found, plain))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    np.testing.assert_allclose(ours[0], np.diag([0, 3, 0]), atol=1e-6)
