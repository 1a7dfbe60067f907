"""Convolutions: grouped ones keep whole groups, or the same channels of every group."""

from __future__ import annotations

import numpy as np

from onnxtrain.plugins.structures.axes.labels import Axis, fixed
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of, no_rule
from onnxtrain.plugins.structures.axes.rules.matmul import with_zero_points


@axes_of("Conv", "ConvInteger")
def conv(node: Node) -> list[Axis]:
    """y [n, o, ...] = sum over c of x [n, c, ...] w [o, c / groups, ...], plus b [o]."""
    return _convolution(node, inputs=1, outputs=0, has_bias=node.operator == "Conv")


@axes_of("ConvTranspose")
def conv_transpose(node: Node) -> list[Axis]:
    """y [n, o, ...] = sum over c of x [n, c, ...] w [c, o / groups, ...], plus b [o]."""
    return _convolution(node, inputs=0, outputs=1, has_bias=True)


def _convolution(node: Node, *, inputs: int, outputs: int, has_bias: bool) -> list[Axis]:
    groups = node.attribute("group", 1)
    x, shape = node.positions(0, 1), node.output_shape()
    if groups == 1:
        made = node.axis(1, outputs)
        summed = node.axis(1, inputs)
        if node.shape(0)[1] != 1:
            node.sum_over(x, summed)
    else:
        made, summed = _grouped(node, x, groups, inputs, outputs)
    found = made
    if has_bias and node.has(2):
        bias = node.axis(2, 0)
        found = node.join(made, bias).with_zero(made.zero and bias.zero)
    if node.operator == "ConvInteger":
        found = with_zero_points(node, found, 3)
    node.tag(found, "channels")
    kernel = node.shape(1)[2:]
    space = node.shape(0)[2:] if node.operator == "ConvTranspose" else shape[2:]
    inner = summed if summed.labels is not None else node.shape(1)[1 if node.operator != "ConvTranspose" else 0]
    if node.operator == "ConvTranspose" and groups > 1:
        inner = node.shape(1)[1]
        node.multiplies(shape[0], x if x.labels is not None else node.shape(0)[1], inner, *kernel, *space)
    else:
        node.multiplies(shape[0], found if found.labels is not None else shape[1], inner, *kernel, *space)
    return [node.axis(0, 0), found, *(fixed("it is an image axis of a convolution") for _ in shape[2:])]


def _grouped(node: Node, x: Axis, groups: int, inputs: int, outputs: int) -> tuple[Axis, Axis]:
    """Relate the channels of a grouped convolution: whole groups, or the same channels of all groups."""
    channels, made_size = node.shape(0)[1], node.output_shape()[1]
    stays = fixed(f"{node.describe()} has groups")
    if not isinstance(made_size, int) or not isinstance(channels, int):
        made = node.axis(1, 0) if outputs == 0 else fixed(stays.reason)
        return node.fix(made, x.reason), stays
    weight_made = node.axis(1, 0) if outputs == 0 else node.new(made_size).with_zero(True)
    if weight_made.labels is None:
        return node.fix(x, stays.reason), stays
    own_made = weight_made.labels.reshape(groups, -1)
    if x.labels is None:  # all groups stay, each without the same channels
        if own_made.shape[1] == 1:
            return node.fix(weight_made, x.reason), stays
        made_united = node.unite(own_made.T)
        if outputs == 1:
            node.join(weight_made.taken(made_united), node.axis(1, 1))
        return weight_made, stays
    own = x.labels.reshape(groups, -1)
    if node.choice(2 if max(own.shape[1], own_made.shape[1]) > 1 else 1) == 0:
        node.unite(np.concatenate([own, own_made], axis=1))
        if inputs == 0:  # the groups of a transposed convolution lie on the weight's axis of inputs
            node.join(x, node.axis(1, 0))
        node.judge_by(x)
        per_group = own.shape[1]
        node.on_cut(lambda cut: cut.set_attribute(node.ir, "group", cut.count(x) // per_group))
        return weight_made, stays
    united = node.unite(own.T)
    summed = node.axis(1, inputs) if inputs == 1 else stays
    if inputs == 1 and united.size > 1:
        node.sum_over(x.taken(united), summed)
    if inputs == 0:
        node.join(x, node.axis(1, 0))
    made_united = node.unite(own_made.T)
    if outputs == 1 and made_united.size > 1:
        node.join(x.taken(made_united), node.axis(1, 1))
    node.judge_by(x)
    node.judge_by(weight_made)
    return weight_made, summed


no_rule("Col2Im", reason="it sums blocks that overlap")
no_rule("DeformConv", reason="its offsets have channels of their own")
