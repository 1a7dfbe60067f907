"""Typed values, with which gradient rules and update rules compute: arithmetic, indices, constants beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Union

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OperatorError
from onnxtrain.graph.value import Dimension, constant_array, dimensions, is_float

if TYPE_CHECKING:
    from onnxtrain.graph.builder import Builder

Operand = Union["Value", float, int, np.ndarray]
"""An operand beside a value: numbers and arrays become constants of the type that the operator needs."""


class Value:
    """A value of a graph under construction; arithmetic, order comparisons and indexing emit nodes."""

    __slots__ = ("ir", "op")

    __array_ufunc__ = None  # so that NumPy leaves array * value to the value
    __iter__ = None  # with __getitem__ alone, iteration would never end

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
        """True where every axis has a known size."""
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
        """True for a real floating element type, for which a gradient can exist."""
        return is_float(self.ir)

    @property
    def is_sequence(self) -> bool:
        """True for a sequence of tensors."""
        return isinstance(self.ir.type, ir.SequenceType)

    def constant(self) -> np.ndarray | None:
        """The array of an initializer or Constant node that does not vary; ``None`` for other values."""
        if self.ir in self.op.variables:
            return None
        return constant_array(self.ir)

    def with_shape(self, shape: tuple[Dimension, ...] | None) -> Value:
        """Set a shape that inference would not find; returns the value itself."""
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
        return _indexed(self, key)

    def __bool__(self) -> bool:
        raise OperatorError(
            f"{self!r} is not computed yet, so Python cannot branch on it; use op.Where(condition, this, that)."
        )

    def __repr__(self) -> str:
        return f"Value({self.name!r}, {self.dtype.name}, {self.shape})"


def lift_operands(op: Builder, operator: str, inputs: Sequence[Any], domain: str) -> list[Value | None]:
    """The inputs of a node, with numbers and arrays made constants.

    A constant gets the type that the operator's schema requires: the type of an input that shares its type parameter,
    or the only allowed type. Where the schema leaves it open, a number takes the type of the floating inputs, else
    int64 or float32, and an array keeps its own.
    """
    formals = _formal_inputs(operator, domain, op.opset, len(inputs))
    known: dict[str, ir.DataType] = {}
    for value, formal in zip(inputs, formals, strict=True):
        if isinstance(value, Value) and formal is not None and value.ir.dtype is not None:
            known.setdefault(formal.type_str, value.dtype)
    floating = next((value.dtype for value in inputs if isinstance(value, Value) and is_float(value.ir)), None)
    result: list[Value | None] = []
    for position, (item, formal) in enumerate(zip(inputs, formals, strict=True)):
        if item is None or isinstance(item, Value):
            result.append(item)
            continue
        where = f"input {position} of {operator}"
        array = as_array(item, where)
        dtype = _open_type(item, array, floating) if formal is None else _type(item, array, formal, known, floating)
        result.append(op.constant(exact(array, dtype, where)))
        if formal is not None:
            known.setdefault(formal.type_str, dtype)
    return result


def as_array(item: object, where: str) -> np.ndarray:
    """Convert a number, an array or a list of numbers to an array."""
    if isinstance(item, bool):
        raise OperatorError(
            f"{where} is {item}, a Python bool; == and != compare the Python objects, so write "
            "op.Equal(a, b) to compare the elements of values."
        )
    # NumPy would iterate over other objects, which may hold values.
    if isinstance(item, int | float | np.generic | list | tuple) or hasattr(item, "__array__"):
        try:
            array = np.asarray(item)
        except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors that do not convert
            array = np.asarray(None)
        if array.dtype.kind in "biuf" or array.dtype.name == "bfloat16":
            return array
    raise OperatorError(
        f"{where} is a {type(item).__name__}; it needs a value of the graph, a number, or an array of numbers."
    )


def exact(array: np.ndarray, dtype: ir.DataType, where: str) -> np.ndarray:
    """Convert an array to an element type; floating types round."""
    wanted = dtype.numpy()
    if array.dtype == wanted or dtype.is_floating_point():
        return array.astype(wanted, copy=False)
    with np.errstate(invalid="ignore"):
        converted = array.astype(wanted)
    if not np.array_equal(converted.astype(array.dtype), array):
        raise OperatorError(
            f"{where} is {_shown(array)}, which {dtype.name} cannot hold; cast the value beside it first: "
            "op.cast(value, prediction.dtype)."
        )
    return converted


def _shown(array: np.ndarray) -> str:
    return str(array.reshape(())) if array.size == 1 else f"an array of {array.dtype}"


def _type(
    item: object, array: np.ndarray, formal: _Formal, known: dict[str, ir.DataType], floating: ir.DataType | None
) -> ir.DataType:
    if formal.type_str in known:
        return known[formal.type_str]
    open_type = _open_type(item, array, floating)
    if f"tensor({open_type.name.lower()})" not in formal.types:
        for name in ("int64", "float", "bool"):
            if f"tensor({name})" in formal.types:
                return ir.DataType[name.upper()]
    return open_type


def _open_type(item: object, array: np.ndarray, floating: ir.DataType | None) -> ir.DataType:
    if isinstance(item, np.ndarray | np.generic):
        return ir.DataType.from_numpy(array.dtype)
    if floating is not None and array.dtype.kind == "f":
        return floating
    return ir.DataType.FLOAT if array.dtype.kind == "f" else ir.DataType.from_numpy(array.dtype)


class _Formal(NamedTuple):
    """An input in a schema: the name of its type parameter, and the types that it may have."""

    type_str: str
    types: frozenset[str]


def _formal_inputs(operator: str, domain: str, opset: int, count: int) -> list[_Formal | None]:
    """Each input in the operator's schema; ``None`` where there is no schema."""
    try:
        schema = onnx.defs.get_schema(operator, opset, domain)
    except onnx.defs.SchemaError:
        return [None] * count
    # onnx 1.20 cannot convert the `types` of an input itself to Python.
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    formals: list[_Formal | None] = [
        _Formal(formal.type_str, frozenset(allowed.get(formal.type_str, [formal.type_str]))) for formal in schema.inputs
    ]
    if formals and schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
        formals += [formals[-1]] * (count - len(formals))
    return (formals + [None] * count)[:count]


