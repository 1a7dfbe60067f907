"""Find inputs and outputs that are indices, sizes, axes or masks, through which no gradient flows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import onnx_ir as ir
from onnx import defs

from onnxtrain.graph.domains import is_default_domain

_WHOLE = frozenset({"tensor(int64)", "tensor(int32)", "tensor(uint64)", "tensor(uint32)", "tensor(bool)"})
"""Types of indices, sizes, axes and conditions; an input that allows quantized or floating-point types is not one."""

_WIDE = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.UINT64, ir.DataType.UINT32, ir.DataType.BOOL})

_NUMBERS_AS_INDICES = {"OneHot": frozenset({0, 1})}
"""Inputs that are indices and sizes although the schema allows any numeric type."""


class Kinds(NamedTuple):
    """The type parameters of an operator's inputs and outputs: values that share one have one type."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    indices: frozenset[str]


@functools.cache
def kinds_of(operator: str, domain: str, version: int) -> Kinds | None:
    """Read the type parameters from the operator's schema; ``None`` where there is no schema."""
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


def kind_at(kinds: tuple[str, ...], index: int) -> str:
    """The type parameter of the input or output at an index."""
    return kinds[min(index, len(kinds) - 1)] if kinds else ""


def reads_index(node: ir.Node, position: int, opsets: Mapping[str, int]) -> bool:
    """Return whether an input is an index, a size, an axis or a condition, which has no gradient.

    Example:
        >>> indices = ir.Value(name="indices", type=ir.TensorType(ir.DataType.INT64))
        >>> node = ir.Node("", "Gather", [ir.Value(name="x"), indices])
        >>> reads_index(node, 0, {"": 20}), reads_index(node, 1, {"": 20})
        (False, True)
    """
    value = node.inputs[position]
    if value is None or value.dtype is None:
        return False
    kinds = kinds_of(node.op_type, node.domain, opsets.get(node.domain, 1))
    if kinds is None:
        return value.dtype in _WIDE
    if not node.domain and position in _NUMBERS_AS_INDICES.get(node.op_type, ()):
        return True
    return kind_at(kinds.inputs, position) in kinds.indices


def gives_index(node: ir.Node, position: int, opsets: Mapping[str, int]) -> bool:
    """Return whether an output is an index, a count or a mask, such as TopK's second one."""
    dtype = node.outputs[position].dtype
    if dtype is None:
        return False
    kinds = kinds_of(node.op_type, node.domain, opsets.get(node.domain, 1))
    if kinds is None:
        return dtype in _WIDE
    return kind_at(kinds.outputs, position) in kinds.indices
