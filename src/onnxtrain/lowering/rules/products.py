"""Einsum of two operands: batched matmuls, or broadcast products, whose gradients are some as well."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from onnxtrain.autodiff.rules.einsum import ELLIPSIS, Term, parse
from onnxtrain.graph import Builder, Value
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

    def size(self, label: str) -> Dimension:
        """The size of an axis."""
        return (self.value.shape or ())[self.term.index(label)]


def _with_axes(op: Builder, value: Value, groups: Sequence[tuple[_Side, Sequence[str]]]) -> Value:
    """Reshape to one axis for each group of labels of a side."""
    sizes: list[Dimension] = []
    for side, labels in groups:
        found = [side.size(label) for label in labels]
        numbers = [size for size in found if isinstance(size, int)]
        sizes.append(math.prod(numbers) if len(numbers) == len(found) else found[0] if len(found) == 1 else None)
    if all(isinstance(size, int) for size in sizes):
        return op.reshape(value, [size for size in sizes if isinstance(size, int)], sizes)
    parts = []
    for side, labels in groups:
        factors = [op.dimension(side.value, side.term.index(label)) for label in labels]
        parts.append(functools.reduce(operator.mul, factors) if factors else op.ints(1))
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
    a, b = (_Side(op.wrap(x), term) for x, term in zip(match.nodes[0].inputs, (first, second), strict=True))
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
    found = [*batch, *left, *right]
    if len(left) != 1 or len(right) != 1:
        product = _with_axes(
            op, product, [*((a, [label]) for label in [*batch, *left]), *((b, [label]) for label in right)]
        )
    return _Side(product, found).ordered(op, output).value


write_products = Rewrite(Rule(operators("product", "Einsum"), _emit, _guard))
"""Replace every Einsum of two operands whose shared axes have known sizes, in place."""
