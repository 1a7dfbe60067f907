"""If, differentiated through its branches.

The gradient is an If on the same condition. Each of its branches recomputes the model's branch and carries the
gradients of its outputs back to the captured values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.bodies import copy_body, finish_body
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, dimensions


@register_gradient("If")
def if_(node: Node, *dys: Value | None) -> Gradients:
    """y = f(c) or g(c) of captured values c: dc = the gradient in the taken branch."""
    wanted = [value for value in node.captured if node.wants(value)]
    if not wanted:
        return [None] * (1 + len(node.captured))
    names = ("then_branch", "else_branch")
    shapes = [[dimensions(y) for y in node.ir.attributes[name].as_graph().outputs] for name in names]
    then_branch = _branch(node, names[0], _seen_in_branch(dys, *shapes), wanted)
    else_branch = _branch(node, names[1], _seen_in_branch(dys, *shapes[::-1]), wanted)
    made = node.op.several("If", node.x, outputs=len(wanted), then_branch=then_branch, else_branch=else_branch)
    found = iter(made)
    return [None, *(next(found) if node.wants(value) else None for value in node.captured)]


class _Arriving(NamedTuple):
    """A gradient of an If output as a branch sees it: the shapes of branches may differ, even in rank."""

    dy: Value
    shape: tuple[Dimension, ...] | None
    differs: bool

    def inside(self, op: Builder) -> Value:
        """The gradient in the shape of the branch's own output."""
        dy = op.wrap(self.dy.ir)
        return op.Identity(dy).with_shape(self.shape) if self.differs and not dy.is_sequence else dy


def _seen_in_branch(
    dys: Sequence[Value | None],
    own: Sequence[tuple[Dimension, ...] | None],
    other: Sequence[tuple[Dimension, ...] | None],
) -> list[_Arriving | None]:
    """Return the output gradients for one branch; a gradient's declared shape may come from the other branch."""
    return [
        None if dy is None else _Arriving(dy, mine, _contradicts(dy.shape, mine, others))
        for dy, mine, others in zip(dys, own, other, strict=True)
    ]


def _contradicts(
    outer: tuple[Dimension, ...] | None, own: tuple[Dimension, ...] | None, other: tuple[Dimension, ...] | None
) -> bool:
    if outer is None or (own is None and other is None):
        return False
    if own is None or len(own) != len(outer):
        return True
    return any(given is not None and given != size for given, size in zip(outer, own, strict=True))


def _branch(node: Node, name: str, dys: Sequence[_Arriving | None], wanted: Sequence[Value]) -> ir.Graph:
    op = node.op.body([], name)
    outputs = copy_body(node.ir.attributes[name].as_graph(), op, {})
    seeds = [(y, dy.inside(op)) for y, dy in zip(outputs, dys, strict=True) if dy is not None]
    xs = [op.wrap(value.ir) for value in wanted]
    for x, dx in zip(xs, node.pull_back(op, seeds, xs), strict=True):
        op.output(op.zeros_like(x) if dx is None else dx)
    finish_body(op)
    return op.graph
