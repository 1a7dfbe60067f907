"""Typed values: what gradient rules and update rules compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OperatorError

if TYPE_CHECKING:
    from onnxtrain.ir.builder import Builder

Dimension = int | str | None
"""One axis: a size, a symbol (equal symbols are equal sizes), or nothing known."""

Operand = Union["Value", float, int, np.ndarray]
"""What an operator accepts beside a value: numbers and arrays become constants of the type that it needs."""


class Value:
    """A value of a graph under construction; arithmetic, comparisons of size, and indices emit nodes.

    Two wrappers of the same graph value are interchangeable; identity is that of ``ir``. ``==`` compares Python
    objects; ``op.Equal`` compares what two values hold.
    """

    __slots__ = ("ir", "op")

    __array_ufunc__ = None  # so that NumPy leaves array * value to the value
    __iter__ = None  # __getitem__ alone would make an endless loop of it

    def __init__(self, value: ir.Value, op: Builder) -> None:
        self.ir = value
        self.op = op

    @property
    def name(self) -> str:
        """The name in the graph ("" before the graph has given one)."""
        return self.ir.name or ""

    @property
    def dtype(self) -> ir.DataType:
        """The element type; ``UNDEFINED`` where it is not known."""
        return self.ir.dtype if self.ir.dtype is not None else ir.DataType.UNDEFINED

    @property
    def shape(self) -> tuple[Dimension, ...] | None:
        """The axes, or ``None`` where not even the rank is known."""
        return dimensions(self.ir)

    @property
    def rank(self) -> int | None:
        """The number of axes, or ``None``."""
        return None if self.ir.shape is None else len(self.ir.shape)

    @property
    def is_static(self) -> bool:
        """Whether every axis has a known size."""
        return self.static_shape is not None

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The sizes of all axes, or ``None`` unless every one is known."""
        shape = self.shape
        if shape is None or not all(isinstance(d, int) for d in shape):
            return None
        return tuple(d for d in shape if isinstance(d, int))

    @property
    def is_float(self) -> bool:
        """Whether the element type is a real floating one, so that a gradient can exist."""
        return is_float(self.ir)

    @property
    def is_sequence(self) -> bool:
        """Whether it is a sequence of tensors."""
        return isinstance(self.ir.type, ir.SequenceType)

    def constant(self) -> np.ndarray | None:
        """The array, where the value is an initializer or a Constant node that nothing varies; else ``None``."""
        if self.ir in self.op.variables:
            return None
        tensor = constant_tensor(self.ir)
        return None if tensor is None else np.asarray(tensor.numpy())

    def with_shape(self, shape: tuple[Dimension, ...] | None) -> Value:
        """State a shape that the rule knows and inference would not find; returns the value itself."""
        self.ir.shape = None if shape is None else ir.Shape(shape)
        return self

    def __add__(self, other: Operand) -> Value:
        return self.op.binary("Add", self, other)

    def __radd__(self, other: Operand) -> Value:
        return self.op.binary("Add", other, self)

    def __sub__(self, other: Operand) -> Value:
        return self.op.binary("Sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return self.op.binary("Sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return self.op.binary("Mul", self, other)

    def __rmul__(self, other: Operand) -> Value:
        return self.op.binary("Mul", other, self)

    def __truediv__(self, other: Operand) -> Value:
        return self.op.binary("Div", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.op.binary("Div", other, self)

    def __pow__(self, other: Operand) -> Value:
        return self.op.binary("Pow", self, other)

    def __rpow__(self, other: Operand) -> Value:
        return self.op.binary("Pow", other, self)

    def __matmul__(self, other: Operand) -> Value:
        return self.op.binary("MatMul", self, other)

    def __rmatmul__(self, other: Operand) -> Value:
        return self.op.binary("MatMul", other, self)

    # NumPy declares the reflected comparisons for its arrays; __array_ufunc__ leaves them to these.
    def __lt__(self, other: Operand) -> Value:  # type: ignore[misc]
        return self.op.binary("Less", self, other)

    def __le__(self, other: Operand) -> Value:  # type: ignore[misc]
        return self.op.binary("LessOrEqual", self, other)

    def __gt__(self, other: Operand) -> Value:  # type: ignore[misc]
        return self.op.binary("Greater", self, other)

    def __ge__(self, other: Operand) -> Value:  # type: ignore[misc]
        return self.op.binary("GreaterOrEqual", self, other)

    def __and__(self, other: Operand) -> Value:
        return self.op.binary("And", self, other)

    def __or__(self, other: Operand) -> Value:
        return self.op.binary("Or", self, other)

    def __invert__(self) -> Value:
        return self.op.Not(self)

    def __neg__(self) -> Value:
        return self.op.Neg(self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return self.op.Abs(self)

    def __getitem__(self, key: Any) -> Value:
        return self.op.index(self, key)

    def __bool__(self) -> bool:
        raise OperatorError(
            f"{self!r} is not computed yet, so Python cannot branch on it; use op.Where(condition, this, that)."
        )

    def __repr__(self) -> str:
        return f"Value({self.name!r}, {self.dtype.name}, {self.shape})"


PASTS = "onnxtrain.pasts"
"""Key of the metadata of an input: the names of the KV-cache inputs that were removed beside it."""


RIGHT_PADDED = "onnxtrain.right_padded"
"""Key of the metadata of an input: whether it is a mask of which attention reads the number of ones alone."""


def dimensions(value: ir.Value) -> tuple[Dimension, ...] | None:
    """The axes of an onnx-ir value in the form that this package computes with."""
    if value.shape is None:
        return None
    return tuple([d if isinstance(d, int) else d.value for d in value.shape])


def is_float(value: ir.Value) -> bool:
    """Whether an onnx-ir value has a real floating element type."""
    return value.dtype in _FLOATING


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor that an onnx-ir value holds, where it is an initializer or what a Constant node gives.

    onnx-ir's own function asks the tensor of every Constant whether it is one, by a protocol: 0.1 ms.
    """
    node = value.producer()
    if value.const_value is None and node is not None and node.op_type == "Constant" and not node.domain:
        given = node.attributes.get("value")
        if given is not None and not given.is_ref():
            tensor: ir.TensorProtocol = given.value
            tensor.name = value.name  # as onnx-ir does
            return tensor
    return ir.convenience.get_const_tensor(value)


def constant_number(value: ir.Value | None) -> float | None:
    """The number that an onnx-ir value holds, where it is a constant of one element."""
    tensor = None if value is None else constant_tensor(value)
    if tensor is None or tensor.size != 1:
        return None
    return float(np.asarray(tensor.numpy()).reshape(()))


HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The floating types of 16 bits."""

_FLOATING = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES})
