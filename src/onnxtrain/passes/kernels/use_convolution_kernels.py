"""Run convolutions of a training step on this project's own kernels, where they are faster than ONNX Runtime's.

Only in working copies for sessions that load the native kernels: a step graph for any runtime has the standard
operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION
from onnxtrain.autodiff.windows import MOST_AXES, windows_fit
from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN

FEW_PRODUCTS = 48
"""Products per output element below which ONNX Runtime is faster, unless the convolution is depthwise."""


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

    Requires: shapes of weights. Ensures: the order of the nodes.
    """
    used = False
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


def _attributes(node: ir.Node) -> Sequence[ir.Attr] | None:
    """Return the attributes of the kernel's node; ``None`` where the standard operator stays."""
    if node.op_type != "Conv" or node.domain:
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
    if group == 1 and math.prod(kernel) > 1 and inputs * math.prod(kernel) < FEW_PRODUCTS:
        return None
    return [
        ir.AttrInt64s("kernel_shape", kernel),
        ir.AttrInt64s("strides", strides),
        ir.AttrInt64s("dilations", dilations),
        ir.AttrInt64s("pads", pads),
        ir.AttrInt64("group", group),
    ]
