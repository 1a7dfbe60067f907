"""Sequences and optionals of tensors: the gradient of a sequence is the sequence of its items' gradients."""

from __future__ import annotations

import numpy as np

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import from_start
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value


@register_gradient("SequenceConstruct")
def sequence_construct(node: Node, dy: Value) -> Gradients:
    """y = [x_0, x_1, ...]: dx_i = dy[i]."""
    op = node.op
    return [op.SequenceAt(dy, op.constant(index, np.int64)) for index in range(len(node.inputs))]


@register_gradient("SequenceAt")
def sequence_at(node: Node, dy: Value) -> Gradients:
    """y = x[i]: dx = zeros with dy at i."""
    position = _from_start(node.input_required(1), node.x)
    return node.op.placed(dy, position, node.x), None


@register_gradient("SequenceInsert")
def sequence_insert(node: Node, dy: Value) -> Gradients:
    """y = x with one more item at i: dx = dy without it, ditem = dy[i].

    The position follows from dy alone, so a loop need not save the sequence of each step.
    """
    op, given = node.op, node.input(2)
    position = op.constant(-1, np.int64) if given is None else inserted_position(op, given)
    return op.SequenceErase(dy, position), op.SequenceAt(dy, position), None


def inserted_position(op: Builder, given: Value) -> Value:
    """The position of an inserted item; if negative, it is one less than the position of the insertion."""
    known = given.constant()
    if known is not None:
        return given if known >= 0 else op.constant(known - 1, given.dtype)
    return op.Where(op.Less(given, op.scalar(0, given)), op.Sub(given, op.scalar(1, given)), given)


@register_gradient("SequenceErase")
def sequence_erase(node: Node, dy: Value) -> Gradients:
    """y = x without item i: dx = dy with zeros at i."""
    op, given = node.op, node.input(1)
    position = _from_start(op.constant(-1, np.int64) if given is None else given, node.x)
    return op.SequenceInsert(dy, op.zeros_like(op.SequenceAt(node.x, position)), position), None


@register_gradient("SplitToSequence")
def split_to_sequence(node: Node, dy: Value) -> Gradients:
    """y = [parts of x along an axis]: dx = the items of dy one after the other."""
    alone = node.input(1) is None and node.attribute("keepdims", 1) == 0
    return node.op.ConcatFromSequence(dy, axis=node.attribute("axis", 0), new_axis=int(alone))


@register_gradient("ConcatFromSequence")
def concat_from_sequence(node: Node, dy: Value) -> Gradients:
    """y = the items of x one after the other or stacked along an axis: dx = [parts of dy]."""
    op, axis = node.op, node.attribute("axis")
    if node.attribute("new_axis", 0):
        return op.SplitToSequence(dy, None, axis=axis, keepdims=0)
    sizes = op.map_sequences([node.x], lambda items: items[0].op.dimension(items[0], axis))
    return op.SplitToSequence(dy, op.ConcatFromSequence(sizes, axis=0), axis=axis)


@register_gradient("Optional", "OptionalGetElement")
def optional(node: Node, dy: Value) -> Gradients:
    """y = x, which may be absent but is not where a gradient arrives: dx = dy."""
    return dy


def _from_start(position: Value, sequence: Value) -> Value:
    """A position in a sequence, counted from its start."""
    op, known = sequence.op, position.constant()
    if known is not None and known >= 0:
        return position
    return from_start(position, op.cast(op.SequenceLength(sequence), position.dtype))
