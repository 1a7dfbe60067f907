"""LSTM, GRU and RNN: their last state, kernels that keep what the gradients read, and gradients in several nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.rules.fused_recurrent import GATES, INPUTS, all_inputs, is_zero, keeps_linear, settings, states
from onnxtrain.autodiff.rules.recurrent import numbers_with_defaults
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.passes import know_as_much
from onnxtrain.graph.replace import take_over
from onnxtrain.graph.value import (
    Dimension,
    constant_ints,
    constant_number,
    dimensions,
    input_of,
    made_by,
    order_of,
)
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule
from onnxtrain.lowering.rules.transposition import composed, is_identity

_OPERATORS = ("GRU", "LSTM", "RNN")


def write_activation_defaults(model: ir.Model) -> None:
    """Write ``activation_alpha`` and ``activation_beta`` of LSTM, GRU and RNN out in full, in place.

    ONNX Runtime uses 0 for an omitted parameter of Affine, ScaledTanh or ThresholdedRelu; the standard has other
    defaults (workarounds: defaults of recurrent activations).

    Requires: nothing. Ensures: a value for every parameter of these functions; nodes without them are unchanged.
    """
    kinds = ("activation_alpha", "activation_beta")
    for node in all_nodes(model.graph):
        if node.domain or node.op_type not in _OPERATORS or "activations" not in node.attributes:
            continue
        given = [list(node.attributes.get_floats(kind, ())) for kind in kinds]
        found = numbers_with_defaults(node.attributes["activations"].as_strings(), *given)
        for kind, before, values in zip(kinds, given, found or given, strict=True):
            if len(values) > len(before):
                node.attributes[kind] = ir.AttrFloat32s(kind, values)


# A classifier of sequences takes the last step of Y. The gradient of Y is as large as Y and zero before the last step;
# the gradient of the last state Y_h, which holds the same numbers, has one step.

_STEPS, _DIRECTIONS = 0, 1  # axes of Y [steps, directions, batch, hidden]


def _last_step(match: Match) -> tuple[ir.Node, list[int]] | str:
    """Return the layer whose last step a Gather takes, and the axes of Y that the result has, in its order."""
    (gather,) = match.nodes
    found = _source(gather.inputs[0], match.context.named)
    if found is None:
        return "it does not take a step of a recurrent layer with one last state"
    y, axes = found
    layer = y.producer()
    assert layer is not None
    axis = gather.attributes.get_int("axis", 0) % len(axes)
    if axes[axis] != _STEPS or not _is_last(gather.inputs[1], layer, y):
        return "it does not take the last step"
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
    removed = constant_ints(input_of(node, 1))
    if removed is None or len(removed) != 1:
        return None
    axis = removed[0] % len(axes)
    return axes[:axis] + axes[axis + 1 :] if axes[axis] == _DIRECTIONS else None


def _has_one_last_state(layer: ir.Node, named: set[str]) -> bool:
    """Return whether Y_h is one step of Y and may be read: one direction, no lengths, default layout."""
    lengths = input_of(layer, 4)
    if any(state.name in named for state in layer.outputs[1:]):
        return False
    if lengths is not None or layer.attributes.get_int("layout", 0) != 0:
        return False
    return layer.attributes.get_string("direction", "forward") != "bidirectional"


def _is_last(index: ir.Value | None, layer: ir.Node, y: ir.Value) -> bool:
    """Return whether an index is the step that a layer takes last."""
    number = constant_number(index)
    if number is None or index is None or index.shape is None or len(index.shape) != 0:
        return False
    steps = (dimensions(y) or (None,))[_STEPS]
    backwards = layer.attributes.get_string("direction", "forward") == "reverse"
    accepted = {0 if backwards else -1}
    if isinstance(steps, int):
        accepted.add(-steps if backwards else steps - 1)
    return number in accepted


def _emit_state(op: Builder, match: Match) -> Value:
    """Emit Y_h [directions, batch, hidden] with these axes of Y, in this order."""
    layer, axes = match.found
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


read_last_state = Rewrite(Rule(operators("last step", "Gather"), _emit_state, _last_step))
"""Replace the last step of Y of an LSTM, GRU or RNN by Y_h.

The pattern is a Gather of one index from Y: the last step of a forward layer, the first step of a reverse one. A
Squeeze of the directions and Transpose nodes may be between the two, as exporters write them. Bidirectional layers and
layers with sequence lengths are unchanged, since their last states are from several steps.
"""


# ONNX Runtime's own nodes keep nothing for a gradient, which then recomputes all gates and goes back in time with some
# ten nodes a step.

_FIRST_STATES = (5, 6)  # initial_h and, for an LSTM, initial_c


def _has_kernel(match: Match) -> str | None:
    (node,) = match.nodes
    floating = [value for index, value in enumerate(node.inputs) if value is not None and index != 4]
    if len(floating) < 3 or node.inputs[0] is None or node.inputs[0].dtype not in KERNEL_TYPES:
        return "no kernel has its type"
    if any(value.dtype != node.inputs[0].dtype for value in floating):
        return "its types differ"
    if node.attributes.get_int("layout", 0) != 0 or not isinstance(_hidden(node), int):
        return "its layout is another one, or its size is not known"
    varies = any(value in match.context.varying for value in node.inputs)
    return None if varies else "no gradient flows through it"


def _hidden(node: ir.Node) -> Dimension:
    if "hidden_size" in node.attributes:
        return node.attributes["hidden_size"].as_int()
    shape = dimensions(node.inputs[2])
    return shape[-1] if shape else None


def _fits(state: Value, hidden: int) -> bool:
    """Return whether a state may have the size of the layer; the kernel refuses one that has another."""
    return not state.shape or state.shape[-1] in (None, hidden)


def _emit_fused(op: Builder, match: Match) -> Sequence[Value]:
    (node,), varying = match.nodes, match.context.varying
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
    for value, new in zip(node.outputs, outputs, strict=False):
        know_as_much(value, new.ir)
    return outputs


fuse_recurrent = Rewrite(Rule(operators("recurrent layer", *_OPERATORS), _emit_fused, _has_kernel))
"""Replace recurrent nodes through which a gradient flows by those of the same name of the domain ``onnxtrain``.

