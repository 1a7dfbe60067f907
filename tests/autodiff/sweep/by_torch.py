"""PyTorch's gradients of ONNX's node tests: a second oracle beside central differences.

The table maps operators to PyTorch functions. A function gets the node's attributes, defaults included, and its
inputs, ``None`` where one is left out; it returns the outputs, or ``None`` where PyTorch has no such form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import defs, helper
from torch import Tensor
from torch.nn import functional

from autodiff.sweep.subjects import Subject

Attributes = dict[str, Any]
Output = Tensor | Sequence[Tensor] | None
Function = Callable[..., Output]


def plain(function: Callable[..., Tensor]) -> Function:
    """Wrap a function that ignores the attributes."""
    return lambda a, *inputs: function(*inputs)


def axes_of(a: Attributes, x: Tensor, given: Tensor | None) -> list[int]:
    """The axes of a reduction."""
    axes = a.get("axes") if given is None else given.tolist()
    if not axes:
        return [] if a.get("noop_with_empty_axes") else list(range(x.ndim))
    return [axis % x.ndim for axis in axes]


def reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Function:
    """Apply a reduction over axes, of which there may be none."""

    def reduce(a: Attributes, x: Tensor, given: Tensor | None = None) -> Output:
        axes = axes_of(a, x, given)
        return function(x, axes, bool(a["keepdims"])) if axes and x.numel() else None

    return reduce


def product(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keepdims)
    return x


def shrink(a: Attributes, x: Tensor) -> Tensor:
    beyond = torch.where(x < -a["lambd"], x + a["bias"], torch.zeros_like(x))
    return torch.where(x > a["lambd"], x - a["bias"], beyond)


def clip(a: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Output:
    # The bounds of clamp share ties in another way, but no element is at a bound.
    return x if low is None and high is None else torch.clamp(x, low, high)


def gemm(a: Attributes, x: Tensor, w: Tensor, c: Tensor | None = None) -> Tensor:
    x, w = x.T if a["transA"] else x, w.T if a["transB"] else w
    y = a["alpha"] * (x @ w)
    return y if c is None else y + a["beta"] * c


def padding(a: Attributes, spatial: int) -> list[int] | None:
    """The padding where both sides are equal and PyTorch's pooling accepts it, else ``None``."""
    if a.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or a.get("ceil_mode"):
        return None
    pads = a.get("pads") or [0] * (2 * spatial)
    if "ceil_mode" in a and any(2 * pad > size for pad, size in zip(pads, 2 * a["kernel_shape"], strict=True)):
        return None
    return pads[:spatial] if pads[:spatial] == pads[spatial:] else None


def conv(a: Attributes, x: Tensor, w: Tensor, b: Tensor | None = None) -> Output:
    spatial = x.ndim - 2
    pads = padding(a, spatial)
    if pads is None:
        return None
    ones = [1] * spatial
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1]
    return function(x, w, b, a.get("strides") or ones, pads, a.get("dilations") or ones, a["group"])


def conv_transpose(a: Attributes, x: Tensor, w: Tensor, b: Tensor | None = None) -> Output:
    spatial = x.ndim - 2
    pads = padding(a, spatial)
    if pads is None or a.get("output_shape"):
        return None
    ones, zeros = [1] * spatial, [0] * spatial
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[spatial - 1]
    strides, more = a.get("strides") or ones, a.get("output_padding") or zeros
    return function(x, w, b, strides, pads, more, a["group"], a.get("dilations") or ones)


def max_pool(a: Attributes, x: Tensor) -> Output:
    spatial = x.ndim - 2
    pads, ones = padding(a, spatial), [1] * spatial
    if pads is None:
        return None
    function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[spatial - 1]
    strides, dilations = a.get("strides") or ones, a.get("dilations") or ones
    return function(x, a["kernel_shape"], strides, pads, dilations)


def average_pool(a: Attributes, x: Tensor) -> Output:
    spatial = x.ndim - 2
    pads, ones = padding(a, spatial), [1] * spatial
    if pads is None or any(size != 1 for size in a.get("dilations") or ones):
        return None
    function = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[spatial - 1]
    counted = bool(a["count_include_pad"])
    return function(x, a["kernel_shape"], a.get("strides") or ones, pads, False, counted)


