"""Merge a Scan that sums over slices with its gradient, which scans the same slices.

The gradient of a Scan is a Scan that recomputes each step, from the last to the first
(:mod:`onnxtrain.autodiff.rules.control_flow`). If the forward Scan only sums, the order of steps does not matter, and
the backward Scan, which recomputes the terms, can sum them, too. A loss whose logits are computed in chunks
(:mod:`onnxtrain.losses.chunks`) has this pattern; without this pass the logits would be computed twice.
"""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import Values, ancestors, clone_nodes
from onnxtrain.graph.passes import NEVER_SHARED, attribute_key
from onnxtrain.graph.value import attributes_of, constant_number
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule


def _backward_of(match: Match) -> ir.Node | str:
    """Return the Scan that goes back over the slices of a sum, and does not depend on it."""
    (forward,), graph = match.nodes, match.graph
    if graph is None or not _is_sum(forward):
        return "it does not only sum over slices"
    backward = next((node for node in graph if _goes_back(node, forward)), None)
    if backward is None or forward in ancestors([backward]):
        return "no Scan goes back over its slices alone"
    return backward


def _is_sum(node: ir.Node) -> bool:
    """Return whether a node is a Scan that adds a value of each slice to a number that begins with zero."""
    if len(node.outputs) != 1:
        return False
    body, initial = node.attributes["body"].as_graph(), node.inputs[0]
    if len(node.inputs) - _slices(node) != 1 or initial is None or initial.is_graph_input():
        return False
    if constant_number(initial) != 0:
        return False
    state, added = body.inputs[0], _addition(body)
    return added is not None and len(state.uses()) == 1 and state in added.inputs


def _addition(body: ir.Graph) -> ir.Node | None:
    """Return the node that computes the state after a step."""
    node = body.outputs[0].producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node if node is not None and node.op_type == "Add" and not node.domain else None


def _slices(scan: ir.Node) -> int:
    return scan.attributes["num_scan_inputs"].as_int()


def _taken(scan: ir.Node) -> dict[ir.Value, tuple[int, int, int]]:
    """Return the tensors that a Scan slices: index among its inputs, axis and direction."""
    first, count = len(scan.inputs) - _slices(scan), _slices(scan)
    given = [scan.attributes.get_ints(f"scan_input_{name}", [0] * count) for name in ("axes", "directions")]
    return {
        value: (first + index, axis, direction)
        for index, (value, axis, direction) in enumerate(zip(scan.inputs[first:], *given, strict=True))
        if value is not None
    }


def _goes_back(node: ir.Node, forward: ir.Node) -> bool:
    """Return whether a node is a Scan over the slices of another Scan in the opposite order."""
    if node is forward or node.op_type != "Scan" or node.domain:
        return False
    forward_slices, backward_slices = _taken(forward), _taken(node)
    return all(
        value in backward_slices and backward_slices[value][1:3] == (axis, 1 - direction)
        for value, (_, axis, direction) in forward_slices.items()
    )


def _emit_sum(_: Builder, match: Match) -> Value:
    """Add the terms as an output of the backward Scan, and return their sum."""
    (forward,), backward = match.nodes, match.found
    op: Builder = match.context.main  # at the end, behind the backward Scan
    forward_body, backward_body = forward.attributes["body"].as_graph(), backward.attributes["body"].as_graph()
    values: Values = {
        forward_body.inputs[slot]: backward_body.inputs[_taken(backward)[value][0]]
        for value, (slot, *_) in _taken(forward).items()
    }
    added, state = _addition(forward_body), forward_body.inputs[0]
    assert added is not None
    term = next(value for value in added.inputs if value is not state)
    assert term is not None
    backward_body.extend(
        _copied(
            [node for node in forward_body if node is not added and not _follows(node, added)], backward_body, values
        )
    )
    identity = ir.Node("", "Identity", [values.get(term, term)], num_outputs=1)
    given = identity.outputs[0]
    given.name, given.type, given.shape = f"{match.y.name}/term", term.type, ir.Shape(())
    backward_body.append(identity)
    backward_body.outputs.append(given)
    backward.resize_outputs(len(backward.outputs) + 1)
    terms = backward.outputs[-1]
    terms.name, terms.type, terms.shape = f"{match.y.name}/terms", term.type, ir.Shape([None])
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in backward.attributes:
            backward.attributes.add(ir.AttrInt64s(name, [*backward.attributes[name].as_ints(), 0]))
    return op.ReduceSum(op.wrap(terms), keepdims=0)


def _follows(node: ir.Node, added: ir.Node) -> bool:
    """Return whether a node forwards the state after the step."""
    return node.op_type == "Identity" and node.inputs[0] in added.outputs


def _copied(nodes: list[ir.Node], back: ir.Graph, values: Values) -> list[ir.Node]:
    """Copy nodes into a body, which may compute the same values already."""
    known = {key: node for node in back if (key := _key(node, {})) is not None}
    made: list[ir.Node] = []
    for node in nodes:
        key = _key(node, values)
        same = None if key is None else known.get(key)
        if same is None or len(same.outputs) < len(node.outputs):
            made += clone_nodes([node], values)
        else:
            values.update(zip(node.outputs, same.outputs, strict=False))
    return made


def _key(node: ir.Node, values: Values) -> Hashable | None:
    """Return a key that is equal for nodes that compute the same from equal values."""
    attributes = attribute_key(attributes_of(node))
    if attributes is None or node.op_type in NEVER_SHARED:
        return None
    inputs = tuple(id(None if value is None else values.get(value, value)) for value in node.inputs)
    return node.op_identifier(), inputs, attributes


join_scans = Rewrite(Rule(operators("sum over slices", "Scan"), _emit_sum, _backward_of), sort=True)
"""Let the gradient of a Scan that is a sum over slices return the sum, too.

The pattern is a Scan with one state, which starts at zero and to which each step adds a number, and a Scan over the
same tensors in the opposite order that does not depend on the first. The order of summation changes.
"""
