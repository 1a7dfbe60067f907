"""Operators that mix the entries of an axis: normalizations, reductions, orders, rotations."""

from __future__ import annotations

from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of
from onnxtrain.plugins.structures.axes.rules.elementwise import same_shape

_OVER = "normalizes over it: the mean of fewer entries is another"


@axes_of("BatchNormalization")
def batch_normalization(node: Node) -> list[list[Axis]]:
    """y = (x - mean [c]) / sqrt(var [c] + eps) scale [c] + bias [c]."""
    node.keep_values(3)
    node.keep_values(4)
    channels = [node.axis(0, 1), *(node.axis(index, 0) for index in range(1, 5))]
    joined = node.join(*channels).with_zero(channels[1].zero and channels[2].zero)
    others = [node.axis(0, axis).with_zero(False) for axis in range(2, node.rank())]
    return [[node.axis(0, 0).with_zero(False), joined, *others], *([[joined]] * (len(node.ir.outputs) - 1))]


@axes_of("InstanceNormalization")
def instance_normalization(node: Node) -> list[Axis]:
    """y [n, c, ...] = x normalized over its image axes, scaled by scale [c], plus bias [c]."""
    channels = [node.axis(0, 1), node.axis(1, 0), node.axis(2, 0)]
    joined = node.join(*channels).with_zero(channels[1].zero and channels[2].zero)
    image = [node.fix(node.axis(0, axis), f"{node.describe()} {_OVER}") for axis in range(2, node.rank())]
    return [node.axis(0, 0).with_zero(False), joined, *image]


@axes_of("GroupNormalization")
def group_normalization(node: Node) -> list[Axis]:
    """y [n, c, ...] = x normalized in groups of channels, which are removed as a whole."""
    groups, channels = node.attribute("num_groups"), node.positions(0, 1)
    scale, bias = node.axis(1, 0), node.axis(2, 0)
    joined = channels
    if channels.labels is not None:
        whole = node.unite(channels.labels.reshape(groups, -1))
        if node.opset < 21:
            node.join(channels.taken(whole), scale, bias)
        else:
            node.join(channels, scale, bias)
        per_group = len(channels.labels) // groups
        node.on_cut(lambda cut: cut.set_attribute(node.ir, "num_groups", cut.count(channels) // per_group))
        joined = channels.with_zero(scale.zero and bias.zero)
    image = [node.fix(node.axis(0, axis), f"{node.describe()} {_OVER}") for axis in range(2, node.rank())]
    return [node.axis(0, 0).with_zero(False), joined, *image]


@axes_of("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
@axes_of("SimplifiedLayerNormalization", domain=MICROSOFT_DOMAIN)
def layer_normalization(node: Node) -> list[Axis]:
    """y = x normalized over its axes from one on; only RMS norms keep zeros."""
    first = node.attribute("axis", -1) % node.rank()
    keeps_zero = node.operator != "LayerNormalization"
    return same_shape(node, keeps_zero=keeps_zero, mixed=range(first, node.rank()), reason=_OVER)


@axes_of("MeanVarianceNormalization")
def mean_variance_normalization(node: Node) -> list[Axis]:
    """y = x normalized over axes, by default all but the channels."""
    mixed = [axis for axis in node.attribute("axes", [0, 2, 3]) if axis < node.rank()]
    return same_shape(node, keeps_zero=True, mixed=mixed, reason=_OVER)


@axes_of("LpNormalization")
def lp_normalization(node: Node) -> list[Axis]:
    """y = x divided by its norm over an axis, to which zeros add nothing."""
    axis = node.attribute("axis", -1) % node.rank()
    found = same_shape(node, keeps_zero=False)
    if not found[axis].zero and node.axis(0, axis).labels is not None and not node.axis(0, axis).zero:
        found[axis] = node.fix(node.axis(0, axis), f"{node.describe()} {_OVER}")
    return found


@axes_of("LRN")
def local_response_normalization(node: Node) -> list[Axis]:
    """y = x normalized over neighbouring channels."""
    return same_shape(node, keeps_zero=True, mixed=[1], reason="relates neighbours along it")


@axes_of("Softmax", "LogSoftmax", "Hardmax")
def softmax(node: Node) -> list[Axis]:
    """y = x normalized over an axis; before opset 13 over all axes from it on."""
    axis = node.attribute("axis", -1 if node.opset >= 13 else 1)
    mixed = [axis] if node.opset >= 13 else range(axis % max(node.rank(), 1), node.rank())
    return same_shape(node, keeps_zero=False, mixed=mixed, reason="normalizes over it")


@axes_of("ArgMax", "ArgMin", "CumSum", "CumProd", "TopK")
def mixes_one_axis(node: Node) -> list[list[Axis]]:
    """y = an operation along an axis."""
    if node.operator.startswith("Cum"):
        axis = node.number(1)
        mixed = range(node.rank()) if axis is None else [int(axis)]
    else:
        mixed = [node.attribute("axis", -1 if node.operator == "TopK" else 0)]
    found = same_shape(node, keeps_zero=False, mixed=mixed, reason="orders it")
    if node.operator.startswith("Arg") and not node.attribute("keepdims", 1):
        del found[mixed[0] % node.rank()]
    return [found] * len(node.ir.outputs)


@axes_of("Trilu")
def trilu(node: Node) -> list[Axis]:
    """y = a triangle of x, which relates its last two axes."""
    return same_shape(node, keeps_zero=True, mixed=[-1, -2], reason="relates its last two axes")


@axes_of("ReverseSequence")
def reverse_sequence(node: Node) -> list[Axis]:
    """y = x with its sequences reversed."""
    mixed = [node.attribute("batch_axis", 1), node.attribute("time_axis", 0)]
    return same_shape(node, keeps_zero=True, mixed=mixed, reason="reverses it")


@axes_of("RotaryEmbedding")
def rotary_embedding(node: Node) -> list[Axis]:
    """y [n, heads, t, d] = x with its entries rotated in pairs: heads are structures, if they have an axis."""
    mixed = [-1, -2] if node.rank() == 4 else range(node.rank())
    return same_shape(node, keeps_zero=True, mixed=mixed, reason="rotates its entries in pairs")


_SUMS = frozenset({"ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare"})


@axes_of(
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
)
def reduce(node: Node) -> list[Axis]:
    """y = a summary of x over axes."""
    listed = node.integers("axes", 1)
    if listed is None and node.has(1):
        found = [node.fix(axis, f"{node.describe()} has computed axes") for axis in node.all_axes()]
        return found[: len(node.output_shape())]
    if not listed and node.attribute("noop_with_empty_axes", 0):
        return node.all_axes()
    gone = {axis % node.rank() for axis in listed} if listed else set(range(node.rank()))
    keeps_zero = node.operator in _SUMS | {"ReduceMean", "ReduceMax", "ReduceMin"}
    found = []
    for place in range(node.rank()):
        axis = node.axis(0, place)
        if place not in gone:
            found.append(axis.with_zero(axis.zero and keeps_zero))
            continue
        if axis.labels is not None and not (axis.zero and node.operator in _SUMS):
            node.fix(axis, f"{node.describe()} summarizes it: fewer entries give another result")
        if node.attribute("keepdims", 1):
            found.append(fixed("its size is 1"))
    return found
