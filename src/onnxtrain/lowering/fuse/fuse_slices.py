"""Fuse slices that cut a tensor into consecutive parts into one Split, whose gradient is one Concat."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph import Builder
from onnxtrain.graph.replace import substitute, take_over
from onnxtrain.graph.sizes import fold_sizes
from onnxtrain.graph.value import constant_array, dimensions
from onnxtrain.lowering.fuse.patterns import named_by_gradients, remove_unread


class _Cut(NamedTuple):
    """A Slice and the part [start, end) that it takes."""

    start: int
    end: int
    node: ir.Node


def fuse_slices(model: ir.Model) -> None:
    """Replace slices that together take every element along an axis once by one node, in place.

    The gradient of each slice alone is a tensor of the whole size, and they are summed. Exporters write queries, keys
    and values of one matmul that way, with bounds computed from shapes.

    Requires: a sorted graph with shapes. Ensures: the Split is where the first slice was, and has its name.
    """
    graph = model.graph
    if not _candidates(graph):
        return
    fold_sizes(model)  # bounds that follow from known shapes
    main, named = Builder(graph, graph.opset_imports[""]), named_by_gradients(graph)
    for (_, axis, size), nodes in _candidates(graph).items():
        cuts = [cut for node in nodes if (cut := _cut(node, size)) is not None]
        parts = sorted({cut[:2] for cut in cuts})
        if len(parts) < 2 or [start for start, _ in parts] != [0, *(end for _, end in parts[:-1])]:
            continue
        if parts[-1][1] != size or any(start == end for start, end in parts):
            continue
        first = cuts[0].node
        x = first.inputs[0]  # a part of a Split by now, where it was a slice itself
        assert x is not None
        op = main.before(first)
        lengths = op.ints(*(end - start for start, end in parts))
        made = op.several("Split", op.wrap(x), lengths, outputs=len(parts), axis=axis)
        op.emitted[-1].name = first.name
        taken: dict[tuple[int, int], ir.Value] = {}
        for cut in cuts:
            y, part = cut.node.outputs[0], cut[:2]
            if part in taken and y.name not in named:  # a second slice of the same part
                substitute(graph, {y: taken[part]})
            elif part not in taken:
                taken[part] = made[parts.index(part)].ir
                take_over(graph, {y: taken[part]})
        remove_unread(graph, [cut.node for cut in cuts], named)


def _candidates(graph: ir.Graph) -> dict[tuple[ir.Value, int, int], list[ir.Node]]:
    """Slices along one axis, by their input and the axis, whose size is known, if there are several."""
    found: dict[tuple[ir.Value, int, int], list[ir.Node]] = defaultdict(list)
    for node in graph:
        if node.op_type != "Slice" or node.domain or len(node.inputs) < 4 or node.outputs[0].is_graph_output():
            continue
        x, axes = node.inputs[0], _numbers(node.inputs[3])
        sizes = None if x is None else dimensions(x)
        if x is None or sizes is None or axes is None or len(axes) != 1:
            continue
        size = sizes[axes[0]]
        if isinstance(size, int):
            found[x, axes[0] % len(sizes), size].append(node)
    return {key: nodes for key, nodes in found.items() if len(nodes) > 1}


def _cut(node: ir.Node, size: int) -> _Cut | None:
    """The part that a Slice takes, if its bounds are constants and its step is 1."""
    starts, ends = _numbers(node.inputs[1]), _numbers(node.inputs[2])
    steps = [1] if len(node.inputs) < 5 or node.inputs[4] is None else _numbers(node.inputs[4])
    if starts is None or ends is None or steps != [1] or len(starts) != 1 or len(ends) != 1:
        return None
    start, end, _ = slice(starts[0], ends[0]).indices(size)
    return _Cut(start, max(start, end), node)


def _numbers(value: ir.Value | None) -> list[int] | None:
    array = constant_array(value)
    return None if array is None else [int(each) for each in array.reshape(-1)]