They have the inputs and outputs of the standard ones, and then the values that the gradient reads: gates [steps, batch,
directions, gates hidden], and the cells of an LSTM [steps, directions, batch, hidden], or the linear part that a GRU
with ``linear_before_reset`` scales [steps, batch, directions, hidden]. First states that are known to be zeros, as
exporters write them, are left out: all previous states then lie in Y, and the gradient does not copy them.
"""


# The backward recurrence reads the cells of an LSTM and the gradient of Y. The gradients of X and of the weights are
# then matmuls over all steps, which read neither, and each reads only some of the other tensors. A single node would
# hold all of them at once.

_PRODUCTS = "RecurrentProductsGradient"
_RESULTS = ("dX", "dW", "dR", "dB")
_READ = {"dX": ("W",), "dW": ("X",), "dR": ("sequence_lens", "initial_h", "Y"), "dB": ()}
_NODES = (("dR",), ("dX",), ("dW", "dB"))
"""Results of each node, in order. Y is released after the first, if no other layer reads it; W is updated last."""


def split_recurrent_gradients(model: ir.Model) -> None:
    """Compute dX, dW, dR and dB from dgates in nodes behind the gradient of a recurrent layer, in place.

    Before these nodes the runtime releases the tensors that they do not read: the cells of an LSTM and the gradient of
    Y; between them, Y, and a weight's gradient once the weight is updated. A GRU with ``linear_before_reset`` = 0 is
    not split, since its matmuls read more than the gradients of the gates.

    Requires: a sorted graph whose fused operators are those that kernels run, with types and shapes. Ensures: a sorted
    graph.
    """
    graph = model.graph
    main = Builder(graph)
    nodes = list(graph)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        if node.domain == ONNXTRAIN_DOMAIN and node.op_type.removesuffix("Gradient") in _OPERATORS:
            if node.op_type in _OPERATORS or (node.op_type == "GRUGradient" and not keeps_linear(Node(node, main))):
                continue
            _split(graph, main if following is None else main.before(following), node)


def _split(graph: ir.Graph, op: Builder, node: ir.Node) -> None:
    y = INPUTS[node.op_type.removesuffix("Gradient")]
    inputs = {"X": 0, "W": 1, "sequence_lens": 4, "initial_h": 5, "Y": y}
    spaces = 2 if node.op_type == "GRUGradient" else 1  # dgates, and dlinear of a GRU
    moved = {
        name: value
        for name, value in zip(_RESULTS, node.outputs[spaces:], strict=False)
        if value.uses() or value.is_graph_output()
    }
    for results in _NODES:
        wanted = [name if name in results and name in moved else None for name in _RESULTS]
        while wanted and wanted[-1] is None:
            wanted.pop()
        if not wanted:
            continue
        read = {given for name in wanted if name is not None for given in _READ[name]}
        values = {name: node.inputs[slot] if name in read else None for name, slot in inputs.items()}
        batch_first = _batch_first(values["X"])
        if batch_first is not None:
            values["X"] = batch_first
        dtype = node.outputs[0].dtype
        assert dtype is not None
        nothing = [np.zeros(0, np.int32 if name == "sequence_lens" else dtype.numpy()) for name in inputs]
        found = emit(
            op,
            _PRODUCTS,
            *(op.constant(none) if x is None else op.wrap(x) for x, none in zip(values.values(), nothing, strict=True)),
            *(op.wrap(value) for value in node.outputs[:spaces]),
            like=[None if name is None else op.wrap(moved[name]) for name in wanted],
            direction=node.attributes.get_string("direction", None),
            batch_first=None if batch_first is None else 1,
        )
        take_over(graph, {moved[name]: new.ir for name, new in zip(wanted, found, strict=True) if name is not None})
        for name, new in zip(wanted, found, strict=True):
            if name is None:
                new.ir.name = ""
    if moved:
        for old in node.outputs[spaces : spaces + len(_RESULTS)]:
            old.name = ""
        used = [index for index, value in enumerate(node.outputs) if value.uses() or value.is_graph_output()]
        node.resize_outputs(1 + max(used))


def _batch_first(x: ir.Value | None) -> ir.Value | None:
    """Return the graph input that X [steps, batch, inputs] is a transposition of, or ``None``.

    The input exists in any case, so X need not be kept from the forward pass.
    """
    node = made_by(x, "Transpose")
    source = None if node is None or order_of(node, 3) != (1, 0, 2) else node.inputs[0]
    return source if source is not None and source.is_graph_input() else None
