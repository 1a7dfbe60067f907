"""Convolutions: padding in front of them, this project's kernels, and what providers of ONNX Runtime get wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import LAST
from onnxtrain.autodiff.windows import MOST_AXES, windows_fit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.shapes import fold_sizes, infer_again
from onnxtrain.graph.value import attributes_of, behind, constant_array, constant_ints, dimensions, input_of, made_by
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule, is_needed

# Zero padding in front of convolutions


def fuse_padding(model: ir.Model) -> None:
    """Let convolutions pad their input themselves where a Pad before them adds zeros along spatial axes, in place.

    Causal convolutions are written that way. The gradient of the Pad would cut its part from a padded tensor.

    Requires: a sorted graph with shapes. Ensures: the same; a Pad that something else reads stays.
    """
    if not any(_before_convolutions(node) for node in model.graph):
        return
    fold_sizes(model)  # pads that are computed from constants
    if _FUSE_PADDING(model):
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
    sizes, pads = dimensions(pad.inputs[0]), constant_ints(pad.inputs[1])
    value, chosen = (input_of(pad, index) for index in (2, 3))
    if sizes is None or pads is None or pad.attributes.get_string("mode", "constant") != "constant":
        return None
    fill, axes = constant_array(value), constant_ints(chosen)
    if (value is not None and (fill is None or fill.any())) or (chosen is not None and axes is None):
        return None
    rank = len(sizes)
    places = range(rank) if axes is None else [axis % rank for axis in axes]
    begins, ends = [0] * rank, [0] * rank
    for place, begin, end in zip(places, pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True):
        begins[place], ends[place] = begin, end
    if any((*begins[:2], *ends[:2])) or min(*begins, *ends) < 0:
        return None
    return begins[2:], ends[2:]


def _addable(match: Match) -> tuple[list[int], list[int]] | str:
    (pad,) = match.nodes
    if not _before_convolutions(pad) or is_needed(match.y, match.context.named):
        return "something else than convolutions needs its result"
    added = None if pad.inputs[0] is None else _added(pad)
    return "it is not known to add zeros along spatial axes alone" if added is None else added


def _emit_padding(_: Builder, match: Match) -> None:
    begins, ends = match.found
    for conv in list(match.y.consumers()):
        given = conv.attributes.get_ints("pads", [0] * (len(begins) + len(ends)))
        pads = [own + more for own, more in zip(given, [*begins, *ends], strict=True)]
        conv.attributes["pads"] = ir.AttrInt64s("pads", pads)
        conv.replace_input_with(0, match.nodes[0].inputs[0])


_FUSE_PADDING = Rewrite(Rule(operators("padding", "Pad"), _emit_padding, _addable))


# ONNX Runtime's PadFusion fuses a Pad with a constant fill of zero and the convolution that reads it, whichever of its
# inputs it is (workarounds: padded weights). The second gradient of a convolution with strides has such a Pad.


def _padded_weight(match: Match) -> ir.Node | str:
    (conv,) = match.nodes
    pad = made_by(behind(input_of(conv, 1), {"Transpose"}), "Pad")
    if pad is None or pad.graph is None:
        return "its weight is not padded"
    return "its fill is computed" if len(pad.inputs) > 2 and pad.inputs[2] is not None else pad


def _emit_fill(_: Builder, match: Match) -> None:
    pad = match.found
    op = Builder(pad.graph, match.context.main.opset, before=pad)  # it may be outside the body that the node is in
    none = op.Slice(op.Reshape(op.wrap(pad.inputs[0]), op.ints(-1)), op.ints(0), op.ints(0))
    pad.resize_inputs(max(3, len(pad.inputs)))
    pad.replace_input_with(2, op.ReduceSum(none, keepdims=0).ir)  # zero


shield_padded_weights = Rewrite(Rule(operators("padded weight", "Conv"), _emit_fill, _padded_weight, everywhere=True))
"""Let every Pad that a convolution reads as its weight compute its fill value, with equal values."""


# This project's kernels, where they are faster than ONNX Runtime's. Milliseconds on one core, batch 32:
#
#     layer                              ONNX Runtime   kernel
#     64 x 32 x 32, 3 x 3, 64 filters        14.1        11.0
#     512 x 4 x 4, 3 x 3, 512                14.1        12.5
#     16 x 32 x 32, 1 x 1, 96                 0.56        0.53
#     144 x 16 x 16, 1 x 1, 32                0.43        0.39
#     192 x 16 x 16, 3 x 3, depthwise         3.1         1.0
#     960 x 4 x 4, 3 x 3, depthwise           3.6         0.2
#     3 x 32 x 32, 3 x 3, 64                  0.7         1.2

FEW_PRODUCTS = 48
"""Products per output element below which ONNX Runtime is faster, unless the convolution is depthwise."""

FEW_CHANNELS = 4
"""Channels below which ONNX Runtime's transposed convolution is faster, as in the gradient of average pooling."""


