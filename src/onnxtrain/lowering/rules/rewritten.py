"""Operators written as others with the same values, which are faster in a step, forward and backward.

Einsum of two operands is a batched matmul or a broadcast product; a normalization of groups of channels is that
of a batch, whose channels are the groups, which has a kernel, and a scale and a bias for each channel.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onnxtrain.autodiff.fused import KERNEL_TYPES, VERSION, emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.rules.einsum import ELLIPSIS, Term, parse
from onnxtrain.autodiff.rules.fused_batch_norm import OPERATOR as BATCH_NORM
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule


class _Side(NamedTuple):
    """An operand and its labels, none of which it has twice."""

    value: Value
    term: Term

    def ordered(self, op: Builder, term: Term) -> _Side:
        """The axes in the order of ``term``; labels that it lacks are summed."""
        absent = [axis for axis, label in enumerate(self.term) if label not in term]
        value = op.ReduceSum(self.value, op.ints(*absent), keepdims=0) if absent else self.value
        rest = [label for label in self.term if label in term]
        order = [rest.index(label) for label in term if label in rest]
        moved = op.Transpose(value, perm=order) if order != sorted(order) else value
        return _Side(moved, [rest[axis] for axis in order])

    def merged(self, op: Builder, *groups: Sequence[str]) -> Value:
        """Each group of labels as one axis, of size one where it is empty, behind the axes of the batch."""
        value = self.ordered(op, [label for group in groups for label in group]).value
        if all(len(group) == 1 for group in groups):
            return value
        return _with_axes(op, value, [(self, group) for group in groups])


def _with_axes(op: Builder, value: Value, groups: Sequence[tuple[_Side, Sequence[str]]]) -> Value:
    """Reshape to one axis for each group of labels of a side."""
    sizes: list[Dimension] = []
    for side, labels in groups:
        found = [(side.value.shape or ())[side.term.index(label)] for label in labels]
        numbers = [size for size in found if isinstance(size, int)]
        sizes.append(math.prod(numbers) if len(numbers) == len(found) else found[0] if len(found) == 1 else None)
    if all(isinstance(size, int) for size in sizes):
        return op.reshape(value, [size for size in sizes if isinstance(size, int)], sizes)
    factors = [[op.dimension(side.value, side.term.index(label)) for label in labels] for side, labels in groups]
    parts = [functools.reduce(operator.mul, each) if each else op.ints(1) for each in factors]
    return op.reshape(value, op.Concat(*parts, axis=0), sizes)


def _guard(match: Match) -> object:
    (node,) = match.nodes
    terms, output = parse(node.attributes.get_string("equation", ""))
    if len(terms) != 2 or any(ELLIPSIS in term or len(set(term)) != len(term) for term in (*terms, output)):
        return "it has not two operands, or a label twice in one, or an ellipsis"
    known = [dict(zip(term, dimensions(x) or (), strict=False)) for term, x in zip(terms, node.inputs, strict=True)]
    shared = [label for label in terms[0] if label in terms[1]]
    if any(known[0].get(label) is None or known[0][label] != known[1].get(label) for label in shared):
        return "a shared axis has no size that is known to be one for both"
    return [*terms, output]


def _emit(op: Builder, match: Match) -> Value:
    first, second, output = match.found
    view = Node(match.nodes[0], op)
    a, b = (_Side(view.input_required(place), term) for place, term in enumerate((first, second)))
    summed = [label for label in first if label in second and label not in output]
    if not summed:
        factors = [side.ordered(op, output) for side in (a, b)]
        absent = [[axis for axis, label in enumerate(output) if label not in side.term] for side in factors]
        x, y = (
            op.Unsqueeze(s.value, op.ints(*axes)) if axes else s.value for s, axes in zip(factors, absent, strict=True)
        )
        return x * y
    batch = [label for label in output if label in first and label in second]
    left, right = ([label for label in output if label in term and label not in batch] for term in (first, second))
    alone = [[label] for label in batch]
    product = op.MatMul(a.merged(op, *alone, left, summed), b.merged(op, *alone, summed, right))
    if len(left) != 1 or len(right) != 1:
        axes = [(a, [label]) for label in [*batch, *left]] + [(b, [label]) for label in right]
        product = _with_axes(op, product, axes)
    return _Side(product, [*batch, *left, *right]).ordered(op, output).value


def _grouped(match: Match) -> str | None:
    (node,) = match.nodes
    x = node.inputs[0]
    sizes = None if x is None or x.dtype not in KERNEL_TYPES else dimensions(x)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes[1:]):
        return "its sizes are not static"
    return "its scales are of groups" if match.context.main.opset < 21 else None


def _emit_grouped(op: Builder, match: Match) -> Value:
    """Groups of all images are the channels of one."""
    view = Node(match.nodes[0], op)
    x, scale, bias = (view.input_required(index) for index in range(3))
    epsilon, groups = view.attribute("epsilon", 1e-5), view.attribute("num_groups")
    images, channels, *inner = x.shape or (0, 0)
    elements = math.prod(size for size in (channels, *inner) if isinstance(size, int)) // groups
    known = (1, images * groups if isinstance(images, int) else None, elements)
    rows = op.reshape(x, [1, -1, elements], known)
    numbers = op.constant(np.zeros(1), x.dtype), op.constant(np.ones(1), x.dtype)
    zero, one = (op.Expand(number, op.dimension(rows, 1)).with_shape(known[1:2]) for number in numbers)
    zeros, ones = (op.Expand(number, op.dimension(x, 1)).with_shape((channels,)) for number in numbers)
    like = [rows, one, one, None, None]
    normalized, *_, mean, variance = emit(op, BATCH_NORM, rows, one, zero, zero, one, like=like, epsilon=epsilon)
    for value in (mean, variance):
        value.ir.dtype = x.dtype
        value.with_shape((2, known[1]))
    return op.BatchNormalization(op.reshape_like(normalized, x), scale, bias, zeros, ones, epsilon=0.0)


def _reduces(match: Match) -> str | None:
    x = match.nodes[0].inputs[0]
    if x is None or x.dtype not in KERNEL_TYPES or match.context.main.opset < 18:
        return "it is not of floats with its axes as an input"
    return "it may be no reduction" if match.nodes[0].attributes.get_int("noop_with_empty_axes", 0) else None


def _emit_reduction(op: Builder, match: Match) -> Value:
    """ONNX Runtime computes these element by element, as sums of squares, whose bits clipping by norm relies on."""
    view = Node(match.nodes[0], op)
    x, axes, keeps = view.x, view.input(1), view.attribute("keepdims", 1)
    if match.nodes[0].op_type == "ReduceLogSumExp":
        op.import_domain(ONNXTRAIN_DOMAIN, VERSION)
        largest = op.ReduceMax(x, axes, keepdims=1)
        finite = op.Where(op.IsInf(largest), op.scalar(0, x), largest)  # infinities are not subtracted
        top = op.StopGradient(finite, domain=ONNXTRAIN_DOMAIN).with_shape(largest.shape)
        top.ir.dtype = x.dtype
        # The second reduction is over axes of size one.
        return op.Log(op.ReduceSum(op.Exp(x - top), axes, keepdims=keeps)) + op.ReduceSum(top, axes, keepdims=keeps)
    if match.nodes[0].op_type == "ReduceLogSum":
        return op.Log(op.ReduceSum(x, axes, keepdims=keeps))
    return op.ReduceSum(op.Abs(x), axes, keepdims=keeps)


def _is_of_two(match: Match) -> str | None:
    return None if len(match.nodes[0].inputs) == 2 else "it has not two operands"


def _emit_power(op: Builder, match: Match) -> Value:
    """Exponents of the shape of the result: a chain reads no rows."""
    view = Node(match.nodes[0], op)
    return op.Pow(view.x, op.Expand(view.input_required(1), op.Shape(view.x)).with_shape(view.x.shape))


def _spreads(match: Match) -> str | None:
    a, b = match.nodes[0].inputs
    known, given = dimensions(a), dimensions(b)
    floats = a is not None and b is not None and a.dtype == b.dtype and a.dtype in KERNEL_TYPES
    if not floats or not known or not given or all(size == 1 for size in given):
        return "its exponent is one number, or of another type"
    return None if known == dimensions(match.y) != given else "its exponents have the shape of the result"


def _emit_sum(op: Builder, match: Match) -> Value:
    view = Node(match.nodes[0], op)
    return view.x + view.input_required(1)


write_faster = Rewrite(
    Rule(operators("sum", "Sum"), _emit_sum, _is_of_two),
    Rule(operators("power", "Pow"), _emit_power, _spreads),
    Rule(operators("product", "Einsum"), _emit, _guard),
    Rule(operators("groups", "GroupNormalization"), _emit_grouped, _grouped),
    Rule(
        operators("reduction", "ReduceL1", "ReduceLogSum", "ReduceLogSumExp"),
        _emit_reduction,
        _reduces,
    ),
)
"""Write operators as faster ones, in place: Einsum of known sizes, normalizations of groups, sums of functions."""
