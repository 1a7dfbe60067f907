"""If, differentiated through its branches.

The gradient is an If on the same condition. Each of its branches recomputes the model's branch and carries the
gradients of its outputs back to the captured values.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.bodies import copy_body, finish_body
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, dimensions

Shape = tuple[Dimension, ...] | None


@register_gradient("If")
def if_(node: Node, *dys: Value | None) -> Gradients:
    """y = f(c) or g(c) of captured values c: dc = the gradient in the taken branch."""
    wanted = [value for value in node.captured if node.wants(value)]
    if not wanted:
        return [None] * (1 + len(node.captured))
    names = ("then_branch", "else_branch")
    one, other = (_branch(node, name, names[1 - index], dys, wanted) for index, name in enumerate(names))
    found = iter(node.op.several("If", node.x, outputs=len(wanted), then_branch=one, else_branch=other))
    return [None, *(next(found) if node.wants(value) else None for value in node.captured)]


def _inside(op: Builder, dy: Value, own: Shape, other: Shape) -> Value:
    """A gradient in the shape of a branch's own output; the other branch may declare another shape, even rank."""
    outer, inner = dy.shape, op.wrap(dy.ir)
    if outer is None or (own is None and other is None) or dy.is_sequence:
        return inner
    if own is not None and len(own) == len(outer) and all(a in (None, b) for a, b in zip(outer, own, strict=True)):
        return inner
    return op.Identity(inner).with_shape(own)


def _branch(node: Node, name: str, other: str, dys: Sequence[Value | None], wanted: Sequence[Value]) -> ir.Graph:
    op = node.op.body([], name)
    graph, others = (node.ir.attributes[each].as_graph() for each in (name, other))
    outputs = zip(copy_body(graph, op, {}), dys, graph.outputs, others.outputs, strict=True)
    seeds = [
        (y, _inside(op, dy, dimensions(own), dimensions(theirs))) for y, dy, own, theirs in outputs if dy is not None
    ]
    xs = [op.wrap(value.ir) for value in wanted]
    for x, dx in zip(xs, node.pull_back(op, seeds, xs), strict=True):
        op.output(op.zeros_like(x) if dx is None else dx)
    finish_body(op)
    return op.graph
