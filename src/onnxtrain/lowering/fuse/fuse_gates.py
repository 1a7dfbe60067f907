"""Fuse the gradient of a gated unit y f, y = x P(x), into one node.

Gradients of both factors and the unit itself, which the gradient of the next weight reads, are three multiplications
beside the gradient of the activation: seven reads and four writes of tensors of the widest layer instead of three and
three.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, set_inputs, take_over
from onnxtrain.graph.value import dimensions


def fuse_gates(graph: ir.Graph) -> None:
    """Let ``GeluGradient`` multiply by the factors of a gated unit, in place, with equal results.

        a, b -> Mul -> dy;  dy, x -> GeluGradient -> dx, y;  y, b -> Mul -> p;  y, a -> Mul -> q

    becomes a, x, b -> GeluGradient -> dx, p, q. Left alone is a node whose dy or y something else reads, and one of
    unknown or different sizes.

    Requires: a sorted graph with shapes, in which gradients give activations that others read. Ensures: a sorted graph.
    """
    replaced: list[ir.Node] = []
    for node in graph:
        found = _gate(node)
        if found is None:
            continue
        product, by_second, by_first = found
        first, second = product.inputs
        x = node.inputs[1]
        node.resize_outputs(3)
        node.resize_inputs(3)
        set_inputs(node, [first, x, second])
        for place, old in ((1, by_second), (2, by_first)):
            take_over(graph, {old.outputs[0]: node.outputs[place]})
        replaced += found
    remove_nodes(graph, replaced)


def _gate(node: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Return the nodes of dy = a b, y b and y a."""
    if node.op_identifier() != (ONNXTRAIN_DOMAIN, "GeluGradient", ""):
        return None
    if len(node.outputs) != 2 or len(node.inputs) != 2:
        return None
    dy, x = node.inputs
    product, y = None if dy is None else dy.producer(), node.outputs[1]
    if dy is None or x is None or product is None or product.op_identifier() != ("", "Mul", ""):
        return None
    if len(dy.uses()) != 1 or dy.is_graph_output() or y.is_graph_output():
        return None
    first, second = product.inputs
    values, sizes = (first, second, x), dimensions(dy)
    if first is second or not sizes or None in sizes:
        return None
    if any(value is None or dimensions(value) != sizes or value.dtype != x.dtype for value in values):
        return None
    readers = [reader for reader, _ in y.uses()]
    if len(readers) != 2 or any(reader.op_identifier() != ("", "Mul", "") for reader in readers):
        return None
    others = [reader.inputs[1] if reader.inputs[0] is y else reader.inputs[0] for reader in readers]
    if others == [second, first]:
        return product, readers[0], readers[1]
    return (product, readers[1], readers[0]) if others == [first, second] else None
