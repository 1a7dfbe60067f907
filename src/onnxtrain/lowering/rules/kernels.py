"""Operators with native kernels: which nodes get them, and which are written in standard operators.

Only in working copies for sessions that load the native kernels: a step graph for any runtime has standard operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.expand import expand_registered
from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION, emit, find_fused, has_kernel
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import find_registered_body
from onnxtrain.autodiff.rules.fused_attention import ATTENTION, ATTENTION_GRADIENT, PACKED, PACKED_GRADIENT
from onnxtrain.autodiff.rules.fused_batch_norm import normalizes_batches
from onnxtrain.autodiff.rules.grid_sample import mode_of, samples_images
from onnxtrain.autodiff.rules.matmul_nbits import GRADIENT, PRODUCT, PackedWeight, multiplied
from onnxtrain.autodiff.rules.normalization import local_response
from onnxtrain.autodiff.rules.resize import RESIZE, resize_matrices, resizes_last_axes
from onnxtrain.autodiff.rules.signal import as_size, axis_of, frame_length, length_of, smooth, transform
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import all_nodes, subgraphs
from onnxtrain.graph.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.graph.inference import infer_outputs
from onnxtrain.graph.passes import forget_unused_domains
from onnxtrain.graph.value import attributes_of, dimensions
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.portable import Portable, body_for
from onnxtrain.lowering.rewrite import Rewrite, Rule
from onnxtrain.lowering.rules.convolutions import convolution, emit_transposed, transposed_convolution

LEAST_CLASSES = 4096
"""With fewer classes, logits are small compared to the layers' activations, and a weighted loss is not split."""

LEAST_INNER = 16
"""Elements of the axes behind that of LogSoftmax: as many are computed together. ONNX Runtime transposes twice."""


def _ours(operator: str, guard: Callable[[Match], Sequence[ir.Attr] | str]) -> Rule:
    """Replace a standard operator by that of the same name of the domain ``onnxtrain``, with some attributes."""

    def change(op: Builder, match: Match) -> None:
        (node,) = match.nodes
        node.domain, node.version = ONNXTRAIN_DOMAIN, None
        node.attributes.clear()
        node.attributes.update({attribute.name: attribute for attribute in match.found})
        op.import_domain(ONNXTRAIN_DOMAIN, VERSION)

    return Rule(operators(operator, operator), change, guard)


# ONNX Runtime has no kernel for SoftmaxCrossEntropyLoss. It inlines the operator's body when a session is created,
# optimizes the whole graph again, and removes two transpositions: a quarter of the creation time for a step graph of
# 5,000 nodes. The body also holds two arrays of the logits' size while it runs: 206 MB each for a language model with
# 50,257 tokens and a batch of 8 x 128. The nodes emitted here have bit-identical results for logits [rows, classes].


def _splittable(match: Match) -> str | None:
    (node,) = match.nodes
    x = node.inputs[0]
    if x is None or x.dtype not in KERNEL_TYPES or x.shape is None or len(x.shape) < 2:
        return "its logits have no kernel"
    classes, plain = x.shape[1], len(node.inputs) == 2 and "ignore_index" not in node.attributes
    large = len(x.shape) > 2 or (isinstance(classes, int) and classes >= LEAST_CLASSES)
    return None if plain or large else "it is weighted, over few classes"


def _emit_loss(op: Builder, match: Match) -> Sequence[Value]:
    """Write the loss as LogSoftmax and a selection of the labels' terms, which is the standard's definition."""
    (node,) = match.nodes
    x, labels, *weights = [op.wrap(value) for value in node.inputs if value is not None]
    attributes = attributes_of(node)
    log_probability = op.LogSoftmax(x, axis=1)
    log_probability.ir.type, log_probability.ir.shape = x.ir.type, x.ir.shape
    for output in node.outputs:
        output.type = x.ir.type
    if len(node.outputs) > 1:
        node.outputs[1].shape = x.ir.shape
    if weights or "ignore_index" in attributes:
        loss = op.NegativeLogLikelihoodLoss(log_probability, labels, *weights, **attributes)
    else:
        terms = op.Squeeze(op.Neg(op.GatherElements(log_probability, op.Unsqueeze(labels, [1]), axis=1)), [1])
        reduction = attributes.get("reduction", "mean")
        reduce = {"mean": op.ReduceMean, "sum": op.ReduceSum}.get(reduction)
        loss = terms if reduce is None else reduce(terms, keepdims=0)
    return [loss, log_probability]


