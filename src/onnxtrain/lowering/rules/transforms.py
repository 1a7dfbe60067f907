"""Sampling at points and Fourier transforms on this project's kernels, once gradients are built."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.rules.grid_sample import mode_of, samples_images
from onnxtrain.autodiff.rules.signal import smooth
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rule


def _samples(match: Match) -> str | None:
    (node,) = match.nodes
    taken = node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT and samples_images(node)
    return None if taken and mode_of(Node(node, match.context.main)) == "linear" else "it is not bilinear, of floats"


def _emit_samples(op: Builder, match: Match) -> Value:
    view = Node(match.nodes[0], op)
    return emit(op, "GridSample", view.x, view.input_required(1), like=[view.y], **view.attributes())[0]


def _transforms(match: Match) -> tuple[int, int, dict[str, int]] | str:
    """The axis, and the attributes of the kernel's operator, from sizes that are known."""
    (node,) = match.nodes
    view, short = Node(node, match.context.main), node.op_type == "STFT"
    x, y, window = dimensions(node.inputs[0]), dimensions(match.y), view.input(2)
    if not x or view.x.dtype != ir.DataType.FLOAT or (short and (len(x) != 3 or not x[2])):
        return "it is not of floats of known sizes"
    axis = 2 if short else view.attribute("axis", 1) if view.op.opset < 20 else _number(window, -2)
    one_sided, inverse = view.attribute("onesided", int(short)), view.attribute("inverse", 0)
    given = view.input(3 if short else 1)
    default = x[axis] if axis is not None and not short else None
    if short and given is None and window is not None:
        default = (window.shape or (None,))[0]
    length, step = _number(given, default), _number(view.input(1), None) if short else 0
    if not isinstance(length, int) or step is None or axis is None or (one_sided and inverse):
        return "its length is not known, or it is a one-sided inverse"
    if short and not (y and isinstance(y[1], int)):
        return "its frames are not counted"
    bins = length // 2 + 1 if one_sided else length
    known = {"length": length, "bins": bins, "parts": 2, "inverse": inverse, "divided": inverse}
    return (axis, step, known) if smooth(length, bins) else "its length has no small factors"


def _number(value: Value | None, default: Dimension) -> Dimension:
    """The number in a constant, or what stands where there is no value."""
    found = None if value is None else value.constant()
    return default if value is None else None if found is None else int(found.reshape(()))


def _emit_transform(op: Builder, match: Match) -> Value:
    view = Node(match.nodes[0], op)
    axis, step, attributes = match.found
    x, window, y = view.x, view.input(2), view.y
    if view.operator == "STFT":
        length, count = attributes["length"], (y.shape or ())[1]
        unit, used = math.gcd(length, step), (count - 1) * step + length  # elements that are copied together
        rows = op.Slice(x, op.ints(0), op.ints(used), op.ints(1))
        frames = np.arange(count)[:, None] * (step // unit) + np.arange(length // unit)
        x = op.Gather(op.reshape(rows, [0, used // unit, -1]), op.constant(frames, np.int64), axis=1)
        x = op.reshape(x, [-1, count, length, (view.x.shape or ())[2]])
        x = x if window is None else x * op.Unsqueeze(window, op.ints(1))
    return emit(op, "Fourier", x, like=[y], axis=axis, **attributes)[0]


TRANSFORMS = (
    Rule(operators("bilinear samples", "GridSample"), _emit_samples, _samples),
    Rule(operators("Fourier transform", "DFT", "STFT"), _emit_transform, _transforms),
)
"""The transforms that have kernels."""
