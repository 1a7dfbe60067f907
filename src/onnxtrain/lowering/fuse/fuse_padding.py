"""Fuse zero padding into the convolutions behind it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.sizes import fold_sizes, infer_again
from onnxtrain.graph.value import constant_array, dimensions
from onnxtrain.lowering.fuse.patterns import is_needed, named_by_gradients, remove_unread


def fuse_padding(model: ir.Model) -> None:
    """Let convolutions pad their input themselves where a Pad before them adds zeros along spatial axes, in place.

    Causal convolutions are written that way. The gradient of the Pad would cut its part from a padded tensor.

    Requires: a sorted graph with shapes. Ensures: the same; a Pad that something else reads stays.
    """
    graph = model.graph
    if not any(_before_convolutions(node) for node in graph):
        return
    fold_sizes(model)  # pads that are computed from constants
    named, fused = named_by_gradients(graph), []
    for pad in graph:
        y, x = (pad.outputs[0], pad.inputs[0]) if _before_convolutions(pad) else (None, None)
        added = None if x is None or y is None or is_needed(y, named) else _added(pad)
        if x is None or y is None or added is None:
            continue
        begins, ends = added
        for conv in list(y.consumers()):
            given = conv.attributes.get_ints("pads", [0] * (len(begins) + len(ends)))
            pads = [own + more for own, more in zip(given, [*begins, *ends], strict=True)]
            conv.attributes["pads"] = ir.AttrInt64s("pads", pads)
            conv.replace_input_with(0, x)
        fused.append(pad)
    remove_unread(graph, fused, named)
    if fused:
        infer_again(model)  # pads that inference did not know left sizes open


def _before_convolutions(node: ir.Node) -> bool:
    """Return whether a node is a Pad whose result only convolutions with explicit pads read, as their input."""
    if node.op_type != "Pad" or node.domain or len(node.inputs) < 2:
        return False
    uses = node.outputs[0].uses()
    return bool(uses) and all(
        use.idx == 0
        and use.node.op_identifier() == ("", "Conv", "")
        and use.node.graph is node.graph
        and use.node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
        for use in uses
    )


def _added(pad: ir.Node) -> tuple[list[int], list[int]] | None:
    """Zeros added before and after each spatial axis, if they are known and nothing else is added or cut."""
    x, pads = pad.inputs[0], constant_array(pad.inputs[1])
    value, chosen = (pad.inputs[index] if len(pad.inputs) > index else None for index in (2, 3))
    sizes = None if x is None else dimensions(x)
    if sizes is None or pads is None or pad.attributes.get_string("mode", "constant") != "constant":
        return None
    fill, axes = constant_array(value), constant_array(chosen)
    if (value is not None and (fill is None or fill.any())) or (chosen is not None and axes is None):
        return None
    rank = len(sizes)
    places = range(rank) if axes is None else [int(axis) % rank for axis in axes.reshape(-1)]
    begins, ends = [0] * rank, [0] * rank
    for place, begin, end in zip(places, pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True):
        begins[place], ends[place] = int(begin), int(end)
    if any((*begins[:2], *ends[:2])) or min(*begins, *ends) < 0:
        return None
    return begins[2:], ends[2:]