def convolution(match: Match) -> Sequence[ir.Attr] | str:
    """Return the attributes of the kernel for a Conv, or why ONNX Runtime's is used."""
    return _attributes(match.nodes[0]) or "its sizes are not known, or ONNX Runtime is as fast"


def transposed_convolution(match: Match) -> Sequence[ir.Attr] | str:
    """Return the attributes of the gradient by the input that a ConvTranspose is, or why ONNX Runtime's is used."""
    (node,) = match.nodes
    attributes = None if "output_shape" in node.attributes else _attributes(node)
    if attributes is None or node.inputs[1] is None:
        return "its sizes are not known"
    channels = (dimensions(node.inputs[1]) or (None,))[0]
    few = attributes[-1].value == 1 and isinstance(channels, int) and channels < FEW_CHANNELS
    return "it has few channels, for which ONNX Runtime is faster" if few else attributes


def emit_transposed(op: Builder, match: Match) -> Value:
    """Emit a ConvTranspose as ``ConvInputGradient``; its bias is added."""
    view = Node(match.nodes[0], op)
    x, weight, bias = view.x, view.input_required(1), view.input(2)
    made = {attribute.name: attribute.value for attribute in match.found}
    shape = _transposed_shape(view.ir, x, weight, made)
    (result,) = emit(op, "ConvInputGradient", x, weight, shape, like=[op.wrap(match.y)], **made)
    return result if bias is None else result + op.Unsqueeze(bias, op.ints(*range(1, len(made["kernel_shape"]) + 1)))


def _transposed_shape(node: ir.Node, x: Value, weight: Value, attributes: dict[str, Any]) -> Value:
    """Return the shape of the result of a ConvTranspose: stride (size - 1) + window - pads + output_padding."""
    op, rank = x.op, len(attributes["kernel_shape"])
    kernel, strides, dilations = (np.array(attributes[name]) for name in ("kernel_shape", "strides", "dilations"))
    begin, end = np.array(attributes["pads"]).reshape(2, rank)
    more = np.array(node.attributes.get_ints("output_padding", [0] * rank))
    added = dilations * (kernel - 1) + 1 - begin - end + more - strides
    assert weight.static_shape is not None
    channels = weight.static_shape[1] * attributes["group"]
    known = dimensions(node.outputs[0])
    sizes = [size for size in (known or ())[2:] if isinstance(size, int)]
    spatial = op.ints(*sizes) if len(sizes) == rank else op.Shape(x, start=2) * strides + added
    return op.Concat(op.Shape(x, start=0, end=1), op.ints(channels), spatial, axis=0)


def _attributes(node: ir.Node) -> Sequence[ir.Attr] | None:
    """Return the attributes of the kernel's node; ``None`` where the standard operator stays."""
    x, weight = node.inputs[:2]
    if x is None or weight is None or weight.shape is None or weight.dtype not in KERNEL_TYPES:
        return None
    given = attributes_of(node)
    sizes = [size for size in weight.shape if isinstance(size, int)]
    rank = len(weight.shape) - 2
    if len(sizes) < len(weight.shape) or not 1 <= rank <= MOST_AXES:
        return None
    inputs, kernel, group = sizes[1], sizes[2:], given.get("group", 1)
    strides, dilations = given.get("strides") or [1] * rank, given.get("dilations") or [1] * rank
    pads = given.get("pads") or [0] * (2 * rank)
    if given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    if given.get("auto_pad") == "VALID":
        pads = [0] * (2 * rank)
    if group < 1 or not windows_fit(kernel, strides, dilations, pads, inputs):
        return None
    if node.op_type == "Conv" and group == 1 and math.prod(kernel) > 1 and inputs * math.prod(kernel) < FEW_PRODUCTS:
        return None
    return [
        ir.AttrInt64s("kernel_shape", kernel),
        ir.AttrInt64s("strides", strides),
        ir.AttrInt64s("dilations", dilations),
        ir.AttrInt64s("pads", pads),
        ir.AttrInt64("group", group),
    ]


# CUDA's provider leaves transposed convolutions with unequal padding to the CPU, with copies of all their tensors


