"""Replace LSTM, GRU and RNN through which a gradient flows by operators with native kernels.

ONNX Runtime's own keep nothing for a gradient, which then recomputes all gates and goes back in time with some ten
nodes a step. As with activations and attention, they are replaced before the gradient is built, in working copies for
sessions that load the native kernels only.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.rules.fused_recurrent import GATES, INPUTS, all_inputs, is_zero, keeps_linear, settings, states
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.lowering.fuse.patterns import varying_values

_FIRST_STATES = (5, 6)  # initial_h and, for an LSTM, initial_c


def fuse_recurrent(model: ir.Model) -> None:
    """Replace recurrent nodes by those of the same name of the domain ``onnxtrain``, in place.

    They have the inputs and outputs of the standard ones, and then the values that the gradient reads: gates [steps,
    batch, directions, gates hidden], and the cells of an LSTM [steps, directions, batch, hidden], or the linear part
    that a GRU with ``linear_before_reset`` scales [steps, batch, directions, hidden]. First states that are known to be
    zeros, as exporters write them, are left out: all previous states then lie in Y, and the gradient does not copy
    them. Left alone are nodes through which no gradient flows, those with ``layout`` = 1 or an unknown hidden size, and
    types that no kernel has. The node keeps its name.

    Requires: a sorted graph with types and shapes. Ensures: a sorted graph; values that outputs or Gradient nodes name
    stay.
    """
    graph = model.graph
    nodes = [node for node in graph if not node.domain and node.op_type in GATES]
    if not nodes:
        return
    varying = varying_values(graph)
    main = Builder(graph, graph.opset_imports[""])
    for node in nodes:
        if _has_kernel(node) and any(value in varying for value in node.inputs):
            _replace(graph, main.before(node), node, varying)


def _has_kernel(node: ir.Node) -> bool:
    """Return whether a kernel computes a node."""
    floating = [value for index, value in enumerate(node.inputs) if value is not None and index != 4]
    if len(floating) < 3 or node.inputs[0] is None or node.inputs[0].dtype not in KERNEL_TYPES:
        return False
    if any(value.dtype != node.inputs[0].dtype for value in floating):
        return False
    if "layout" in node.attributes and node.attributes["layout"].as_int() != 0:
        return False
    return isinstance(_hidden(node), int)


def _hidden(node: ir.Node) -> Dimension:
    if "hidden_size" in node.attributes:
        return node.attributes["hidden_size"].as_int()
    shape = None if node.inputs[2] is None else dimensions(node.inputs[2])
    return shape[-1] if shape else None


def _fits(state: Value, hidden: int) -> bool:
    """Return whether a state may have the size of the layer; the kernel refuses one that has another."""
    return not state.shape or state.shape[-1] in (None, hidden)


def _replace(graph: ir.Graph, op: Builder, node: ir.Node, varying: Collection[ir.Value]) -> None:
    view = Node(node, op)
    x, operator, hidden = view.x, node.op_type, _hidden(node)
    assert isinstance(hidden, int)
    attributes = settings(view) | {"hidden_size": hidden}
    steps, batch = (None, None) if x.shape is None else x.shape[:2]
    directions = 2 if attributes["direction"] == "bidirectional" else 1
    shapes: list[tuple[Dimension, ...]] = [(steps, directions, batch, hidden)]
    shapes += [(directions, batch, hidden)] * (states(operator) - 1)
    shapes.append((steps, batch, directions, GATES[operator] * hidden))
    if operator == "LSTM":
        shapes.append((steps, directions, batch, hidden))
    elif keeps_linear(view):
        shapes.append((steps, batch, directions, hidden))
    inputs = [view.input(index) for index in range(INPUTS[operator])]
    for index in _FIRST_STATES:
        state = inputs[index] if index < len(inputs) else None
        if state is not None and state.ir not in varying and is_zero(state) and _fits(state, hidden):
            inputs[index] = None
    outputs = emit(op, operator, *all_inputs(view, inputs), like=[None] * len(shapes), **attributes)
    for output, shape in zip(outputs, shapes, strict=True):
        output.ir.dtype = x.dtype
        output.with_shape(shape)
    op.emitted[-1].name = node.name
    old = [(value, output.ir) for value, output in zip(node.outputs, outputs, strict=False) if value.name]
    for value, new in old:
        value.type = new.type if value.type is None else value.type
        value.shape = new.shape if value.shape is None else value.shape
    take_over(graph, dict(old))
    remove_nodes(graph, [node])