def _normalizes(match: Match) -> Sequence[ir.Attr] | str:
    """The kernel sums in float64, and any number of threads gives the same bits."""
    (node,) = match.nodes
    kept = [attribute for name, attribute in node.attributes.items() if name != "training_mode"]
    return kept if normalizes_batches(node) else "ONNX Runtime computes it with given statistics"


def _mixes_neighbours(match: Match) -> str | None:
    """Bilinear or bicubic Resize of the last two axes is the operator that also is its gradient."""
    (node,) = match.nodes
    attributes, x = node.attributes, node.inputs[0]
    if match.context.main.opset < 18:
        return "it has no gradient before opset 18"
    if x is None or x.dtype not in KERNEL_TYPES or attributes.get_string("mode", "nearest") not in ("linear", "cubic"):
        return "it copies elements, which ONNX Runtime does as fast"
    if attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        return "it reads values from outside"
    sizes = [dimensions(value) or () for value in (x, match.y)]
    if any(len(each) < 3 or not all(isinstance(size, int) and size > 0 for size in each[-2:]) for each in sizes):
        return "its sizes are not static"
    return None if resizes_last_axes(Node(node, match.context.main)) else "it resizes other axes"


def _emit_resize(op: Builder, match: Match) -> Value:
    """Multiply by a matrix an axis; ONNX Runtime computes both when it loads the graph, by its own Resize."""
    view = Node(match.nodes[0], op)
    matrices = resize_matrices(view)
    assert matrices is not None
    return emit(op, RESIZE, view.x, *matrices, like=[view.y])[0]


def _has_inner_axes(match: Match) -> Sequence[ir.Attr] | str:
    """LogSoftmax along an axis that has others behind it: the classes of every pixel, as in segmentation."""
    (node,) = match.nodes
    x = node.inputs[0]
    shape = None if x is None or x.dtype not in KERNEL_TYPES else dimensions(x)
    inner = shape[node.attributes.get_int("axis", -1) % len(shape) + 1 :] if shape else (None,)
    sizes = [size for size in inner if isinstance(size, int)]
    fits = len(sizes) == len(inner) and math.prod(sizes) >= LEAST_INNER
    return list(node.attributes.values()) if fits else "few elements are behind its axis"


def _reduces_rows(match: Match) -> Sequence[ir.Attr] | str:
    """Over the first axes, whose sums have the bits of ONNX Runtime's; products over the last ones, too."""
    (node,) = match.nodes
    x, axes, *_ = *node.inputs, None
    shape = None if x is None or x.dtype not in KERNEL_TYPES else dimensions(x)
    given = None if axes is None or not shape else match.context.main.wrap(axes).constant()
    if given is None or shape is None or given.size == 0:
        return "its axes are not known"
    reduced = sorted(int(axis) % len(shape) for axis in given)
    first = list(range(len(reduced)))
    last = [axis + len(shape) - len(reduced) for axis in first]
    fits = (
        len(reduced) < len(shape)
        and shape[-1] not in (None, 1)
        and reduced in ([first, last] if node.op_type == "ReduceProd" else [first])
    )
    return [a for a in node.attributes.values() if a.name == "keepdims"] if fits else "it reduces other axes"


def _indexed(match: Match) -> Sequence[ir.Attr] | str:
    """Running sums and products, and writing at indices, which ONNX Runtime computes element by element."""
    (node,) = match.nodes
    x, indices = node.inputs[:2]
    fits = x is not None and x.dtype in KERNEL_TYPES and indices is not None and indices.dtype == ir.DataType.INT64
    adds = node.attributes.get_string("reduction", "none") in ("none", "add")
    return list(node.attributes.values()) if fits and adds else "its types or its reduction have no kernel"