def _uneven(match: Match) -> list[int] | str:
    attributes = match.nodes[0].attributes
    if "pads" not in attributes or "output_shape" in attributes:
        return "its padding follows from its output"
    pads = list(attributes["pads"].as_ints())
    half = len(pads) // 2
    return pads if pads[:half] != pads[half:] else "its padding is equal at both ends"


def _emit_even(op: Builder, match: Match) -> Value:
    (node,), pads = match.nodes, match.found
    begin, end = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    even = [min(ends) for ends in zip(begin, end, strict=True)]
    given = attributes_of(node) | {"pads": [*even, *even]}
    y = op.ConvTranspose(*(None if value is None else op.wrap(value) for value in node.inputs), **given)
    starts = [b - e for b, e in zip(begin, even, strict=True)]
    stops = [e - b if b > e else LAST for b, e in zip(end, even, strict=True)]
    return op.Slice(y, op.ints(*starts), op.ints(*stops), op.ints(*range(2, 2 + len(even))))


pad_evenly = Rewrite(Rule(operators("unequal padding", "ConvTranspose"), _emit_even, _uneven, everywhere=True))
"""Give every ConvTranspose whose padding differs between the ends of an axis the smaller one, and cut the rest."""


# Convolutions that ONNX Runtime's WebGPU provider computes wrongly (workarounds: convolutions on WebGPU)


def _parts(match: Match) -> tuple[Any, ...]:
    (node,) = match.nodes
    op = match.context.main
    x, w, bias = (None if value is None else op.wrap(value) for value in (*node.inputs, None)[:3])
    return x, w, bias, attributes_of(node)


def _mixes_filters(match: Match) -> str | None:
    _, w, _, attributes = _parts(match)
    channels, filters, group = _size(w, 1), _size(w, 0), attributes.get("group", 1)
    if group == 1 or channels is None or filters is None or filters % 4:
        return "it has no groups, or another number of filters"
    return "its groups are right" if not filters // group % 4 or filters // group < group else None


def _emit_groups(op: Builder, match: Match) -> Value:
    """Emit one convolution for each group."""
    x, w, bias, attributes = _parts(match)
    group = attributes.pop("group")
    parts, channels, width = [], _size(w, 1) or 0, (_size(w, 0) or 0) // group
    for number in range(group):
        inside = op.Slice(x, op.ints(number * channels), op.ints((number + 1) * channels), op.ints(1))
        rows = op.ints(number * width), op.ints((number + 1) * width), op.ints(0)
        shift = [] if bias is None else [op.Slice(bias, *rows)]
        parts.append(op.Conv(inside, op.Slice(w, *rows), *shift, **attributes))
    return op.Concat(*parts, axis=1)


def _comes_in_threes(match: Match) -> str | None:
    x, w, _, attributes = _parts(match)
    channels, filters = _size(x, 1), _size(w, 0)
    channels = _size(w, 1) if channels is None else channels
    sizes = None if w.shape is None else w.shape[2:]
    if attributes.get("group", 1) > 1 or (filters is not None and filters % 4):
        return "it has groups, or another number of filters"
    if channels is not None and (channels <= 3 or channels % 3 or not channels % 4):
        return "its channels are no multiple of three, or one of four"
    one_by_one = sizes is not None and set(sizes) == {1} and set(attributes.get("strides", [1])) == {1}
    return "it is a matmul" if one_by_one else None


def _emit_filter(op: Builder, match: Match) -> Value:
    """Append a filter of zeros, and slice its channel off the result."""
    x, w, bias, attributes = _parts(match)
    attributes.pop("group", None)
    more = op.Pad(w, op.ints(*[0] * w.rank, 1, *[0] * (w.rank - 1)))
    shift = [] if bias is None else [op.Pad(bias, op.ints(0, 1))]
    return op.Slice(op.Conv(x, more, *shift, **attributes), op.ints(0), op.ints(-1), op.ints(1))


def _size(value: Value, axis: int) -> int | None:
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None


mend_convolutions = Rewrite(
    Rule(operators("convolution of WebGPU", "Conv"), _emit_filter, _comes_in_threes, everywhere=True),
    Rule(operators("grouped convolution of WebGPU", "Conv"), _emit_groups, _mixes_filters, everywhere=True),
)
"""Replace the convolutions that the WebGPU provider computes wrongly by others.

It reads wrong elements if the filters are a multiple of four and the channels a multiple of three, but not of four; one
more filter, of zeros, avoids that. It mixes up the filters of grouped convolutions if the filters of a group are not a
multiple of four; these become one convolution for each group.
"""
