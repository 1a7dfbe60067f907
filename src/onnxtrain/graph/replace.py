"""Put one value in the place of another."""

from __future__ import annotations

import onnx_ir as ir


def replace_value(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` stand wherever ``old`` did, under the name of ``old``, through an Identity at the graph's end.

    ``new`` keeps its own name, by which others may look for it; :func:`onnxtrain.graph.passes.clean` removes
    Identities that nobody needs. Ensures no order: sort the graph afterwards.
    """
    name = old.name
    identity = ir.Node("", "Identity", [new], num_outputs=1)
    graph.append(identity)
    output = identity.outputs[0]
    output.type, output.shape = new.type, new.shape
    old.replace_all_uses_with(output, replace_graph_outputs=True)
    old.name = None
    output.name = name
