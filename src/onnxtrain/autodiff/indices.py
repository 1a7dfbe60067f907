"""Inputs and outputs of operators that are indices, sizes, axes or masks: no gradient flows through them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import onnx_ir as ir
from onnx import defs

from onnxtrain.ir.domains import is_default_domain

_WHOLE = frozenset({"tensor(int64)", "tensor(int32)", "tensor(uint64)", "tensor(uint32)", "tensor(bool)"})
"""What an input of indices, sizes, axes or conditions may be; quantized values have fewer bits, numbers also floats."""

_WIDE = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.UINT64, ir.DataType.UINT32, ir.DataType.BOOL})

_NUMBERS_AS_INDICES = {"OneHot": frozenset({0, 1})}
"""Inputs that are indices and sizes although their type may be any number."""


class Kinds(NamedTuple):
    """The type variables of an operator's inputs and outputs: those of one name have one type.

    Attributes:
        inputs: One for each input in the schema; the last one stands for all that follow.
        outputs: The same for outputs.
        indices: Those that only indices, sizes, axes and conditions have.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    indices: frozenset[str]


@functools.cache
def kinds_of(operator: str, domain: str, version: int) -> Kinds | None:
    """What the schema of an operator says; ``None`` where there is no schema."""
    domain = "" if is_default_domain(domain) else domain
    try:
        schema = defs.get_schema(operator, version, domain)
    except defs.SchemaError:
        return None
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    inputs = tuple(formal.type_str for formal in schema.inputs)
    outputs = tuple(formal.type_str for formal in schema.outputs)
    indices = {kind for kind in (*inputs, *outputs) if _WHOLE.issuperset(allowed.get(kind, (kind,)))}
    return Kinds(inputs, outputs, frozenset(indices))


def kind_at(kinds: tuple[str, ...], place: int) -> str:
    """The type variable of the input or output at a place."""
    return kinds[min(place, len(kinds) - 1)] if kinds else ""


def reads_index(node: ir.Node, place: int, opsets: Mapping[str, int]) -> bool:
    """Whether an input is no number that a gradient could be asked for: an index, a size, an axis, a condition.

    Of operators without a schema, whole numbers of 32 bits and more are taken for indices: quantized values have fewer.

    Example:
        >>> indices = ir.Value(name="indices", type=ir.TensorType(ir.DataType.INT64))
        >>> node = ir.Node("", "Gather", [ir.Value(name="x"), indices])
        >>> reads_index(node, 0, {"": 20}), reads_index(node, 1, {"": 20})
        (False, True)
    """
    value = node.inputs[place]
    if value is None or value.dtype is None:
        return False
    kinds = kinds_of(node.op_type, node.domain, opsets.get(node.domain, 1))
    if kinds is None:
        return value.dtype in _WIDE
    if not node.domain and place in _NUMBERS_AS_INDICES.get(node.op_type, ()):
        return True
    return kind_at(kinds.inputs, place) in kinds.indices


def gives_index(node: ir.Node, place: int, opsets: Mapping[str, int]) -> bool:
    """Whether an output is an index, a count or a mask, such as the second one of TopK."""
    dtype = node.outputs[place].dtype
    if dtype is None:
        return False
    kinds = kinds_of(node.op_type, node.domain, opsets.get(node.domain, 1))
    if kinds is None:
        return dtype in _WIDE
    return kind_at(kinds.outputs, place) in kinds.indices
