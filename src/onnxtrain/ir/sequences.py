"""Sequences of tensors as gradients: what is made of their items, one item among zeros, and sums of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxtrain.ir.value import Value

if TYPE_CHECKING:
    from onnxtrain.ir.builder import Builder

Placed = dict[ir.Value, tuple[Value, Value]]
"""Sequences that are zeros but for one item: the item and its place, counted from the start."""


def map_sequences(op: Builder, values: Sequence[Value], function: Callable[[list[Value]], Value]) -> Value:
    """A sequence of what a function makes of the items, one of each of some sequences of equal length."""
    body = op.body([], "item")
    items = []
    for value in values:
        item = ir.Value(name=f"{body.unique_prefix()}item", type=ir.TensorType(value.dtype))
        body.graph.inputs.append(item)
        items.append(body.wrap(item))
    body.output(function(items))
    return op.SequenceMap(*values, body=body.graph)


def sum_of_sequences(op: Builder, values: Sequence[Value], placed: Placed) -> Value:
    """The sum of sequences, item by item; where one has a single item that is not zero, only that is added."""
    single = [value for value in values if value.ir in placed]
    whole = [value for value in values if value.ir not in placed]
    if not whole:
        whole, single = single[:1], single[1:]
    total = whole[0]
    if len(whole) > 1:
        total = map_sequences(op, whole, lambda items: items[0].op.sum_of(items))
    for item, place in (placed[value.ir] for value in single):
        changed = op.SequenceAt(total, place) + item
        total = op.SequenceInsert(op.SequenceErase(total, place), changed, place)
    return total