def _packed_weight(match: Match) -> PackedWeight | str:
    """ONNX Runtime repacks low-bit weights, and so holds them twice, or dequantizes a whole one for a matmul."""
    (node,) = match.nodes
    if node.attributes.get_int("accuracy_level", 0) not in (0, 1):
        return "it computes with fewer bits than float"
    if len(node.inputs) > 4 and node.inputs[4] is not None:
        return "its columns are grouped by index"
    if any(value is None or value.dtype not in KERNEL_TYPES for value in (node.inputs[0], node.inputs[2])):
        return "it is in half precision"
    try:
        size = PackedWeight.of(node)
    except GradientError as error:
        return str(error)
    return size if size.block & (size.block - 1) == 0 else "its blocks are no power of two"


def _emit_packed(op: Builder, match: Match) -> Value:
    """Emit y = x wᵀ + bias of the domain ``onnxtrain``."""
    view = Node(match.nodes[0], op)
    packed, scales, zeros, bias = view.input_required(1), view.input_required(2), view.input(3), view.input(5)
    matmul = multiplied(PRODUCT, view.x, match.found, packed, scales, zeros)
    return matmul if bias is None else matmul + bias


def _pools(match: Match) -> str | None:
    """Norms of windows, or of all elements, whose powers ONNX Runtime computes one by one."""
    (node,) = match.nodes
    x, p, least = node.inputs[0], node.attributes.get_int("p", 2), 19 if "dilations" in node.attributes else 13
    if not _is_float32(x) or not _sizes(x) or p not in (1, 2) or match.context.main.opset < least:
        return "it is not of floats of known rank, or neither of squares nor of absolute values"
    return "its last windows are no whole ones" if node.attributes.get_int("ceil_mode", 0) else None


def _emit_pool(op: Builder, match: Match) -> Value:
    """Roots of sums: of all, or of means over windows times their elements."""
    view = Node(match.nodes[0], op)
    x, attributes = view.x, view.attributes()
    squares = attributes.pop("p", 2) == 2
    terms = x * x if squares else op.Abs(x).with_shape(x.shape)
    if view.operator == "GlobalLpPool":
        sums = op.ReduceSum(terms, op.ints(*range(2, len(x.shape or ()))), keepdims=1)
    else:
        sums = op.AveragePool(terms, count_include_pad=1, **attributes) * float(math.prod(attributes["kernel_shape"]))
    return op.Sqrt(sums) if squares else sums


def _responds(match: Match) -> str | None:
    (node,) = match.nodes
    taken = _is_float32(node.inputs[0]) and node.attributes["size"].as_int() % 2
    return None if taken else "it is not of floats, or ONNX Runtime refuses its size"


def _emit_response(op: Builder, match: Match) -> Value:
    view = Node(match.nodes[0], op)
    return view.x / local_response(view)[1]


def _samples(match: Match) -> str | None:
    (node,) = match.nodes
    taken = _is_float32(node.inputs[0]) and samples_images(node) and mode_of(Node(node, match.context.main)) == "linear"
    return None if taken else "it is not bilinear, of floats"


def _emit_samples(op: Builder, match: Match) -> Value:
    view = Node(match.nodes[0], op)
    return emit(op, "GridSample", view.x, view.input_required(1), like=[view.y], **view.attributes())[0]


def _frames(match: Match) -> list[int] | str:
    """The step, the length and the number of the frames."""
    view = Node(match.nodes[0], match.context.main)
    computed = any(value is not None and value.constant() is None for value in (view.input(1), view.input(3)))
    if not _is_float32(view.x.ir) or view.x.rank != 3 or computed:
        return "it is not of floats, or its step or its length is computed"
    sizes = (as_size(view.input_required(1)), frame_length(view), (_sizes(match.y) or (None, None))[1])
    known = [size for size in sizes if isinstance(size, int)]
    return known if len(known) == 3 else "its frames are not counted"


