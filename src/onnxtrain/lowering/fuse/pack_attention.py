"""Let attention read queries, keys and values where one layer wrote them, side by side in each row.

A Split copies them apart, and in the backward pass a Concat copies their gradients together again: each reads and
writes as many bytes as the layer's result has.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.rules.fused_attention import ATTENTION, PACKED
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, substitute, take_over
from onnxtrain.graph.value import dimensions
from onnxtrain.lowering.fuse.patterns import is_needed, named_by_gradients, remove_unread

_PARTS = 3


def pack_attention(graph: ir.Graph) -> None:
    """Replace attention of the three parts of a Split by ``PackedAttention`` of the whole, in place.

    With x [b, s, 3 h d] and parts [b, s, h d]:

        x -> Split -> Reshape, Reshape, Reshape to [b, s, h, d] -> Attention of q, k, v
        becomes    x -> Reshape to [b, s, 3, h, d] -> PackedAttention

    with the same bits. Left alone are parts that are not queries, keys and values in this order, of which anything else
    reads more than the shape, or whose h and d are not known.

    Requires: a sorted graph with shapes, whose gradients are not built. Ensures: the same.
    """
    named = named_by_gradients(graph)
    for node in list(graph):
        if node.domain != ONNXTRAIN_DOMAIN or node.op_type != ATTENTION:
            continue
        packed = _packed(node, named)
        if packed is None:
            continue
        heads, size = packed.heads, packed.size
        op = Builder(graph, graph.opset_imports[""], before=packed.split)
        op.scope = node.name or ""
        x = op.wrap(packed.x)
        shapes = [reader for value in node.inputs[:_PARTS] for reader in _readers(value) if reader is not node]
        if shapes:
            sizes = op.Concat(op.Gather(op.Shape(x), op.ints(0, 1)), op.ints(heads, size), axis=0)
            substitute(graph, {reader.outputs[0]: sizes.ir for reader in shapes})
            remove_nodes(graph, shapes)
        op = op.before(node)
        x = op.wrap(x.ir)
        qkv = op.Reshape(x, op.ints(0, 0, _PARTS, heads, size)).with_shape((*(x.shape or ())[:2], _PARTS, heads, size))
        bias = [op.wrap(value) for value in node.inputs[_PARTS:] if value is not None]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        made = op.several(PACKED, qkv, *bias, outputs=len(node.outputs), domain=ONNXTRAIN_DOMAIN, **attributes)
        op.emitted[-1].name = node.name  # recompute= names the node that computes y
        take_over(graph, {old: new.ir for old, new in zip(node.outputs, made, strict=True)})
        remove_unread(graph, [node], named)


class _Packed(NamedTuple):
    """A Split into queries, keys and values, what it splits, and the sizes of a part's row."""

    split: ir.Node
    x: ir.Value
    heads: int
    size: int


def _packed(node: ir.Node, named: set[str]) -> _Packed | None:
    """Return the Split before an attention that alone reads its parts."""
    parts = [_part(value, named) for value in node.inputs[:_PARTS]]
    first = parts[0]
    split = None if first is None else first.producer()
    if split is None or split.op_type != "Split" or split.domain or list(split.outputs) != parts:
        return None
    x = split.inputs[0]
    sizes = None if x is None else dimensions(x)
    shapes = {dimensions(value) for value in node.inputs[:_PARTS] if value is not None}
    if x is None or sizes is None or len(sizes) != 3 or len(shapes) != 1:
        return None
    (shape,) = shapes
    axis = split.attributes["axis"].as_int() if "axis" in split.attributes else 0
    if shape is None or axis not in (-1, 2) or shape[:2] != sizes[:2] or None in shape[:2]:
        return None
    heads, size = shape[2:]
    if not isinstance(heads, int) or not isinstance(size, int) or sizes[2] != _PARTS * heads * size:
        return None
    widths = {(dimensions(part) or (None,))[-1] for part in split.outputs}
    return _Packed(split, x, heads, size) if widths == {heads * size} else None


def _part(value: ir.Value | None, named: set[str]) -> ir.Value | None:
    """Return what a Reshape takes, if nothing reads that, or its result but this attention, and the result's shape."""
    reshape = None if value is None else value.producer()
    if value is None or reshape is None or reshape.op_type != "Reshape" or reshape.domain or is_needed(value, named):
        return None
    others = [reader for reader in _readers(value) if reader.op_type != ATTENTION]
    if len(others) != len(value.uses()) - 1 or not all(
        _is_whole_shape(reader, reshape.graph, named) for reader in others
    ):
        return None
    part = reshape.inputs[0]
    return part if part is not None and len(part.uses()) == 1 and not is_needed(part, named) else None


def _readers(value: ir.Value | None) -> list[ir.Node]:
    return [] if value is None else [reader for reader, _ in value.uses()]


def _is_whole_shape(node: ir.Node, graph: ir.Graph | ir.Function | None, named: set[str]) -> bool:
    whole = node.op_type == "Shape" and not node.domain and not node.attributes and node.graph is graph
    return whole and not is_needed(node.outputs[0], named)
