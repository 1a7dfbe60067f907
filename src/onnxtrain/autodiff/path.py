"""The forward graph, the path of a gradient through it, and the inputs and outputs that carry no gradient."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir
from onnx import defs

from onnxtrain.autodiff import registry
from onnxtrain.graph.clone import captured_values, values_read
from onnxtrain.graph.domains import is_default_domain
from onnxtrain.graph.value import is_float

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
    if not node.domain and position in _NUMBERS_AS_INDICES.get(node.op_type, ()):
        return True
    return _is_index(node, node.inputs[position], position, opsets, given=False)


def gives_index(node: ir.Node, position: int, opsets: Mapping[str, int]) -> bool:
    """Return whether an output is an index, a count or a mask, such as TopK's second one."""
    return _is_index(node, node.outputs[position], position, opsets, given=True)


def _is_index(node: ir.Node, value: ir.Value | None, position: int, opsets: Mapping[str, int], *, given: bool) -> bool:
    if value is None or value.dtype is None:
        return False
    kinds = kinds_of(node.op_type, node.domain, opsets.get(node.domain, 1))
    if kinds is None:
        return value.dtype in _WIDE
    return kind_at(kinds.outputs if given else kinds.inputs, position) in kinds.indices


class Route(NamedTuple):
    """Ends of a gradient's path: it flows back from the ys to the xs, but not through fixed values."""

    ys: tuple[ir.Value, ...]
    xs: tuple[ir.Value, ...]
    fixed: tuple[ir.Value, ...] = ()


@dataclass(eq=False)
class Forward:
    """A graph to differentiate, with the versions and functions that determine the rules of its nodes."""

    graph: ir.Graph
    opsets: Mapping[str, int]
    functions: Mapping[ir.OperatorIdentifier, ir.Function]
    straight_through: bool = False
    replaced: dict[ir.Value, ir.Value] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ir.Model, *, straight_through: bool = False) -> Forward:
        """The main graph of a model."""
        return cls(model.graph, model.graph.opset_imports, model.functions, straight_through)

    def inside(self, graph: ir.Graph) -> Forward:
        """A body of an operator of this graph."""
        return Forward(graph, self.opsets, self.functions, self.straight_through)

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return self.opsets.get("", 1)

    def current(self, value: ir.Value) -> ir.Value:
        """The value that replaces a value after functions were expanded."""
        while value in self.replaced:
            value = self.replaced[value]
        return value

    def entry(self, node: ir.Node) -> registry.Entry | None:
        """Return the registry entry for a node; for a model-local function, version 1 of its domain counts."""
        if self.functions and node.op_identifier() in self.functions:
            return registry.find(node.op_type, node.domain, 1)
        version = self.opsets.get(node.domain, 1)
        return registry.find(node.op_type, node.domain, version, straight_through=self.straight_through)

    def path(self, route: Route) -> list[ir.Node]:
        """The nodes through which a y depends on an x, in the order of the graph."""
        fixed = {self.current(value) for value in route.fixed}
        active = {self.current(x) for x in route.xs}
        through: list[tuple[ir.Node, list[ir.Value]]] = []
        for node in self.graph:
            if not any(value in active for value in values_read(node)):
                continue
            entry = self.entry(node)
            read = [value for value in self._carrying_inputs(node, entry) if value in active]
            if not read:
                continue
            if entry is not None and entry.function is None and not _passes_integers(node, entry, active):
                continue
            # Without straight-through gradients, quantizing nodes are followed to report lost gradients.
            quantizes = entry is not None and bool(entry.quantized)
            integers = self.straight_through or quantizes or not all(map(may_carry, read))
            outputs = [
                value
                for value in self.carrying_outputs(node, entry)
                if (may_carry(value) or (integers and is_number(value))) and value not in fixed
            ]
            if outputs:
                active.update(outputs)
                through.append((node, read))
        needed = {self.current(y) for y in route.ys}
        path = []
        for node, read in reversed(through):
            if any(output in needed for output in node.outputs):
                path.append(node)
                needed.update(read)
        return path[::-1]

    def _carrying_inputs(self, node: ir.Node, entry: registry.Entry | None) -> list[ir.Value]:
        """The values that a node reads, without indices, sizes and conditions."""
        if _computes_with_integers(entry):
            return values_read(node)
        positions = [index for index in range(len(node.inputs)) if not reads_index(node, index, self.opsets)]
        return [value for index in positions if (value := node.inputs[index]) is not None] + captured_values(node)

    def carrying_outputs(self, node: ir.Node, entry: registry.Entry | None) -> list[ir.Value]:
        """Return the outputs of a node except indices, counts and masks."""
        if _computes_with_integers(entry):
            return list(node.outputs)
        return [value for index, value in enumerate(node.outputs) if not gives_index(node, index, self.opsets)]


def _computes_with_integers(entry: registry.Entry | None) -> bool:
    """Return whether an operator reads or writes integers that represent quantized numbers."""
    return entry is None or entry.through_integers or bool(entry.quantized)


def _passes_integers(node: ir.Node, entry: registry.Entry, active: Collection[ir.Value]) -> bool:
    """Return whether a node passes values that need a gradient on as integers."""
    return any(index < len(node.inputs) and node.inputs[index] in active for index in entry.quantized)


def is_number(value: ir.Value) -> bool:
    """Return whether a value is numeric, of any type."""
    return value.dtype not in (None, ir.DataType.BOOL, ir.DataType.STRING)


def may_carry(value: ir.Value) -> bool:
    """Return whether a gradient can flow through a value: a floating tensor, or a sequence or optional of them."""
    return value.type is None or is_float(value)  # a sequence or optional has the type of its elements