def batch_normalization(a: Attributes, x: Tensor, *parameters: Tensor) -> Output:
    if a.get("training_mode"):
        return None
    shape = -1, *[1] * (x.ndim - 2)  # PyTorch's own takes no gradient of the running statistics
    scale, bias, mean, variance = (parameter.reshape(shape) for parameter in parameters)
    return (x - mean) * torch.rsqrt(variance + a["epsilon"]) * scale + bias


def layer_normalization(a: Attributes, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Sequence[Tensor]:
    axes = list(range(a["axis"] % x.ndim, x.ndim))
    shape = [x.shape[axis] for axis in axes]
    bias = None if bias is None else bias.expand(shape)
    y = functional.layer_norm(x, shape, scale.expand(shape), bias, a["epsilon"])
    variance = x.var(axes, correction=0, keepdim=True)
    return y, x.mean(axes, keepdim=True), torch.rsqrt(variance + a["epsilon"])


def rms_normalization(a: Attributes, x: Tensor, scale: Tensor) -> Tensor:
    shape = x.shape[a["axis"] % x.ndim :]
    return functional.rms_norm(x, shape, scale.expand(shape), a["epsilon"])


def local_response(a: Attributes, x: Tensor) -> Output:
    if a["size"] % 2 == 0:
        return None  # one element more on one side: ONNX has it on the right, PyTorch on the left
    return functional.local_response_norm(x, a["size"], a["alpha"], a["beta"], a["bias"])


def reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    sizes = shape.tolist()
    if not a.get("allowzero"):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def squeeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


def unsqueeze(a: Attributes, x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + axes.numel()
    for axis in sorted(axis % rank for axis in axes.reshape(-1).tolist()):
        x = x.unsqueeze(axis)
    return x


def flatten(a: Attributes, x: Tensor) -> Tensor:
    axis = a["axis"] % x.ndim if a["axis"] < 0 else a["axis"]
    return x.reshape(int(np.prod(x.shape[:axis])), -1)


def sliced(a: Attributes, x: Tensor, starts: Tensor, ends: Tensor, *more: Tensor | None) -> Output:
    places = more[0].tolist() if more and more[0] is not None else list(range(starts.numel()))
    steps = more[1].tolist() if len(more) > 1 and more[1] is not None else [1] * len(places)
    if any(step < 0 for step in steps):
        return None
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), places, steps, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def split(a: Attributes, x: Tensor, sizes: Tensor | None = None) -> Output:
    axis = a.get("axis", 0)
    if sizes is not None:
        return x.split(sizes.tolist(), axis)
    return x.split(-(-x.shape[axis] // a["num_outputs"]), axis) if "num_outputs" in a else None


def padded(a: Attributes, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Output:
    if a["mode"] != "constant" or axes is not None:
        return None
    begins, ends = pads.reshape(2, -1).tolist()
    turned = [size for pair in zip(reversed(begins), reversed(ends), strict=True) for size in pair]
    shift = torch.zeros(()) if value is None else value  # PyTorch's own takes a number
    return functional.pad(x - shift, turned) + shift


def gather(a: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = a["axis"] % x.ndim
    taken = x.index_select(axis, indices.reshape(-1) % x.shape[axis])
    return taken.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def scatter(a: Attributes, x: Tensor, indices: Tensor, updates: Tensor) -> Output:
    axis = a["axis"]
    places = indices % x.shape[axis]
    if a["reduction"] == "none":
        return x.scatter(axis, places, updates)
    name = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[a["reduction"]]
    return x.scatter_reduce(axis, places, updates, name)


def cumulative(function: Callable[[Tensor, int], Tensor]) -> Function:
    """A running sum or product, forward and inclusive."""

    def apply(a: Attributes, x: Tensor, axis: Tensor) -> Output:
        return None if a["exclusive"] or a["reverse"] else function(x, int(axis))

    return apply


def grid_sample(a: Attributes, x: Tensor, grid: Tensor) -> Output:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(a["mode"], a["mode"])
    if mode == "bicubic" and x.ndim == 5:
        return None
    return functional.grid_sample(x, grid, mode, a["padding_mode"], bool(a["align_corners"]))


def negative_log_likelihood(a: Attributes, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    ignored = a.get("ignore_index", -(2**31))
    if weight is None:
        return functional.nll_loss(x, target, ignore_index=ignored, reduction=a["reduction"])
    counted = target != ignored  # PyTorch's own takes no gradient of the weights
    places = torch.where(counted, target, 0)
    shares = weight[places] * counted
    losses = -x.gather(1, places.unsqueeze(1)).squeeze(1) * shares
    if a["reduction"] == "none":
        return losses
    return losses.sum() if a["reduction"] == "sum" else losses.sum() / shares.sum()


def cross_entropy(a: Attributes, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Sequence[Tensor]:
    logarithms = x.log_softmax(1)
    return negative_log_likelihood(a, logarithms, target, weight), logarithms


def fold(a: Attributes, x: Tensor, image: Tensor, block: Tensor) -> Output:
    spatial = image.numel()
    ones = [1] * spatial
    if spatial != 2 or padding(a, spatial) is None:
        return None
    sizes = a.get("dilations") or ones, padding(a, spatial), a.get("strides") or ones
    return functional.fold(x, image.tolist(), block.tolist(), *sizes)


def attention(a: Attributes, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *more: Tensor) -> Output:
    if q.ndim != 4 or any(item is not None for item in more) or any(a.get(name) for name in a.keys() - {"scale"}):
        return None
    if mask is not None and mask.shape[-1] != k.shape[2]:
        return None
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=a.get("scale"), enable_gqa=grouped)


def space_to_depth(a: Attributes, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    size = a["blocksize"]
    blocks = x.reshape(n, c, h // size, size, w // size, size)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, c * size**2, h // size, w // size)


def depth_to_space(a: Attributes, x: Tensor) -> Tensor:
    size = a["blocksize"]
    if a["mode"] == "DCR":
        n, c, h, w = x.shape
        x = x.reshape(n, size**2, c // size**2, h, w).transpose(1, 2).reshape(n, c, h, w)
    return functional.pixel_shuffle(x, size)


def same(a: Attributes, x: Tensor) -> Tensor:
    return x.clone()


FUNCTIONS: dict[str, Function] = {
    **{
        name: plain(getattr(torch, name.lower()))
        for name in (
            *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Det", "Div", "Erf", "Exp"),
            *("Log", "Mul", "Neg", "Reciprocal", "Relu", "Sigmoid", "Sin", "Sinh", "Sqrt", "Sub", "Tan", "Tanh"),
            *("Add", "MatMul", "Pow", "Where"),
        )
    },
    "AffineGrid": lambda a, theta, size: functional.affine_grid(theta, size.tolist(), bool(a["align_corners"])),
    "Attention": attention,
    "AveragePool": average_pool,
    "BatchNormalization": batch_normalization,
    "Celu": lambda a, x: functional.celu(x, a["alpha"]),
    "Clip": clip,
    "Col2Im": fold,
    "Concat": lambda a, *inputs: torch.cat(inputs, a["axis"]),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "CumProd": cumulative(torch.cumprod),
    "CumSum": cumulative(torch.cumsum),
    "DepthToSpace": depth_to_space,
    "Einsum": lambda a, *inputs: torch.einsum(a["equation"], *inputs),
    "Elu": lambda a, x: functional.elu(x, a["alpha"]),
    "Expand": lambda a, x, shape: x * torch.ones(shape.tolist(), dtype=x.dtype),
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": lambda a, x, indices: x.gather(a["axis"], indices % x.shape[a["axis"]]),
    "Gelu": lambda a, x: functional.gelu(x, approximate=a["approximate"]),
    "Gemm": gemm,
    "GlobalAveragePool": lambda a, x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    "GlobalMaxPool": lambda a, x: x.amax(tuple(range(2, x.ndim)), keepdim=True),
    "GridSample": grid_sample,
    "GroupNormalization": lambda a, x, s, b: functional.group_norm(x, a["num_groups"], s, b, a["epsilon"]),
    "HardSigmoid": lambda a, x: (a["alpha"] * x + a["beta"]).clamp(0, 1),
    "HardSwish": lambda a, x: functional.hardswish(x),
    "Identity": same,
    "InstanceNormalization": lambda a, x, s, b: functional.instance_norm(x, weight=s, bias=b, eps=a["epsilon"]),
    "LRN": local_response,
    "LayerNormalization": layer_normalization,
    "LeakyRelu": lambda a, x: functional.leaky_relu(x, a["alpha"]),
    "LogSoftmax": lambda a, x: x.log_softmax(a["axis"]),
    "LpNormalization": lambda a, x: functional.normalize(x, a["p"], a["axis"]),
    "Max": lambda a, *inputs: torch.stack(torch.broadcast_tensors(*inputs)).amax(0),
    "MaxPool": max_pool,
    "Mean": lambda a, *inputs: torch.stack(torch.broadcast_tensors(*inputs)).mean(0),
    "Min": lambda a, *inputs: torch.stack(torch.broadcast_tensors(*inputs)).amin(0),
    "Mish": plain(functional.mish),
    "Mod": lambda a, x, y: torch.fmod(x, y) if a["fmod"] else None,
    "NegativeLogLikelihoodLoss": negative_log_likelihood,
    "PRelu": lambda a, x, slope: torch.where(x > 0, x, slope * x),
    "Pad": padded,
    "RMSNormalization": rms_normalization,
    "ReduceL1": reduction(lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    "ReduceL2": reduction(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)),
    "ReduceLogSum": reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep).log()),
    "ReduceLogSumExp": reduction(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "ReduceMax": reduction(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMean": reduction(lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    "ReduceMin": reduction(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceProd": reduction(product),
    "ReduceSum": reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceSumSquare": reduction(lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
    "Reshape": reshape,
    "ScatterElements": scatter,
    "Selu": lambda a, x: a["gamma"] * functional.elu(x, a["alpha"]),
    "Shrink": shrink,
    "Slice": sliced,
    "Softmax": lambda a, x: x.softmax(a["axis"]),
    "SoftmaxCrossEntropyLoss": cross_entropy,
    "Softplus": plain(functional.softplus),
    "Softsign": plain(functional.softsign),
    "SpaceToDepth": space_to_depth,
    "Split": split,
    "Squeeze": squeeze,
    "Sum": lambda a, *inputs: torch.stack(torch.broadcast_tensors(*inputs)).sum(0),
    "Swish": lambda a, x: x * torch.sigmoid(a["alpha"] * x),
    "ThresholdedRelu": lambda a, x: torch.where(x > a["alpha"], x, torch.zeros_like(x)),
    "Tile": lambda a, x, repeats: x.repeat(repeats.tolist()),
    "TopK": lambda a, x, k: x.topk(int(k), a["axis"], bool(a["largest"]), True).values,
    "Transpose": lambda a, x: x.permute(a.get("perm") or list(range(x.ndim))[::-1]),
    "Unsqueeze": unsqueeze,
}


def attributes_of(node: onnx.NodeProto, opset: int) -> Attributes:
    """A node's attributes with the defaults of its operator."""
    schema = defs.get_schema(node.op_type, opset, node.domain)
    found = {name: item.default_value for name, item in schema.attributes.items() if item.default_value.name}
    found |= {attribute.name: attribute for attribute in node.attribute}
    values = {name: helper.get_attribute_value(attribute) for name, attribute in found.items()}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def torch_gradients(
    subject: Subject, projections: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None:
    """Outputs and gradients of sum_k sum(projection_k y_k) by PyTorch; ``None`` for a form that it lacks."""
    (node, *others) = subject.model.graph.node
    function = FUNCTIONS.get(node.op_type)
    if function is None or others:
        return None
    tensors = {name: _tensor(array, name in subject.wrt) for name, array in subject.feeds.items()}
    inputs = [tensors.get(name) for name in node.input]
    limit = _accepted(function)
    if limit is not None and any(item is not None for item in inputs[limit:]):
        return None
    result = function(attributes_of(node, subject.opset), *inputs[:limit])
    if result is None:
        return None
    outputs = dict(zip(node.output, [result] if isinstance(result, Tensor) else result, strict=False))
    if not projections.keys() <= outputs.keys():
        return None
    total = sum((torch.tensor(weights) * outputs[name]).sum() for name, weights in projections.items())
    xs = [tensors[name] for name in subject.wrt]
    found = torch.autograd.grad(total, xs, allow_unused=True, materialize_grads=True)
    gradients = {name: gradient.numpy() for name, gradient in zip(subject.wrt, found, strict=True)}
    return {name: outputs[name].detach().numpy() for name in projections}, gradients


def _tensor(array: np.ndarray, differentiated: bool) -> Tensor:
    if array.dtype in (np.float32, np.float64):
        return torch.tensor(array, dtype=torch.float64, requires_grad=differentiated)
    return torch.tensor(array.astype(np.int64) if array.dtype.kind in "iu" else array)


def _accepted(function: Function) -> int | None:
    """The number of inputs of a function; ``None`` for any number."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return len(parameters) - 1
