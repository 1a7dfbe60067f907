"""Shapes that a file declares and that cannot be true."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import onnx_ir as ir

from onnxtrain.ir.clone import captured_values, subgraphs
from onnxtrain.ir.inference import told_shape
from onnxtrain.ir.value import Dimension, constant_tensor, dimensions

MADE_UP = "unk__"
"""How the symbols begin that ONNX's inference makes up."""

_ANONYMOUS = frozenset({"", "?", "-1", "None", "unknown", "*"})
"""What exporters write for the size of an axis of which they know nothing: several axes of a model may have it."""


def forget_anonymous_axes(graph: ir.Graph) -> None:
    """Take what is no name of a size for none, in place: two axes that are called ``?`` need not be equal."""
    _forget_sizes(graph, lambda size: size in _ANONYMOUS if isinstance(size, str) else size is not None and size < 0)


def forget_undefined_types(graph: ir.Graph) -> None:
    """Take a declared type without an element type for none, in place: inference finds the type."""
    for node in graph:
        for output in node.outputs:
            if isinstance(output.type, ir.TensorType) and output.dtype == ir.DataType.UNDEFINED:
                output.type = output.shape = None
        for body in subgraphs(node):
            forget_undefined_types(body)


def declare_initializers(graph: ir.Graph) -> None:
    """Give initializers the types and shapes of their tensors, in place: a file may declare others, or symbols."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape.numpy())
    for node in graph:
        for body in subgraphs(node):
            declare_initializers(body)


def forget_symbols(graph: ir.Graph, symbols: Collection[str]) -> None:
    """Forget symbols that were found to stand for different sizes, in place."""
    _forget_sizes(graph, lambda size: isinstance(size, str) and size in symbols)


def forget_branch_shapes(graph: ir.Graph) -> bool:
    """Forget the shapes of what If nodes give where their branches give others, and what follows, in place.

    Exporters declare the shape of one branch for both. Where the condition is constant, that may be right. The outputs
    of the main graph keep the rank that it declares: that is what whoever runs the model is told.

    Returns:
        Whether there were any.
    """
    return _forget_branch_shapes(graph, set(graph.outputs))


def _forget_branch_shapes(graph: ir.Graph, declared: set[ir.Value]) -> bool:
    affected: set[ir.Value] = set()
    for node in graph:
        for body in subgraphs(node):
            if _forget_branch_shapes(body, declared):
                affected.update(node.outputs)
        if node.op_type == "If" and not node.domain:
            affected.update(output for place, output in enumerate(node.outputs) if _is_of_one_branch(node, place))
    if not affected:
        return False
    own = set(affected)
    for node in graph:
        if any(value in affected for value in (*node.inputs, *captured_values(node))):
            affected.update(node.outputs)
            for body in subgraphs(node):
                forget_shapes(body)
    for value in affected:
        keeps = value in declared or (value.is_graph_output() and value not in own)
        value.shape = ir.Shape([None] * len(value.shape)) if keeps and value.shape is not None else None
    return True


def _is_of_one_branch(node: ir.Node, place: int) -> bool:
    """Whether an output of an If is declared to have a shape that a branch does not give it."""
    outer = dimensions(node.outputs[place])
    condition = node.inputs[0]
    if outer is None or condition is None or constant_tensor(condition) is not None:
        return False
    for body in subgraphs(node):
        inner = told_shape(body.outputs[place])
        if inner is None:
            continue
        if len(inner) != len(outer) or any(map(_differ, outer, inner)):
            return True
    return False


def _differ(outer: Dimension, inner: Dimension) -> bool:
    return None not in (outer, inner) and outer != inner and not str(inner).startswith(MADE_UP)


def _forget_sizes(graph: ir.Graph, is_unknown: Callable[[Dimension], bool]) -> None:
    for value in _values(graph):
        sizes = dimensions(value) or ()
        if any(is_unknown(size) for size in sizes):
            value.shape = ir.Shape([None if is_unknown(size) else size for size in sizes])


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The inputs of a graph and what its nodes give, those in bodies included."""
    yield from graph.inputs
    for node in graph:
        yield from node.outputs
        for body in subgraphs(node):
            yield from _values(body)


def contradictions(graph: ir.Graph) -> int:
    """How many outputs of standard operators have no type after inference, though all inputs have one.

    ONNX's inference stops at a node whose inputs have shapes that do not go together. TorchScript's exporter
    declares such shapes for the branches of an If that are never taken.
    """
    count = 0
    for node in graph:
        if node.domain == "" and all(value is None or value.type is not None for value in node.inputs):
            count += sum(bool(output.name) and output.type is None for output in node.outputs)
    return count


def forget_shapes(graph: ir.Graph) -> dict[ir.Value, ir.Shape]:
    """Remove the shapes of all that nodes give, those in subgraphs included; the graph's outputs keep their rank.

    Returns:
        The shapes that were removed.
    """
    removed: dict[ir.Value, ir.Shape] = {}
    _forget(graph, removed)
    for output in graph.outputs:
        if output in removed:
            output.shape = ir.Shape([None] * len(removed[output]))
    return removed


def _forget(graph: ir.Graph, removed: dict[ir.Value, ir.Shape]) -> None:
    for node in graph:
        for output in node.outputs:
            if output.shape is not None:
                removed[output] = output.shape
                output.shape = None
        for inner in subgraphs(node):
            _forget(inner, removed)
