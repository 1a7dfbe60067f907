"""Rewrite convolutions that ONNX Runtime's WebGPU provider computes wrongly (workarounds: convolutions on WebGPU)."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.replace import remove_nodes, take_over


def mend_convolutions(graph: ir.Graph, opset: int) -> None:
    """Replace the convolutions that the provider computes wrongly by others, in place.

    It reads wrong elements if the filters are a multiple of four and the channels a multiple of three, but not of four;
    one more filter, of zeros, avoids that. It mixes up the filters of grouped convolutions if the filters of a group
    are not a multiple of four; these become one convolution for each group.
    """
    for node in list(graph):
        if node.domain or node.op_type != "Conv":
            continue
        op = Builder(graph, opset, before=node)
        op.scope = node.name or "conv"
        inputs = [None if value is None else op.wrap(value) for value in node.inputs]
        x, w, bias = inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None
        assert x is not None
        assert w is not None
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        group = int(attributes.pop("group", 1))
        if group > 1:
            y = _by_groups(op, x, w, bias, group, attributes)
        else:
            y = _with_more_filters(op, x, w, bias, attributes) if _comes_in_threes(x, w, attributes) else None
        if y is not None:
            take_over(graph, {node.outputs[0]: y.ir})
            remove_nodes(graph, [node])


def _size(value: Value, axis: int) -> int | None:
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None


def _comes_in_threes(x: Value, w: Value, attributes: dict[str, Any]) -> bool:
    channels, filters = _size(x, 1), _size(w, 0)
    if channels is None:
        channels = _size(w, 1)
    if filters is not None and filters % 4:
        return False
    if channels is not None and (channels <= 3 or channels % 3 or not channels % 4):
        return False
    sizes = None if w.shape is None else w.shape[2:]
    strides = attributes.get("strides", [1])
    one_by_one = sizes is not None and set(sizes) == {1} and set(strides) == {1}
    return not one_by_one  # 1 x 1 convolutions are matmuls


def _with_more_filters(op: Builder, x: Value, w: Value, bias: Value | None, attributes: dict[str, Any]) -> Value:
    """Append a filter of zeros, and slice its channel off the result."""
    rank = w.rank
    assert rank is not None
    more = op.Pad(w, op.ints(*[0] * rank, 1, *[0] * (rank - 1)))
    shift = [] if bias is None else [op.Pad(bias, op.ints(0, 1))]
    return op.Slice(op.Conv(x, more, *shift, **attributes), op.ints(0), op.ints(-1), op.ints(1))


def _by_groups(
    op: Builder, x: Value, w: Value, bias: Value | None, group: int, attributes: dict[str, Any]
) -> Value | None:
    """Return one convolution for each group where the provider mixes filters; else ``None``."""
    channels, filters = _size(w, 1), _size(w, 0)
    if channels is None or filters is None or filters % 4 or not filters // group % 4 or filters // group < group:
        return None
    parts, width = [], filters // group
    for number in range(group):
        inside = op.Slice(x, op.ints(number * channels), op.ints((number + 1) * channels), op.ints(1))
        rows = op.ints(number * width), op.ints((number + 1) * width), op.ints(0)
        shift = [] if bias is None else [op.Slice(bias, *rows)]
        parts.append(op.Conv(inside, op.Slice(w, *rows), *shift, **attributes))
    return op.Concat(*parts, axis=1)
