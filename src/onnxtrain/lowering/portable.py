"""Graphs for providers of ONNX Runtime beside the CPU: bodies without what they lack, no float64, static sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Body
from onnxtrain.autodiff.rules.pool import max_pool_gradient, scattered_max_pool_gradient
from onnxtrain.autodiff.windows import spatial_sizes, windows_of
from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import fits
from onnxtrain.lowering.rules.convolutions import mend_convolutions

Portable = Literal["cuda", "openvino", "webgpu"]
"""Providers and runtimes that step graphs can be made for, beside ONNX Runtime's CPU provider."""

_LOWEST = float(np.finfo(np.float32).min)


def max_pool_gradient_without_indices(node: Node) -> Sequence[Value | None]:
    """Compute dx from dy, x and MaxPool's attributes: dx = dy at the first maximum of its window."""
    op, dy, x = node.op, node.x, node.input_required(1)
    windows = windows_of(node, x=x)
    sizes, counts, pads, kernel = spatial_sizes(x), spatial_sizes(dy), windows.pads, windows.kernel
    if sizes is None or counts is None or pads is None or kernel is None or x.dtype != ir.DataType.FLOAT:
        return max_pool_gradient(node)
    positions = math.prod(kernel)
    if not fits(positions, positions):
        return max_pool_gradient(node)
    begin = pads[: windows.rank]
    reach = [s * (n - 1) + e for s, n, e in zip(windows.strides, counts, windows.extent, strict=True)]
    ends = [min(start + size, full) for start, size, full in zip(begin, sizes, reach, strict=True)]  # where x ends

    filters = op.constant(np.eye(positions).reshape(positions, 1, *kernel), x.dtype)
    over = {"strides": windows.strides, "dilations": windows.dilations, "kernel_shape": kernel}
    inside = [end - start for end, start in zip(ends, begin, strict=True)]
    behind = [full - end for full, end in zip(reach, ends, strict=True)]
    padded = _padded(op, _cut(op, x, [0] * len(sizes), inside, sizes), begin, behind, _LOWEST)
    beside = op.Conv(_planes(op, padded, reach), filters, **over)

    maximal = op.cast(op.Equal(beside, op.ReduceMax(beside, op.ints(1), keepdims=1)), x.dtype)
    before = np.tril(np.ones((positions, positions)), -1).reshape(positions, positions, *[1] * windows.rank)
    first = op.Relu(maximal - op.Conv(maximal, op.constant(before, x.dtype)))

    spread = op.ConvTranspose(first * _planes(op, dy, counts), filters, **over)
    missing = [size - part for size, part in zip(sizes, inside, strict=True)]
    dx = _padded(op, _cut(op, spread, begin, ends, reach), [0] * len(sizes), missing, 0.0)
    return [op.reshape_like(dx, x)]


def _planes(op: Builder, value: Value, sizes: Sequence[int]) -> Value:
    """Reshape [batch, channels, sizes...] to [batch * channels, 1, sizes...]."""
    return op.Reshape(value, op.ints(-1, 1, *sizes))


def _cut(op: Builder, value: Value, starts: Sequence[int], ends: Sequence[int], sizes: Sequence[int]) -> Value:
    """Return a part of an image of the given sizes."""
    if not any(starts) and list(ends) == list(sizes):
        return value
    return op.Slice(value, op.ints(*starts), op.ints(*ends), op.ints(*range(2, 2 + len(sizes))))


def _padded(op: Builder, value: Value, begin: Sequence[int], end: Sequence[int], fill: float) -> Value:
    """Return an image with a number around it."""
    if not any(begin) and not any(end):
        return value
    return op.Pad(value, op.ints(0, 0, *begin, 0, 0, *end), op.constant(fill, value.dtype))


def body_for(portable: Portable | None, operator: str) -> Body | None:
    """Return the body of a fused operator that a provider needs instead of the operator's own, or ``None``."""
    return None if portable is None else _BODIES[portable].get(operator)