def _emit_frames(op: Builder, match: Match) -> Value:
    """Transforms of frames."""
    view, (step, length, count) = Node(match.nodes[0], op), match.found
    unit, end = math.gcd(length, step), (count - 1) * step + length  # elements that are copied together
    rows = op.reshape(op.Slice(view.x, op.ints(0), op.ints(end), op.ints(1)), [0, end // unit, -1])
    places = np.arange(count)[:, None] * (step // unit) + np.arange(length // unit)
    known = (None, count, length, (view.x.shape or ())[2])
    frames = op.reshape(op.Gather(rows, op.constant(places, np.int64), axis=1), [0, count, length, -1], known)
    window = view.input(2)
    windowed = frames if window is None else frames * op.Unsqueeze(window, op.ints(1))
    return transform(op, windowed.with_shape(known), 2, length, onesided=view.attribute("onesided", 1))


def _transforms(match: Match) -> dict[str, int] | str:
    """The attributes of the kernel's operator, from sizes that are known."""
    view = Node(match.nodes[0], match.context.main)
    inverse, one_sided = (view.attribute(name, 0) for name in ("inverse", "onesided"))
    computed = any(value is not None and value.constant() is None for value in (view.input(1), view.input(2)))
    if not _is_float32(view.x.ir) or not view.x.shape or computed or (inverse and one_sided):
        return "it is not of floats, its axis or length is computed, or it is a one-sided inverse"
    axis = axis_of(view)
    known = view.input(1) is not None or isinstance(view.x.shape[axis], int)
    length = length_of(view, axis, halves=False) if known else None
    if not isinstance(length, int) or not smooth(length, length):
        return "its length is not known to have small factors"
    bins = length // 2 + 1 if one_sided else length
    return {"axis": axis, "length": length, "bins": bins, "parts": 2, "inverse": inverse, "divided": inverse}


def _emit_transform(op: Builder, match: Match) -> Value:
    view = Node(match.nodes[0], op)
    return emit(op, "Fourier", view.x, like=[view.y], **match.found)[0]


def _is_float32(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.FLOAT


KERNELS = (
    Rule(operators("cross-entropy", "SoftmaxCrossEntropyLoss"), _emit_loss, _splittable),
    Rule(operators("transposed convolution", "ConvTranspose"), emit_transposed, transposed_convolution),
    Rule(operators("norms of windows", "LpPool", "GlobalLpPool"), _emit_pool, _pools),
    Rule(operators("local response", "LRN"), _emit_response, _responds),
    Rule(operators("bilinear samples", "GridSample"), _emit_samples, _samples),
    Rule(operators("frames", "STFT"), _emit_frames, _frames),
    Rule(operators("Fourier transform", "DFT"), _emit_transform, _transforms),
    _ours("Conv", convolution),
    _ours("BatchNormalization", _normalizes),
    Rule(operators("resize", "Resize"), _emit_resize, _mixes_neighbours),
    _ours("LogSoftmax", _has_inner_axes),
    *(_ours(f"Reduce{name}", _reduces_rows) for name in ("Sum", "Mean", "SumSquare", "Prod")),
    *(_ours(name, _indexed) for name in ("CumSum", "CumProd", "ScatterElements")),
    Rule(
        operators("low-bit linear layer", "MatMulNBits", domain=MICROSOFT_DOMAIN),
        _emit_packed,
        _packed_weight,
        everywhere=True,
    ),
)
"""The operators of others that this project's kernels compute, in order: the loss gives a LogSoftmax, frames a DFT."""

use_kernels = Rewrite(*KERNELS)
"""Run nodes on this project's own kernels, where these are faster than ONNX Runtime's."""


def resolve_fused(model: ir.Model, backward: Backward, *, kernels: bool, portable: Portable | None = None) -> None:
    """Keep the nodes of fused operators that a kernel can run, and write the others in standard operators, in place.

    Requires: a graph whose inputs have types. Ensures: the nodes of a body are where their node was; their readers have
    types. ONNX infers no types for ONNX Runtime's own operators.
    """
    replaced = dict[ir.Value, ir.Value]()
    emitted = set(backward.nodes)
    main = Builder(model.graph)
    graphs = [model.graph, *model.graph.subgraphs()]
    for graph in graphs:
        nodes = list(graph)
        for node in nodes:
            if find_fused(node) is None:
                if any(output.dtype is None for output in node.outputs):  # it reads the output of a runtime's operator
                    infer_outputs(node)
                continue
            if kernels and has_kernel(node):
                continue
            body = body_for(portable, node.op_type) or find_registered_body(node.op_type, node.domain)
            assert body is not None
            op = main.before(node)
            try:
                written = expand_registered(node, body, op, replaced)
            except GradientError:
                if node.domain == ONNXTRAIN_DOMAIN or node in emitted:
                    raise
                graph.remove(op.emitted, safe=True)  # the model's own node, which the body does not cover: it stays
                continue
            nodes += [made for made in written if find_fused(made) is not None]
            for inner in [inner for made in written for inner in subgraphs(made)]:
                graphs += [inner, *inner.subgraphs()]
            if node in emitted:  # other nodes belong to the model, or to the body of an emitted node
                backward.nodes += written
    backward.arriving = {replaced.get(value, value) for value in backward.arriving}
    forget_unused_domains(model, (ONNXTRAIN_DOMAIN,))


LEAST = 64
"""Least rows and columns of a weight that are worth the rounding: narrower ones, as in adapters, stay exact. Also the
least terms of the sums of a convolution."""

CONVOLUTIONS = ("Conv", "ConvInputGradient", "ConvWeightGradient")

LEAST_ROWS = 16
"""Least channels of the result of a convolution, or of its gradient by x, in bfloat16: a tile's rows."""

LEAST_OUTPUTS = 32
"""Least outputs of a convolution whose weight gradient is in bfloat16: a patch is arranged once for all of them."""

LONG_ROW = 28
"""Positions of a row of an image; shorter rows take longer to arrange: weight gradients need twice the outputs."""

TINY_ROW = 7
"""Positions of a row, below which convolutions of one kernel element, which read each element once, stay exact."""


def multiply_in_bfloat16(model: ir.Model, *, wanted: bool) -> None:
    """Let matmuls round their operands to bfloat16 and accumulate in float, forward and backward, in place.

    Linear layers, convolutions and attention of the domain ``onnxtrain`` get the attribute ``compute``. Narrow or
    unknown weights, convolutions of several groups or few channels, and float64 stay. Everything else (softmax, norms,
    losses, updates) is never rounded.

    Requires: types, and the shapes of weights. Ensures: a sorted graph.
    """
    if not wanted:
        return
    for node in all_nodes(model.graph):
        if node.domain == ONNXTRAIN_DOMAIN and _is_worth_it(node):
            node.attributes["compute"] = ir.AttrString("compute", "bfloat16")


def _is_worth_it(node: ir.Node) -> bool:
    """Return whether a node in float is attention, or a layer whose weight is large enough."""
    x = node.inputs[0]
    is_float = _is_float32(x)
    if node.op_type in (ATTENTION, ATTENTION_GRADIENT, PACKED, PACKED_GRADIENT):
        return is_float
    if node.op_type in CONVOLUTIONS:
        return is_float and _gains(node)
    if node.op_type in (PRODUCT, GRADIENT):
        sizes: list[object] = [node.attributes[name].as_int() for name in ("K", "N")]
    elif node.op_type in ("Linear", "LinearGradient"):
        sizes = list(_sizes(node.inputs[1]))
    elif node.op_type == "LinearWeightGradient":
        sizes = [size for value in node.inputs[:2] for size in _sizes(value)[-1:]]
    else:
        return False
    return is_float and len(sizes) == 2 and all(isinstance(size, int) and size >= LEAST for size in sizes)


def _gains(node: ir.Node) -> bool:
    """Return whether a convolution is faster in bfloat16: of one group, with long sums, and many rows of a matmul."""
    kernel, group = node.attributes["kernel_shape"].as_ints(), node.attributes["group"].as_int()
    of_weight = node.op_type == "ConvWeightGradient"
    images = [_sizes(value) for value in node.inputs[: 2 if of_weight else 1]]
    widths = [sizes[-1] for sizes in images if sizes and isinstance(sizes[-1], int)]
    if group != 1 or (math.prod(kernel) == 1 and min(widths, default=TINY_ROW) < TINY_ROW):
        return False
    if of_weight:
        outputs = images[0][1] if images[0] else None
        least = LEAST_OUTPUTS if min(widths, default=LONG_ROW) >= LONG_ROW else 2 * LEAST_OUTPUTS
        return isinstance(outputs, int) and outputs >= least
    rows, channels = (_sizes(node.inputs[1]) or (None, None))[:2]
    if node.op_type == "ConvInputGradient":
        rows, channels = channels, rows
    if not isinstance(rows, int) or not isinstance(channels, int):
        return False
    return rows >= LEAST_ROWS and channels * math.prod(kernel) >= LEAST


def _sizes(value: ir.Value | None) -> tuple[object, ...]:
    return dimensions(value) or ()
