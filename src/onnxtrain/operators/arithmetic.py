"""Arithmetic for update rules: the same expression computes on arrays or emits a graph.

Rules use two types. A :class:`Tensor` has the element type of its variable. A :class:`Wide` is float64: R, T,
attributes and expressions of them. An operation on both rounds the wide operand to the tensor's type. Both support
Python's operators and NumPy's elementwise functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.mixins import NDArrayOperatorsMixin

from onnxtrain.errors import OperatorError
from onnxtrain.graph import Builder, Value

Data = np.ndarray | np.generic | Value
"""Content of a tensor: an array or NumPy scalar, or a value of a graph under construction."""

ONNX_OPERATORS: dict[np.ufunc, str] = {
    np.add: "Add",
    np.subtract: "Sub",
    np.multiply: "Mul",
    np.divide: "Div",
    np.power: "Pow",
    np.negative: "Neg",
    np.absolute: "Abs",
    np.sign: "Sign",
    np.sqrt: "Sqrt",
    np.exp: "Exp",
    np.log: "Log",
    np.arctan: "Atan",
    np.tanh: "Tanh",
    np.cosh: "Cosh",
    np.minimum: "Min",
    np.maximum: "Max",
    np.greater: "Greater",
    np.less: "Less",
}
"""The NumPy functions that rules and measures may use, and their ONNX operators."""


class Tensor(NDArrayOperatorsMixin):
    """An array or a graph value with its own element type."""

    def __init__(self, data: Data) -> None:
        self.data = data

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self.data.dtype.numpy() if isinstance(self.data, Value) else self.data.dtype

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            return NotImplemented
        return _apply(ufunc, inputs)

    def wide(self) -> Wide:
        """Convert to float64."""
        return Wide(_cast(self.data, np.dtype(np.float64)))

    def sum(self, axis: None = None, out: None = None) -> Tensor:
        """Sum all elements to a 0-d tensor; ``numpy.sum`` calls it."""
        if isinstance(self.data, Value):
            return type(self)(self.data.op.ReduceSum(self.data, keepdims=0))
        return type(self)(np.sum(self.data))

    def max(self, axis: None = None, out: None = None, initial: float = -np.inf) -> Tensor:
        """Return the maximum of all elements and ``initial`` as a 0-d tensor; ``numpy.max`` calls it."""
        if not isinstance(self.data, Value):
            return type(self)(np.max(self.data, initial=initial))
        op = self.data.op
        # ReduceMax needs an element: prepend the initial value.
        padded = op.Concat(op.constant([initial], self.data.dtype), op.reshape(self.data, [-1]), axis=0)
        return type(self)(op.ReduceMax(padded, keepdims=0))

    def block_means(self, block: Sequence[int]) -> Tensor:
        """Replace each element by the mean of its block.

        Example:
            >>> Tensor(np.array([1.0, 3.0, 5.0])).block_means([2]).data
            array([2., 2., 5.])
        """
        data = self.data
        shape = data.shape if isinstance(data, Value) else np.shape(data)
        if shape is None or not all(isinstance(size, int) for size in shape):
            raise OperatorError(f"The blocks {tuple(block)} need a variable of known shape, but it is {shape}.")
        sizes = [size for size in shape if isinstance(size, int)]
        if len(block) != len(sizes):
            raise OperatorError(
                f"The block {tuple(block)} has {len(block)} axes and the variable, of shape {shape}, has {len(sizes)}; "
                "give one size for each axis."
            ).about("block", got=tuple(block), wanted=shape)
        if 0 in sizes:
            return self
        counts = np.ones((), dtype=self.dtype)
        for size, length in zip(sizes, block, strict=True):
            full, rest = divmod(size, length)
            counts = counts[..., None] * np.array([length] * full + [rest] * (rest > 0), dtype=self.dtype)
        if isinstance(data, Value):
            return type(self)(_means_in_graph(data, sizes, block, counts))
        means = np.asarray(data)
        for axis, length in enumerate(block):
            means = np.add.reduceat(means, np.arange(0, sizes[axis], length), axis=axis)
        means = means / counts
        for axis, length in enumerate(block):
            means = np.repeat(means, length, axis=axis).take(np.arange(sizes[axis]), axis=axis)
        return type(self)(means)

    def count(self) -> Wide:
        """The number of elements."""
        if not isinstance(self.data, Value):
            return Wide(np.float64(self.data.size))
        known = self.data.op.count(self.data)
        constant = known.constant()
        return Wide(np.float64(constant)) if constant is not None else Wide(known).wide()


class Wide(Tensor):
    """A float64 value; an operation with a tensor casts it to the tensor's type."""

    def __float__(self) -> float:
        """Return the number; only an array has one, a graph value has none before the graph runs."""
        if isinstance(self.data, Value):
            raise TypeError("The value of a graph is not known before the graph runs.")
        return float(self.data)