_BODIES: dict[Portable, dict[str, Body]] = {
    "cuda": {"MaxPoolGradient": scattered_max_pool_gradient},
    "openvino": {"MaxPoolGradient": scattered_max_pool_gradient},  # it has no MaxUnpool
    "webgpu": {"MaxPoolGradient": max_pool_gradient_without_indices},
}


_DOUBLE, _FLOAT = ir.DataType.DOUBLE, ir.DataType.FLOAT


def target_webgpu(model: ir.Model) -> None:
    """Fit a step graph to the WebGPU provider of onnxruntime-web 1.30, in place.

    ONNX Runtime runs operators on the CPU that the provider does not list. The provider lists, but does not support,
    MaxPool's output Indices, which gradients of MaxPool read if image sizes are unknown. It computes some convolutions
    wrongly; this pass replaces them by others. (workarounds: indices on WebGPU, convolutions on WebGPU)

    Requires: a graph without functions, and without batch normalization in training mode. Ensures: a graph without
    float64 that the provider runs.
    """
    if any(value.dtype == ir.DataType.BFLOAT16 for value in model.graph.inputs):
        raise OptionError(
            "The optimizer's states, or weights, are bfloat16, which ONNX Runtime's WebGPU provider lacks; "
            "leave precision out."
        )
    for part in [model.graph, *model.graph.subgraphs()]:
        for node in part:
            if not node.domain and node.op_type == "MaxPool" and len(node.outputs) > 1:
                raise OptionError(
                    f"The node {node.name!r} needs MaxPool's output Indices, which ONNX Runtime's WebGPU provider "
                    "lacks: its images have no fixed size, or the model reads the indices. Fix the size (export "
                    "--static height=28), or leave --portable out, and train on the CPU."
                )
    mend_convolutions(model)
    _use_single_precision(model)


def _use_single_precision(model: ir.Model) -> None:
    """Make every float64 of a step graph float32, in place.

    The bodies of optimizers compute in float64 only the values that depend on learning rate and update count. In
    float32 a step differs by some units in the last place of the update.

    Requires: a graph without functions. Ensures: a graph without float64.
    """
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype == _DOUBLE:
            raise OptionError(
                f"{value.name!r} is float64, which WebGPU lacks; convert the model to float32 before it is exported."
            ).about(value.name)
    for part in [graph, *graph.subgraphs()]:
        for value in part.initializers.values():
            if value.const_value is not None and value.const_value.dtype == _DOUBLE:
                value.const_value = _narrow(value.const_value)
                _retype(value)
        for node in part:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _DOUBLE:
                    node.attributes[name] = ir.AttrTensor(name, _narrow(attribute.as_tensor()))
            if node.op_type == "Cast" and not node.domain and node.attributes["to"].as_int() == _DOUBLE:
                node.attributes["to"] = ir.AttrInt64("to", int(_FLOAT))
            for output in node.outputs:
                _retype(output)


def _narrow(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _retype(value: ir.Value) -> None:
    if value.dtype == _DOUBLE:
        value.type = ir.TensorType(_FLOAT)


def fix_dimensions(model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    """Replace symbolic dimensions by sizes wherever a model or its training declares them, in place."""
    inputs = {dim.dim_param for info in model.graph.input for dim in info.type.tensor_type.shape.dim} - {""}
    for name, size in sizes.items():
        if name not in inputs:
            raise OptionError(
                f"There is no dimension {name!r} to give the size {size}; the model's inputs have "
                f"{', '.join(sorted(inputs)) or 'no dimension with a name'}."
            )
        if size < 1:
            raise OptionError(f"The dimension {name!r} is given the size {size}; it needs 1 or more.")
    for info in _declared(model):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def _declared(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    for graph in (model.graph, *(entry.algorithm for entry in model.training_info)):
        yield from graph.input
        yield from graph.output
        yield from graph.value_info