_END: Final = np.iinfo(np.int64).max
_BEGIN: Final = np.iinfo(np.int64).min


def _indexed(value: Value, key: Any) -> Value:
    """``value[key]``: one Slice for all slices, a Gather per integer or array, one Unsqueeze for all ``None``."""
    entries = _per_axis(value, key if isinstance(key, tuple) else (key,))
    axes = [entry for entry in entries if entry is not None]
    result = _sliced(value, axes)
    for axis in reversed(range(len(axes))):
        if not isinstance(axes[axis], slice):
            index, shape = _indices(value, axes[axis], axis), result.shape
            result = result.op.Gather(result, index, axis=axis)
            if shape is not None and index.shape is not None:
                result = result.with_shape((*shape[:axis], *index.shape, *shape[axis + 1 :]))
    added, position = [], 0
    for entry in entries:
        if entry is None:
            added.append(position)
        position += _rank(entry)
    return result.op.Unsqueeze(result, result.op.ints(*added)) if added else result


def _per_axis(value: Value, keys: tuple[Any, ...]) -> list[Any]:
    """One entry per indexed axis and ``None`` per new axis, with ``...`` expanded."""
    named = sum(key is not None and key is not Ellipsis for key in keys)
    gaps = sum(key is Ellipsis for key in keys)
    if gaps > 1:
        raise OperatorError(f"The index of {value.name!r} has '...' {gaps} times; use it once.")
    if value.rank is not None and named > value.rank:
        raise OperatorError(f"The index of {value.name!r} names {named} axes, but it has shape {value.shape}.")
    if (
        sum(not isinstance(key, slice | int | np.integer) and key is not None and key is not Ellipsis for key in keys)
        > 1
    ):
        raise OperatorError(f"The index of {value.name!r} has several arrays; use op.GatherND.")
    entries: list[Any] = []
    for index, key in enumerate(keys):
        if key is not Ellipsis:
            entries.append(key)
        elif any(later is not None for later in keys[index + 1 :]) or None in keys[index + 1 :]:
            if value.rank is None:
                raise OperatorError(f"'...' needs the rank of {value.name!r}, which is not known.")
            entries += [slice(None)] * (value.rank - named)
    return entries


def _sliced(value: Value, axes: list[Any]) -> Value:
    starts, ends, sliced, steps = [], [], [], []
    for axis, entry in enumerate(axes):
        if not isinstance(entry, slice) or entry == slice(None):
            continue
        for bound in (entry.start, entry.stop, entry.step):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | np.integer)):
                raise OperatorError(
                    f"A slice of {value.name!r} has the bound {bound!r}; it needs integers. For computed bounds "
                    "use op.Slice."
                )
        step = 1 if entry.step is None else int(entry.step)
        if step == 0:
            raise OperatorError(f"A slice of {value.name!r} has the step 0; it must be another integer.")
        starts.append((0 if step > 0 else _END) if entry.start is None else int(entry.start))
        ends.append((_END if step > 0 else _BEGIN) if entry.stop is None else int(entry.stop))
        sliced.append(axis)
        steps.append(step)
    if not sliced:
        return value
    op = value.op
    result = op.Slice(value, op.ints(*starts), op.ints(*ends), op.ints(*sliced), op.ints(*steps))
    if value.shape is None:
        return result
    sizes = list(value.shape)
    for axis in sliced:
        size = sizes[axis]
        sizes[axis] = len(range(*axes[axis].indices(size))) if isinstance(size, int) else None
    return result.with_shape(tuple(sizes))


def _indices(value: Value, entry: Any, axis: int) -> Value:
    if isinstance(entry, Value):
        if entry.ir.dtype is not None and not entry.ir.dtype.is_integer():
            raise OperatorError(
                f"The index of {value.name!r} is a value of type {entry.dtype.name}; it needs integers. To choose by "
                "a condition use op.Where or op.Compress."
            )
        return entry
    array = as_array(entry, f"the index of {value.name!r}")
    if array.dtype.kind not in "iu":
        raise OperatorError(
            f"The index of {value.name!r} is of type {array.dtype}; it needs integers, a slice, None or '...'."
        )
    size = None if value.shape is None else value.shape[axis]
    if isinstance(size, int) and array.size and not (-size <= array.min() and array.max() < size):
        raise OperatorError(
            f"The index {array.max() if array.max() >= size else array.min()} is out of range for axis {axis} of "
            f"{value.name!r}, which has shape {value.shape}."
        )
    return value.op.constant(array.astype(np.int64))


def _rank(entry: Any) -> int:
    """Return the number of result axes of an index entry."""
    if entry is None or isinstance(entry, slice):
        return 1
    if isinstance(entry, Value):
        if entry.rank is None:
            raise OperatorError(f"The rank of the index {entry.name!r} is not known.")
        return entry.rank
    return int(np.ndim(entry))
