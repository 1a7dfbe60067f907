"""Numbers and arrays beside values: the constants that they become, of the type that the operator needs there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OperatorError
from onnxtrain.ir.value import Value, is_float

if TYPE_CHECKING:
    from onnxtrain.ir.builder import Builder


def lifted(op: Builder, operator: str, inputs: Sequence[Any], domain: str) -> list[Value | None]:
    """The inputs of a node, with numbers and arrays made constants.

    A constant gets the type that the operator's schema asks for: that of the input with which it shares a type
    parameter, or the only type that may stand there. Where the schema leaves it open, a number takes the type of
    the floating inputs, else int64 or float32, and an array keeps its own.

    Raises:
        OperatorError: An input is neither a value nor a number nor an array, or loses digits in that type.
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
    """A number, an array or a list of numbers as an array.

    Raises:
        OperatorError: It is something else. A Python truth value is, too: it is what ``==`` gives for two values.
    """
    if isinstance(item, bool):
        raise OperatorError(
            f"{where} is {item}, a truth value of Python; == and != compare the Python objects, so write "
            "op.Equal(a, b) to compare what values hold."
        )
    # Anything else could hold values, which NumPy would take apart.
    if isinstance(item, int | float | np.generic | list | tuple) or hasattr(item, "__array__"):
        try:
            array = np.asarray(item)
        except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors that do not leave their framework
            array = np.asarray(None)
        if array.dtype.kind in "biuf" or array.dtype.name == "bfloat16":
            return array
    raise OperatorError(
        f"{where} is a {type(item).__name__}; it needs a value of the graph, a number, or an array of numbers."
    )


def exact(array: np.ndarray, dtype: ir.DataType, where: str) -> np.ndarray:
    """The array in an element type; floating types round.

    Raises:
        OperatorError: An integer type cannot hold a number.
    """
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
    if f"tensor({_onnx_name(open_type)})" not in formal.types:
        for name in ("int64", "float", "bool"):
            if f"tensor({name})" in formal.types:
                return _BY_ONNX_NAME[name]
    return open_type


def _open_type(item: object, array: np.ndarray, floating: ir.DataType | None) -> ir.DataType:
    if isinstance(item, np.ndarray | np.generic):
        return ir.DataType.from_numpy(array.dtype)
    if floating is not None and array.dtype.kind == "f":
        return floating
    return ir.DataType.FLOAT if array.dtype.kind == "f" else ir.DataType.from_numpy(array.dtype)


_BY_ONNX_NAME = {"int64": ir.DataType.INT64, "float": ir.DataType.FLOAT, "bool": ir.DataType.BOOL}


def _onnx_name(dtype: ir.DataType) -> str:
    return str(onnx.TensorProto.DataType.Name(int(dtype))).lower()


class _Formal(NamedTuple):
    """What a schema says of an input: the name of its type, and the types that it may have."""

    type_str: str
    types: frozenset[str]


def _formal_inputs(operator: str, domain: str, opset: int, count: int) -> list[_Formal | None]:
    """What the schema says of each input; ``None`` where there is no schema."""
    try:
        schema = onnx.defs.get_schema(operator, opset, domain)
    except onnx.defs.SchemaError:
        return [None] * count
    # Not the `types` of an input itself: onnx 1.20 cannot give them to Python.
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    formals: list[_Formal | None] = [
        _Formal(formal.type_str, frozenset(allowed.get(formal.type_str, [formal.type_str]))) for formal in schema.inputs
    ]
    if formals and schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
        formals += [formals[-1]] * (count - len(formals))
    return (formals + [None] * count)[:count]
