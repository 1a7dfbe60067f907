"""Merge transpositions: take a value from where it already had the wanted order of axes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, Order, dimensions, order_of


def transposed(op: Builder, value: ir.Value, order: Sequence[int], named: Collection[str]) -> Value:
    """Return a transposed value, in one Transpose together with those before it, or in none."""
    view = _View(value, tuple(order))
    for earlier in _earlier(view, named):
        moved = earlier.shape is None or (earlier.order != view.order and earlier.target() is not None)
        view = earlier if moved else view
    result = op.wrap(view.value)
    if view.shape is not None:
        result = op.Reshape(result, op.ints(*(view.target() or ()))).with_shape(view.shape)
    return result if is_identity(view.order) else op.Transpose(result, perm=list(view.order))


def transposes(value: ir.Value, named: Collection[str]) -> Iterator[ir.Node]:
    """Yield the nodes that transpose a value, also through a Reshape to the same shape, which exporters write.

    The search stops at a named value, since its dependents must keep reading it.
    """
    if value.name in named:
        return
    shape = dimensions(value)
    for node in dict.fromkeys(node for node, _ in value.uses()):
        output = node.outputs[0]
        if node.domain or node.graph is not value.graph or output.name in named:
            continue
        if node.op_type == "Transpose":
            yield node
        elif node.op_type == "Reshape" and shape is not None and None not in shape and dimensions(output) == shape:
            yield from transposes(output, named)


def composed(first: Sequence[int], second: Sequence[int]) -> Order:
    """Return the order of one transposition after another."""
    return tuple(first[axis] for axis in second)


def is_identity(order: Sequence[int]) -> bool:
    """Return whether axes stay where they are."""
    return list(order) == list(range(len(order)))


class _View(NamedTuple):
    """A value, reshaped where a shape is given, then transposed."""

    value: ir.Value
    order: Order  # of the Transpose
    shape: tuple[Dimension, ...] | None = None  # of a Reshape that splits an axis; numbers or symbols
    split: int = 0  # the first of these two axes

    def target(self) -> list[int] | None:
        """Return the shape as numbers: axes before the split can be copied (0), one other can be left open (-1)."""
        target = []
        for axis, size in enumerate(self.shape or ()):
            target.append(size if isinstance(size, int) else 0 if axis < self.split else -1)
            if size == 0:
                return None
        return target if target.count(-1) <= 1 else None


def _earlier(view: _View | None, named: Collection[str]) -> Iterator[_View]:
    """Yield the same tensor as a view of values further and further up."""
    while view is not None and view.value.name not in named:
        node = view.value.producer()
        source = None if node is None or node.domain else node.inputs[0]
        if node is None or source is None:
            return
        if node.op_type == "Transpose":
            view = _before_transpose(view, source, node)
        else:
            view = _before_reshape(view, source) if node.op_type == "Reshape" else None
        if view is not None:
            yield view


def _before_transpose(view: _View, source: ir.Value, node: ir.Node) -> _View:
    if view.shape is None:
        return _View(source, composed(order_of(node, len(view.order)), view.order))
    order = order_of(node, len(view.shape) - 1)
    split = order[view.split]
    before = [axis + (axis > split) for axis in order]  # in the shape with one axis more
    before.insert(view.split + 1, split + 1)
    shape = [view.shape[before.index(axis)] for axis in range(len(before))]
    return _View(source, composed(before, view.order), tuple(shape), split)


def _before_reshape(view: _View, source: ir.Value) -> _View | None:
    """Return the view before a Reshape that splits the first of three axes, or that merged the split axes."""
    outer, inner = dimensions(view.value), dimensions(source)
    if view.shape is not None:
        return _View(source, view.order) if inner == view.shape else None
    if outer is None or inner is None or len(inner) != 3 or len(outer) != 4 or None in outer or outer[2:] != inner[1:]:
        return None
    return _View(source, view.order, outer)
