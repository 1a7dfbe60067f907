"""Normalizations: an axis over which a mean is taken is fixed, since a mean over fewer entries is another."""

from __future__ import annotations

from onnxtrain.graph.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.plugins.structures.axes.broadcasting import same_shape
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule

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


no_rule("SkipLayerNormalization", domain=MICROSOFT_DOMAIN, reason="it normalizes over the width of the residual stream")
no_rule(
    "SkipSimplifiedLayerNormalization",
    domain=MICROSOFT_DOMAIN,
    reason="it normalizes over the width of the residual stream",
)
no_rule("EmbedLayerNormalization", domain=MICROSOFT_DOMAIN, reason="it normalizes over the width of the embeddings")
no_rule("BatchNormalization", domain=ONNXTRAIN_DOMAIN, reason="it is a part of training graphs, not of model files")
