"""Einsum: the gradient of every operand is an Einsum of the output's gradient and the other operands."""

from __future__ import annotations

import itertools
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.placement import identity_matrix, size_of
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.inference import broadcast_shapes
from onnxtrain.graph.value import Dimension

Term = list[str]
"""One operand's axes: letters, and "..." where its rank is not known."""

ELLIPSIS = "..."


class Labeled(NamedTuple):
    """An operand and the labels of its axes."""

    value: Value
    term: Term

    def size(self, label: str) -> Dimension:
        """The size of the axis with this label."""
        shape = self.value.shape
        return None if shape is None or ELLIPSIS in self.term else shape[self.term.index(label)]


@register_gradient("Einsum")
def einsum(node: Node, dy: Value) -> Gradients:
    """y = Σ a b c ...: da = Σ dy b c ..., over the labels of dy, b, c ... that a lacks.

    Along labels of a that nothing else has, the gradient is repeated; labels that a has twice put it on a
    diagonal. Where ranks are known an ellipsis becomes letters (workarounds: ellipses of different ranks).
    """
    operands = [node.input_required(index) for index in range(len(node.inputs))]
    terms, output = parse(node.attribute("equation"))
    for operand, term in zip(operands, terms, strict=True):
        if len(set(term)) != len(term) and ELLIPSIS in term:
            node.rank(operand)
    terms, output, broadcast = _without_ellipses(terms, output, operands)
    labeled = [Labeled(operand, term) for operand, term in zip(operands, terms, strict=True)]
    return [
        _gradient(node.op, x, [Labeled(dy, output), *labeled[:index], *labeled[index + 1 :]], broadcast)
        for index, x in enumerate(labeled)
    ]


def parse(equation: str) -> tuple[list[Term], Term]:
    """Split an equation into the terms of the operands and that of the output, which may be implicit."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_tokens(term) for term in left.split(",")]
    if arrow:
        return terms, _tokens(right)
    counts = Counter(label for term in terms for label in term)
    once = sorted(label for label, count in counts.items() if count == 1 and label != ELLIPSIS)
    return terms, ([ELLIPSIS] if ELLIPSIS in counts else []) + once


def _tokens(term: str) -> Term:
    before, dots, after = term.partition(ELLIPSIS)
    return [*before, *([dots] if dots else []), *after]


def _without_ellipses(terms: list[Term], output: Term, operands: Sequence[Value]) -> tuple[list[Term], Term, set[str]]:
    """Write letters for ellipses where ranks are known; returns the labels that broadcast, too."""
    ranks = [
        None if ELLIPSIS not in term or operand.rank is None else operand.rank - len(term) + 1
        for operand, term in zip(operands, terms, strict=True)
    ]
    known = [rank for rank in ranks if rank is not None]
    count = sum(ELLIPSIS in term for term in terms)
    if not count:
        return terms, output, set()
    if len(known) < count:
        return terms, output, {ELLIPSIS}
    used = set(output).union(*terms)
    letters = [letter for letter in string.ascii_letters if letter not in used][: max(known)]

    def write(term: Term, rank: int | None) -> Term:
        if rank is None or ELLIPSIS not in term:
            return term
        at = term.index(ELLIPSIS)
        return [*term[:at], *letters[len(letters) - rank :], *term[at + 1 :]]

    written = [write(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    return written, write(output, len(letters)), set(letters)


def _gradient(op: Builder, x: Labeled, others: Sequence[Labeled], broadcast: set[str]) -> Value:
    """The gradient of one operand from dy and the other operands."""
    available = set().union(*(operand.term for operand in others))
    present = [label for label in dict.fromkeys(x.term) if label in available]
    if ELLIPSIS in available and ELLIPSIS not in x.term:
        present.insert(0, ELLIPSIS)  # of unknown rank: summed below
    equation = ",".join("".join(operand.term) for operand in others) + "->" + "".join(present)
    dx = op.Einsum(*(operand.value for operand in others), equation=equation)
    if ELLIPSIS not in present:
        dx.with_shape(tuple(_size(label, x, others, broadcast) for label in present))
    dx = _on_diagonals(op, _insert_axes(op, dx, x.term, present), x)
    if any(label not in available and x.term.count(label) == 1 for label in x.term):
        shape = broadcast_shapes(dx.shape, x.value.shape)
        dx = op.Expand(dx, op.shape_of(x.value)).with_shape(shape)
    return op.reduce_to(dx, x.value) if broadcast else dx


def _size(label: str, x: Labeled, others: Sequence[Labeled], broadcast: set[str]) -> Dimension:
    """Return the size of a gradient's axis before the reduction: x's size unless the axis broadcasts."""
    if label not in broadcast:
        return x.size(label)
    sizes = {operand.size(label) for operand in others if label in operand.term} - {1}
    return sizes.pop() if len(sizes) == 1 else None if sizes else 1


def _insert_axes(op: Builder, dx: Value, term: Term, present: Term) -> Value:
    """Size 1 where x has a label that is summed within x, or has one for the second time."""
    absent, seen = [], set[str]()
    for axis, label in enumerate(term):
        if label in seen or label not in present:
            absent.append(axis if ELLIPSIS in term[axis:] else axis - len(term))
        seen.add(label)
    return op.Unsqueeze(dx, op.ints(*absent)) if absent else dx


def _on_diagonals(op: Builder, dx: Value, x: Labeled) -> Value:
    """Multiply by an identity matrix over each pair of axes that share a label."""
    for label, count in Counter(x.term).items():
        axes = [axis for axis, other in enumerate(x.term) if other == label]
        for pair in itertools.pairwise(axes) if count > 1 else ():
            size = size_of(x.value, pair[0])
            eye = identity_matrix(op, size, size, x.value.dtype)
            rest = [axis for axis in range(len(x.term)) if axis not in pair]
            dx = dx * (op.Unsqueeze(eye, op.ints(*rest)) if rest else eye)
    return dx
