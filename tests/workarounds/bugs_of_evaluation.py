"""Reproductions of bugs of ONNX's reference evaluator."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from onnxtrain.autodiff.evaluator import evaluator
from workarounds.shown import model, shows

X = np.asarray([[0.5, -1.25, 2.0], [3.0, 0.75, -0.375]])


def _gives(
    make: Callable[[ModelProto], ReferenceEvaluator], proto: ModelProto, expected: object, **feeds: object
) -> bool:
    try:
        (found,) = make(proto).run(None, feeds)
    except Exception:
        return False
    array = np.asarray(found)
    return array.shape == np.shape(expected) and np.allclose(array, expected, rtol=1e-12, atol=0)


def is_wrong(text: str, expected: object, *, opset: int = 20, **feeds: object) -> bool:
    """Return whether ONNX's evaluator gives an unexpected result; the evaluator of gradient checks must not."""
    proto = model(text, opset)
    assert _gives(evaluator, proto, expected, **feeds)  # the workaround works
    return not _gives(ReferenceEvaluator, proto, expected, **feeds)


@shows("evaluated Scan")
def evaluated_scan() -> bool:
    attributes = "num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1]"
    text = f"""g (double[2,3] x) => (double[2,3] y)
        {{ y = Scan<{attributes}, body = b (double[2] i) => (double[2] j) {{ j = Neg(i) }}>(x) }}"""
    return is_wrong(text, -X, x=X)


@shows("evaluated Loop")
def evaluated_loop() -> bool:
    text = """g (double[2,3] x, int64 n, bool c) => (double[n,2,3] y)
        { y = Loop<body = b (int64 i, bool d) => (bool e, double[2,3] z) { e = Identity(d)  z = Neg(x) }>(n, c) }"""
    return is_wrong(text, np.stack([-X, -X]), x=X, n=np.asarray(2), c=np.asarray(True))


@shows("evaluated SequenceInsert")
def evaluated_sequence_insert() -> bool:
    text = """g (double[3] a, double[3] b) => (double[3] y) <int64 end = {1}, int64 last = {1}>
        { s = SequenceConstruct(a)  t = SequenceInsert(s, b, end)  y = SequenceAt(t, last) }"""
    return is_wrong(text, X[1], a=X[0], b=X[1])


@shows("evaluated SequenceMap")
def evaluated_sequence_map() -> bool:
    text = """g (double[3] a, double[3] b) => (double[3] y) <int64 first = {0}>
        { s = SequenceConstruct(a)  t = SequenceConstruct(b)
        u = SequenceMap<body = m (double[3] i, double[3] j) => (double[3] k) { l = Add(i, j)  k = Mul(l, b) }>(s, t)
        y = SequenceAt(u, first) }"""
    return is_wrong(text, (X[0] + X[1]) * X[1], a=X[0], b=X[1])


@shows("evaluated Optional")
def evaluated_optional() -> bool:
    text = "g (double[2,3] x) => (double[2,3] y) { o = Optional(x)  y = OptionalGetElement(o) }"
    return is_wrong(text, X, x=X)


@shows("evaluated Erf")
def evaluated_erf() -> bool:
    values = np.vectorize(math.erf)(X)
    erf = is_wrong("g (double[2,3] x) => (double[2,3] y) { y = Erf(x) }", values, x=X)
    scaled = np.vectorize(math.erf)(X / math.sqrt(2))
    gelu = is_wrong("g (double[2,3] x) => (double[2,3] y) { y = Gelu(x) }", X * (1 + scaled) / 2, x=X)
    return erf or gelu


@shows("evaluated GridSample")
def evaluated_grid_sample() -> bool:
    text = "g (double[1,1,2,3] x, double[1,1,1,2] p) => (double[1,1,1,1] y) { y = GridSample<align_corners = 1>(x, p) }"
    column, row = 0.1, -0.7  # as doubles, between the pixels
    across, down = (column + 1) / 2 * 2, (row + 1) / 2
    left = int(across)
    rows = X[:, left] * (1 - (across - left)) + X[:, left + 1] * (across - left)
    expected = np.full((1, 1, 1, 1), rows[0] * (1 - down) + rows[1] * down)
    return is_wrong(text, expected, x=X[None, None], p=np.asarray([column, row]).reshape(1, 1, 1, 2))


@shows("evaluated LpNormalization")
def evaluated_lp_normalization() -> bool:
    text = "g (double[2,3] x) => (double[2,3] y) { y = LpNormalization<p = 1>(x) }"
    return is_wrong(text, X / np.abs(X).sum(axis=1, keepdims=True), x=X)


@shows("evaluated ConvTranspose")
def evaluated_conv_transpose() -> bool:
    text = "g (double[2,2,3] x, double[2,2,1] w) => (double[2,4,3] y) { y = ConvTranspose<group = 2>(x, w) }"
    x, w = np.stack([X, 2 - X]), np.asarray([[2.0, -3.0], [0.5, 4.0]])
    expected = (x[:, :, None] * w[None, :, :, None]).reshape(2, 4, 3)
    return not _gives(ReferenceEvaluator, model(text), expected, x=x, w=w[:, :, None])
