"""Einsum: one letter is one axis."""

from __future__ import annotations

from onnxtrain.graph.value import Dimension
from onnxtrain.plugins.structures.axes.labels import Axis
from onnxtrain.plugins.structures.axes.node import Node
from onnxtrain.plugins.structures.axes.registry import axes_of


@axes_of("Einsum")
def einsum(node: Node) -> list[Axis]:
    """y = a sum of products over the letters that the output lacks."""
    equation = node.attribute("equation").replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "..." in equation or not right or any(len(set(term)) < len(term) for term in (*terms, right)):
        reason = f"{node.describe()} has the equation {equation!r}; only letters once per operand are followed"
        axes = [node.fix(axis, reason) for index in range(len(terms)) for axis in node.all_axes(index)]
        return [Axis(None, reason) for _ in node.output_shape()] or axes[:0]
    places: dict[str, list[Axis]] = {}
    sizes: dict[str, Dimension] = {}
    for index, term in enumerate(terms):
        for place, letter in enumerate(term):
            axis = node.axis(index, place)
            if node.shape(index)[place] != 1:
                places.setdefault(letter, []).append(axis)
                sizes[letter] = node.shape(index)[place]
            else:
                places.setdefault(letter, [])
    found: dict[str, Axis] = {}
    for letter, axes in places.items():
        if not axes:
            found[letter] = Axis(None, "its size is 1")
            continue
        found[letter] = node.join(*axes).with_zero(any(axis.zero for axis in axes))
        if letter not in right:
            node.sum_over(*axes)
    constant = [index for index in range(len(terms)) if node.is_constant(index)]
    for letter in right:
        if not constant and all(letter in term for term in terms):
            node.tag(found[letter], "heads")
        if any(letter in terms[index] for index in constant):
            node.tag(found[letter], "hidden")
    node.multiplies(*(axis if axis.labels is not None else sizes.get(letter, 1) for letter, axis in found.items()))
    return [found[letter] for letter in right]
