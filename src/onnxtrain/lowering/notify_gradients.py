"""Notify the process when gradients are ready, while the rest of the backward pass runs (communication overlap)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph.clone import ancestors, producers
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import made_by

LISTENER = "onnxtrain/gradients_ready"
"""Name of the input with the address of the function to call, 0 for none."""


def notify_gradients(graph: ir.Graph, groups: Sequence[Sequence[str]]) -> None:
    """Insert a ``GradientsReady`` for every group of outputs, as early as it can run, in place.

    ONNX Runtime keeps the order of a graph as far as it can, so that a node runs soon after its last input is ready. An
    output that is a copy of another value becomes that value, so that its producer writes the memory of the output.

    Requires: a sorted graph for native kernels, whose outputs the groups name. Ensures: a sorted graph with an input
    :data:`LISTENER`, int64 [], and one more output for each group.
    """
    outputs = {str(value.name): value for value in graph.outputs}
    for name in (name for group in groups for name in group):
        outputs[name] = _without_copy(graph, outputs[name])
    listener = ir.Value(name=LISTENER, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
    graph.inputs.append(listener)
    graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)
    announcing = []
    for number, group in enumerate(groups):
        node = ir.Node(
            ONNXTRAIN_DOMAIN,
            "GradientsReady",
            [listener, *(outputs[name] for name in group)],
            [ir.AttrInt64("group", number)],
            num_outputs=1,
            name=f"gradients_ready/{number}",
        )
        node.outputs[0].name = f"{LISTENER}/{number}"
        node.outputs[0].type, node.outputs[0].shape = listener.type, ir.Shape(())
        graph.append(node)
        graph.outputs.append(node.outputs[0])
        announcing.append(node)
    _put_in_order(graph, announcing)


def _put_in_order(graph: ir.Graph, announcing: Sequence[ir.Node]) -> None:
    """Compute and announce each group before the values that only later groups need."""
    nodes = list(graph)
    index = {node: position for position, node in enumerate(nodes)}
    order: dict[ir.Node, tuple[int, ...]] = {}
    for node in announcing:
        for needed in sorted(ancestors([node], known=order), key=index.__getitem__):
            order[needed] = (len(order),)
    for node in nodes:
        if node not in order:
            last = max((order[producer] for producer in producers(node)), default=(-1,))
            order[node] = (*last, index[node])
    for before, node in itertools.pairwise(sorted(order, key=order.__getitem__)):
        graph.insert_after(before, node)


def _without_copy(graph: ir.Graph, output: ir.Value) -> ir.Value:
    """Return the value that an output copies, under the output's name, unless it is an output or input itself."""
    node = made_by(output, "Identity")
    if node is None:
        return output
    (source,) = node.inputs
    if source is None or source.producer() is None or source.is_graph_output():
        return output
    take_over(graph, {output: source})
    remove_nodes(graph, [node])
    return source
