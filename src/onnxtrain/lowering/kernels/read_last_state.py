"""Read the last step of a recurrent layer from its last state.

A classifier of sequences takes the last step of Y. The gradient of Y is as large as Y and zero before the last step;
the gradient of the last state Y_h, which holds the same numbers, has one step.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.replace import take_over
from onnxtrain.graph.value import constant_number, constant_tensor, dimensions
from onnxtrain.lowering.fuse.patterns import named_by_gradients, remove_unread
from onnxtrain.lowering.fuse.transposition import composed, is_identity, order_of

_OPERATORS = frozenset({"GRU", "LSTM", "RNN"})
_STEPS, _DIRECTIONS = 0, 1  # axes of Y [steps, directions, batch, hidden]


def read_last_state(model: ir.Model) -> None:
    """Replace the last step of Y of an LSTM, GRU or RNN by Y_h, in place.

    The pattern is a Gather of one index from Y: the last step of a forward layer, the first step of a reverse one. A
    Squeeze of the directions and Transpose nodes may be between the two, as exporters write them. Bidirectional layers
    and layers with sequence lengths are unchanged, since their last states are from several steps; so are paths with a
    value that a Gradient node names.

    Requires: a sorted graph with shapes. Ensures: a sorted graph; values that outputs or Gradient nodes name stay, and
    so does what depends on them.
    """
    graph = model.graph
    gathers = [node for node in graph if node.op_type == "Gather" and not node.domain]
    if not gathers or not any(node.op_type in _OPERATORS and not node.domain for node in graph):
        return
    named = named_by_gradients(graph)
    main = Builder(graph, graph.opset_imports[""])
    replaced = []
    for gather in gathers:
        found = _layer(gather, named)
        if found is None:
            continue
        take_over(graph, {gather.outputs[0]: _last_state(main.before(gather), *found).ir})
        replaced.append(gather)
    remove_unread(graph, replaced, named)


def _layer(gather: ir.Node, named: set[str]) -> tuple[ir.Node, list[int]] | None:
    """Return the layer whose last step a node takes, and the axes of Y that the result has, in its order."""
    found = _source(gather.inputs[0], named)
    if found is None:
        return None
    y, axes = found
    layer = y.producer()
    assert layer is not None
    attribute = gather.attributes.get("axis")
    axis = (0 if attribute is None else attribute.as_int()) % len(axes)
    if axes[axis] != _STEPS or not _is_last(gather.inputs[1], layer, y):
        return None
    return layer, axes[:axis] + axes[axis + 1 :]


def _source(value: ir.Value | None, named: set[str]) -> tuple[ir.Value, list[int]] | None:
    """Return the Y behind a value that permutes or removes its axes, and the remaining axes in order."""
    axes: list[int] | None = None
    ways: list[ir.Node] = []
    while value is not None and value.name not in named and (node := value.producer()) is not None:
        if node.domain:
            return None
        if node.op_type in _OPERATORS:
            if value is not node.outputs[0] or not _has_one_last_state(node, named):
                return None
            axes = [0, 1, 2, 3]
            for way in reversed(ways):
                axes = _through(way, axes)
                if axes is None:
                    return None
            return value, axes
        if node.op_type not in ("Squeeze", "Transpose"):
            return None
        ways.append(node)
        value = node.inputs[0]
    return None


def _through(node: ir.Node, axes: list[int]) -> list[int] | None:
    """Return the axes behind a Squeeze or Transpose; ``None`` if an axis other than the directions may be removed."""
    if node.op_type == "Transpose":
        return list(composed(axes, order_of(node, len(axes))))
    given = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if given is None else constant_tensor(given)
    if tensor is None or tensor.size != 1:
        return None
    axis = int(tensor.numpy().reshape(-1)[0]) % len(axes)
    return axes[:axis] + axes[axis + 1 :] if axes[axis] == _DIRECTIONS else None


def _has_one_last_state(layer: ir.Node, named: set[str]) -> bool:
    """Return whether Y_h is one step of Y and may be read: one direction, no lengths, default layout."""
    lengths = layer.inputs[4] if len(layer.inputs) > 4 else None
    if any(state.name in named for state in layer.outputs[1:]):
        return False
    direction, layout = layer.attributes.get("direction"), layer.attributes.get("layout")
    return (
        lengths is None
        and (direction is None or direction.as_string() != "bidirectional")
        and (layout is None or layout.as_int() == 0)
    )


def _is_last(index: ir.Value | None, layer: ir.Node, y: ir.Value) -> bool:
    """Return whether an index is the step that a layer takes last."""
    number = constant_number(index)
    if number is None or index is None or index.shape is None or len(index.shape) != 0:
        return False
    direction, shape = layer.attributes.get("direction"), dimensions(y)
    steps = None if shape is None else shape[_STEPS]
    backwards = direction is not None and direction.as_string() == "reverse"
    accepted = {0 if backwards else -1}
    if isinstance(steps, int):
        accepted.add(-steps if backwards else steps - 1)
    return number in accepted


def _last_state(op: Builder, layer: ir.Node, axes: list[int]) -> Value:
    """Return Y_h [directions, batch, hidden] with these axes of Y, in this order."""
    view = Node(layer, op)
    y = view.outputs[0]
    state = view.output_required(1, y.dtype, None if y.shape is None else y.shape[1:])
    there = [1, 2, 3]
    if _DIRECTIONS not in axes:
        state, there = op.Squeeze(state, op.ints(0)), [2, 3]
    order = [there.index(axis) for axis in axes]
    if not is_identity(order):
        return op.Transpose(state, perm=order)
    return state if len(order) == 2 else op.Identity(state)
