"""Numbers, arrays and indices as operands: NumPy's results, or an error of one sentence."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from onnxtrain.errors import OperatorError
from onnxtrain.graph import Builder
from onnxtrain.runtime.testing import check_gradient
from sentences import raises_sentence

X = (np.arange(2 * 3 * 4 * 5, dtype=np.float64) % 17 / 7 + 0.1).reshape(2, 3, 4, 5)


def model(function, x: np.ndarray, *, static: bool = True) -> onnx.ModelProto:
    shape = x.shape if static else [f"d{axis}" for axis in range(x.ndim)]
    value = ir.Value(name="x", type=ir.TensorType(ir.tensor(x).dtype), shape=ir.Shape(shape))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": 18}, name="g")
    op = Builder(graph, 18)
    made = function(op.wrap(value))
    op.output(made)
    return ir.to_proto(ir.Model(graph, ir_version=8))


def result(function, x: np.ndarray, **options) -> np.ndarray:
    return ReferenceEvaluator(model(function, x, **options)).run(None, {"x": x})[0]


KEYS = [
    np.s_[0],
    np.s_[-1],
    np.s_[..., 1:],
    np.s_[:, ::-1],
    np.s_[:, 2:0:-1, None],
    np.s_[:, -1:-3:-1],
    np.s_[None],
    np.s_[..., None],
    np.s_[None, ..., None],
    np.s_[0, ..., 1],
    np.s_[:, None, 1:3, ..., -2:],
    np.s_[:, 0, :, ::2],
    np.s_[..., -1, None],
    np.s_[1:, [0, 2]],
    np.s_[:, np.array([[0, 1], [2, 2]]), 1:],
    np.s_[5:],
    np.s_[...],
    np.s_[-9:9, np.int64(1)],
]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indices_are_those_of_numpy(key, static):
    np.testing.assert_array_equal(result(lambda x: x[key], X, static=static), X[key])


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_shape_of_what_an_index_takes_is_known(key):
    shapes = []
    model(lambda x: shapes.append(x[key].shape) or x[key], X)
    assert shapes == [X[key].shape]


@pytest.mark.parametrize("key", [np.s_[:, ::-1, 0], np.s_[..., 1:4:2, None], np.s_[1:, [0, 2, 2]]], ids=str)
def test_an_index_has_a_gradient(key):
    check_gradient(model(lambda x: x.op.ReduceSum(x[key] ** 2.0, keepdims=0), X), {"x": X}, wrt=["x"])


def test_a_value_as_an_index():
    rows = np.array([2, 0])
    np.testing.assert_array_equal(result(lambda x: x[:, x.op.constant(rows)], X), X[:, rows])


ROW = np.linspace(0, 2, 5)
EXPRESSIONS = {
    "number left": (lambda x: 2 - x * 3.0, 2 - X * 3),
    "power": (lambda x: 2.0**x, 2.0**X),
    "array left": (lambda x: ROW * x, ROW * X),
    "NumPy number left": (lambda x: np.float32(3) / x, 3 / X),
    "list": (lambda x: x * [0, 1, 2, 3, 4], X * np.arange(5)),
    "matrix right": (lambda x: x @ np.ones((5, 2)), X @ np.ones((5, 2))),
    "matrix left": (lambda x: np.ones((3, 4)) @ x, np.ones((3, 4)) @ X),
    "unary": (lambda x: abs(-x) + +x, 2 * X),
    "comparison": (lambda x: x.op.Where(x > 1.0, x, ROW), np.where(X > 1, X, ROW)),
    "comparisons": (lambda x: x.op.Where((x <= ROW) | (x <= 1), 0, 1), np.where((X <= ROW) | (X <= 1), 0, 1)),
    "logic": (lambda x: x.op.Where(~(x <= ROW) & (x < 2), 0, 1), np.where((X > ROW) & (X < 2), 0, 1)),
    "array compared": (lambda x: x.op.Where(x.op.Less(ROW, x), 1.5, x), np.where(ROW < X, 1.5, X)),
    "operator": (lambda x: x.op.Max(x, 1, ROW), np.maximum(np.maximum(X, 1), ROW)),
    "clip": (lambda x: x.op.Clip(x, 0.5, 1), np.clip(X, 0.5, 1)),
    "concatenation": (
        lambda x: x.op.Concat(x, np.ones((2, 3, 4, 1)), axis=3),
        np.concatenate([X, np.ones((2, 3, 4, 1))], 3),
    ),
    "axes": (lambda x: x.op.ReduceSum(x, [1], keepdims=0), X.sum(1)),
    "shape": (lambda x: x.op.Reshape(x, [6, -1]), X.reshape(6, -1)),
    "table": (lambda x: x.op.Gather(ROW, x.op.cast(x, ir.DataType.INT64)), ROW[X.astype(int)]),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_numbers_and_arrays_become_constants(name, dtype):
    function, expected = EXPRESSIONS[name]
    np.testing.assert_allclose(result(function, X.astype(dtype)), expected, rtol=1e-6, atol=1e-6)


MISTAKES = {
    "text": (lambda x: x * "a", "an operand of Mul is a str; it needs a value of the graph, a number, or an array"),
    "None": (lambda x: x + None, "an operand of Add is a NoneType; it needs a value"),
    "text input": (lambda x: x.op.Relu("x"), "input 0 of Relu is a str; it needs a value of the graph"),
    "list of values": (lambda x: x.op.Sum([x, x]), "input 0 of Sum is a list; it needs a value of the graph"),
    "fraction of integers": (
        lambda x: x.op.cast(x, ir.DataType.INT64) * 0.5,
        r"an operand of Mul is 0\.5, which INT64 cannot hold; cast the value beside it first",
    ),
    "too large": (lambda x: x.op.cast(x, ir.DataType.INT8) + 300, "300, which INT8 cannot hold"),
    "equality": (lambda x: x.op.Where(x == 1, x, x), r"input 0 of Where is False, a Python bool.*op\.Equal\(a, b\)"),
    "inequality": (lambda x: x * (x != 1), "an operand of Mul is True, a Python bool"),
    "branch": (lambda x: x if x > 1 else -x, r"is not computed yet, so Python cannot branch on it; use op\.Where"),
    "too many indices": (lambda x: x[0, 0, 0, 0, 0], r"index of 'x' names 5 axes, but it has shape \(2, 3, 4, 5\)"),
    "outside": (lambda x: x[:, 3], r"index 3 is out of range for axis 1 of 'x', which has shape \(2, 3, 4, 5\)"),
    "below": (lambda x: x[-3], "index -3 is out of range for axis 0"),
    "fraction as index": (lambda x: x[1.5], "index of 'x' is of type float64; it needs integers"),
    "mask": (lambda x: x[x > 1], r"is a value of type BOOL; it needs integers.*op\.Where or op\.Compress"),
    "step 0": (lambda x: x[::0], "slice of 'x' has the step 0"),
    "bound": (lambda x: x["a":], "slice of 'x' has the bound 'a'; it needs integers"),
    "several arrays": (lambda x: x[[0, 1], [0, 1]], r"index of 'x' has several arrays; use op\.GatherND"),
    "two gaps": (lambda x: x[..., ...], r"index of 'x' has '\.\.\.' 2 times"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_operands_and_indices_get_a_sentence(name):
    function, message = MISTAKES[name]
    with pytest.raises(OperatorError, match=message):
        model(function, X)


def test_a_value_is_not_iterated_over():
    with pytest.raises(TypeError, match="not iterable"):
        model(lambda x: next(iter(x)), X)


def test_operators_are_written_as_in_onnx():
    with raises_sentence("no_such_operator", operator="'relu'"):
        model(lambda x: x.op.relu(x), X)