def _means_in_graph(data: Value, sizes: Sequence[int], block: Sequence[int], counts: np.ndarray) -> Value:
    """Replace each element of a graph value by the mean of its block; ``counts`` are the elements of each block."""
    op = data.op
    padded = [-(-size // length) * length for size, length in zip(sizes, block, strict=True)]
    if padded != list(sizes):
        beyond = [whole - size for whole, size in zip(padded, sizes, strict=True)]
        data = op.Pad(data, op.ints(*[0] * len(sizes), *beyond))
    parted = [part for whole, length in zip(padded, block, strict=True) for part in (whole // length, length)]
    sums = op.ReduceSum(op.reshape(data, parted), op.ints(*range(1, len(parted), 2)), keepdims=1)
    outer = [size if axis % 2 == 0 else 1 for axis, size in enumerate(parted)]
    means = op.reshape(op.Expand(sums / op.constant(counts.reshape(outer)), op.ints(*parted)), padded)
    if padded != list(sizes):
        means = op.Slice(means, op.ints(*[0] * len(sizes)), op.ints(*sizes))
    return means.with_shape(tuple(sizes))


def wide(number: Any) -> Wide:
    """Convert a number to a 0-d float64 value; a graph value is cast and reshaped by nodes."""
    if not isinstance(number, Value):
        return Wide(np.float64(np.asarray(number).reshape(())))
    op = number.op
    if number.shape != ():
        number = op.Reshape(number, op.ints()).with_shape(())
    return Wide(op.cast(number, ir.DataType.DOUBLE))


def where(condition: Tensor, then: Any, otherwise: Any) -> Any:
    """Select elementwise: ``then`` where the condition holds, else ``otherwise``."""
    operands = _aligned((then, otherwise))
    kind = _kind(operands)
    data: list[Any] = [condition.data, *(operand.data for operand in operands)]
    builder = _builder(data)
    if builder is None:
        return kind(np.where(data[0], data[1], data[2]))
    dtype = ir.DataType.from_numpy(operands[0].dtype)
    values = [d if isinstance(d, Value) else builder.constant(d, dtype) for d in data[1:]]
    test = condition.data if isinstance(condition.data, Value) else builder.constant(condition.data)
    return kind(builder.Where(test, *values))


def positive(number: Wide, error: str) -> Wide:
    """Return a positive number unchanged; others raise OperatorError, or become NaN in a graph, which cannot raise."""
    if isinstance(number.data, Value):
        return where(number > 0, number, np.nan)  # type: ignore[no-any-return]
    if not float(number) > 0:
        raise OperatorError(error.format(float(number)))
    return number


def _apply(function: np.ufunc, inputs: Sequence[Any]) -> Tensor:
    operands = _aligned(inputs)
    data = [operand.data for operand in operands]
    builder = _builder(data)
    kind = _kind(operands)
    if builder is None:
        if function is np.power and all(isinstance(item, np.generic) for item in data):
            # On scalars ** calls the C library's pow, bit-identical to ONNX Runtime's; numpy.power may differ.
            return kind(data[0] ** data[1])  # type: ignore[operator]
        return kind(function(*data))
    operator = ONNX_OPERATORS.get(function)
    if operator is None:
        raise TypeError(
            f"numpy.{function.__name__} has no ONNX operator here; use "
            f"{', '.join('numpy.' + known.__name__ for known in ONNX_OPERATORS)}."
        )
    if len(data) == 1:
        return kind(builder.several(operator, data[0], outputs=1)[0])  # type: ignore[arg-type]
    left, right = (item if isinstance(item, Value) else _number(item) for item in data)
    return kind(builder.binary(operator, left, right))


def _aligned(inputs: Sequence[Any]) -> list[Tensor]:
    """Cast the operands to one element type: the type of the tensors among them, or float64 without any."""
    operands = [item if isinstance(item, Tensor) else Wide(np.float64(item)) for item in inputs]
    dtype = next((item.dtype for item in operands if not isinstance(item, Wide)), None)
    if dtype is None:
        return operands
    return [Tensor(_cast(item.data, dtype)) for item in operands]


def _kind(operands: Sequence[Tensor]) -> type[Tensor]:
    return Wide if all(isinstance(operand, Wide) for operand in operands) else Tensor


def _builder(data: Sequence[Data]) -> Builder | None:
    return next((item.op for item in data if isinstance(item, Value)), None)


def _cast(data: Data, dtype: np.dtype[Any]) -> Data:
    if isinstance(data, Value):
        return data.op.cast(data, ir.DataType.from_numpy(dtype))
    return data.astype(dtype, copy=False)


def _number(data: np.ndarray | np.generic) -> Any:
    # The builder folds x + 0 and x * 1 for plain floats.
    return float(data) if data.ndim == 0 else data
