"""Run convolutions of a training step on this project's own kernels, where they are faster than ONNX Runtime's.

Only in working copies for sessions that load the native kernels: a step graph for any runtime has the standard
operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION, emit
from onnxtrain.autodiff.windows import MOST_AXES, windows_fit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import dimensions

FEW_PRODUCTS = 48
"""Products per output element below which ONNX Runtime is faster, unless the convolution is depthwise."""


FEW_CHANNELS = 4
"""Channels below which ONNX Runtime's transposed convolution is faster, as in the gradient of average pooling."""


def use_convolution_kernels(model: ir.Model) -> None:
    """Replace Conv by the operator of the same name of the domain ``onnxtrain``, in place.

    y = x * w + b, with Conv's attributes written out. Left alone are convolutions with an unknown kernel size, with
    automatic padding, with windows larger than the kernel takes, and with few products per element, as in many first
    layers. Milliseconds on one core, batch 32:

        layer                              ONNX Runtime   kernel
        64 x 32 x 32, 3 x 3, 64 filters        14.1        11.0
        512 x 4 x 4, 3 x 3, 512                14.1        12.5
        16 x 32 x 32, 1 x 1, 96                 0.56        0.53
        144 x 16 x 16, 1 x 1, 32                0.43        0.39
        192 x 16 x 16, 3 x 3, depthwise         3.1         1.0
        960 x 4 x 4, 3 x 3, depthwise           3.6         0.2
        3 x 32 x 32, 3 x 3, 64                  0.7         1.2

    A ConvTranspose is the gradient of a convolution by its input, ``ConvInputGradient``; its bias is
    added.

    Requires: shapes of weights. Ensures: the order of the nodes.
    """
    used = False
    for node in list(model.graph):
        used = _transpose(model.graph, node) or used
    for node in model.graph:
        attributes = _attributes(node)
        if attributes is None:
            continue
        node.domain = ONNXTRAIN_DOMAIN
        node.version = None
        node.attributes.clear()
        node.attributes.update({attribute.name: attribute for attribute in attributes})
        used = True
    if used:
        model.graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)


def _transpose(graph: ir.Graph, node: ir.Node) -> bool:
    """Write a ConvTranspose as ConvInputGradient; return whether it was one."""
    attributes = None if "output_shape" in node.attributes else _attributes(node, "ConvTranspose")
    if attributes is None:
        return False
    op = Builder(graph, graph.opset_imports[""], before=node)
    op.scope = node.name or "transposed"
    x, weight, bias = (None if value is None else op.wrap(value) for value in (*node.inputs, None)[:3])
    assert x is not None
    assert weight is not None
    assert weight.static_shape is not None
    made = {attribute.name: attribute.value for attribute in attributes}
    if made["group"] == 1 and weight.static_shape[0] < FEW_CHANNELS:
        return False
    shape = _transposed_shape(node, x, weight, made)
    (result,) = emit(op, "ConvInputGradient", x, weight, shape, like=[op.wrap(node.outputs[0])], **made)
    if bias is not None:
        result = result + op.Unsqueeze(bias, op.ints(*range(1, len(made["kernel_shape"]) + 1)))
    take_over(graph, {node.outputs[0]: result.ir})
    remove_nodes(graph, [node])
    return True


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


def _attributes(node: ir.Node, operator: str = "Conv") -> Sequence[ir.Attr] | None:
    """Return the attributes of the kernel's node; ``None`` where the standard operator stays."""
    if node.op_type != operator or node.domain:
        return None
    x, weight = node.inputs[:2]
    if x is None or weight is None or weight.shape is None or weight.dtype not in KERNEL_TYPES:
        return None
    given = {name: attribute.value for name, attribute in node.attributes.items()}
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
    if operator == "Conv" and group == 1 and math.prod(kernel) > 1 and inputs * math.prod(kernel) < FEW_PRODUCTS:
        return None
    return [
        ir.AttrInt64s("kernel_shape", kernel),
        ir.AttrInt64s("strides", strides),
        ir.AttrInt64s("dilations", dilations),
        ir.AttrInt64s("pads", pads),
        ir.AttrInt64("group", group),
    ]
