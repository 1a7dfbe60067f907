"""The arithmetic that update rules are written in: the same expression computes on arrays and emits graphs.

A rule handles two kinds of quantity. A :class:`Tensor` has the element type of its variable. A :class:`Wide` is
float64: R, T, an attribute, or what they combine to. Where the two meet, the wide one is rounded to the type of
the tensor. Both take Python's operators and NumPy's element-wise functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.mixins import NDArrayOperatorsMixin

from onnxtrain.errors import OperatorError
from onnxtrain.ir import Builder, Value

Data = np.ndarray | np.generic | Value
"""What a quantity holds: an array (or NumPy scalar), or a value of a graph under construction."""

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
"""The NumPy functions that rules and measures may use, and the operators that they become in a graph."""


class Tensor(NDArrayOperatorsMixin):
    """An array, or a value of a graph, in its own element type."""

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
        """The same numbers in float64."""
        return Wide(_cast(self.data, np.dtype(np.float64)))

    def sum(self, axis: None = None, out: None = None) -> Tensor:
        """The sum of all elements, 0-d; ``numpy.sum`` calls it."""
        if isinstance(self.data, Value):
            return type(self)(self.data.op.ReduceSum(self.data, keepdims=0))
        return type(self)(np.sum(self.data))

    def max(self, axis: None = None, out: None = None, initial: float = -np.inf) -> Tensor:
        """The largest of all elements and ``initial``, 0-d; ``numpy.max`` calls it."""
        if not isinstance(self.data, Value):
            return type(self)(np.max(self.data, initial=initial))
        op = self.data.op
        # With the initial value in front, a tensor without elements has a largest one, too.
        padded = op.Concat(op.constant([initial], self.data.dtype), op.reshape(self.data, [-1]), axis=0)
        return type(self)(op.ReduceMax(padded, keepdims=0))

    def count(self) -> Wide:
        """The number of elements."""
        if not isinstance(self.data, Value):
            return Wide(np.float64(self.data.size))
        known = self.data.op.count(self.data)
        constant = known.constant()
        return Wide(np.float64(constant)) if constant is not None else Wide(known).wide()


class Wide(Tensor):
    """A float64 quantity: alone it stays float64, with a tensor it takes the tensor's type."""

    def __float__(self) -> float:
        """The number, where it is known before anything runs (an attribute)."""
        if isinstance(self.data, Value):
            raise TypeError("The value of a graph is not known before the graph runs.")
        return float(self.data)


def wide(number: Any) -> Wide:
    """A number as a wide quantity; an integer or float of a graph is cast to double and made 0-d."""
    if not isinstance(number, Value):
        return Wide(np.float64(np.asarray(number).reshape(())))
    op = number.op
    if number.shape != ():
        number = op.Reshape(number, op.ints()).with_shape(())
    return Wide(op.cast(number, ir.DataType.DOUBLE))


def where(condition: Tensor, then: Any, otherwise: Any) -> Any:
    """``condition ? then : otherwise``, element by element."""
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
    """The number, which must be above 0: else an OperatorError, or NaN in a graph, which cannot raise."""
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
            # On scalars this is the C library's pow, bit for bit that of ONNX Runtime; numpy.power may be another.
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
    """The operands in one element type: that of the tensors among them, else float64."""
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
    # A plain float lets the builder leave out additions of 0 and multiplications by 1.
    return float(data) if data.ndim == 0 else data
