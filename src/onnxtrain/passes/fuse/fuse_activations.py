"""Activations that exporters write as several nodes, as the one operator that ONNX Runtime has for them.

ONNX Runtime fuses them itself, but not in a training step: gradients read what lies between, which then has to be
kept, four or five tensors of the size of the widest layer where one is enough. So they are fused before the gradient
is built, in working copies for sessions of ONNX Runtime only: a step graph for any runtime has standard operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.ir import Builder
from onnxtrain.ir.domains import MICROSOFT_DOMAIN
from onnxtrain.ir.replace import remove_nodes, take_over
from onnxtrain.ir.value import constant_number
from onnxtrain.passes.fuse.patterns import (
    are_seen,
    between,
    multiple_of,
    named_by_gradients,
    operands,
    readers,
)

_FORMULA = 0.044715
"""The factor of x^3 in Gelu's approximation by tanh."""


def fuse_activations(model: ir.Model) -> None:
    """Write Gelu, exact or approximated by tanh, as one node of ONNX Runtime's own domain, in place.

    Only where nobody else reads what lies between: a Gradient node may name any value.

    Requires: shapes. Ensures: the new node stands where the last of the old ones stood.
    """
    graph = model.graph
    named = named_by_gradients(graph)
    replaced: set[ir.Node] = set()
    for node in list(graph):
        kind = {"Erf": "Gelu", "Tanh": "FastGelu"}.get(node.op_type)
        if kind is None or node.domain:
            continue
        x = _argument_of_erf(node) if kind == "Gelu" else _argument_of_tanh(node)
        y = None if x is None else _half_of_x_times_one_plus(node.outputs[0], x)
        if x is None or y is None or not _has_kernel(x, y):
            continue
        inside = between(x, y)
        if are_seen(inside, y, named):
            continue
        last = y.producer()
        assert last is not None
        op = Builder(graph, graph.opset_imports[""], before=last)
        result = op.several(kind, op.wrap(x), outputs=1, domain=MICROSOFT_DOMAIN)[0].ir
        op.emitted[-1].name = last.name  # whoever wants y to be recomputed names the node that gives it
        take_over(graph, {y: result})
        replaced |= inside
    if replaced:
        graph.opset_imports.setdefault(MICROSOFT_DOMAIN, 1)
        remove_nodes(graph, replaced)


def _has_kernel(x: ir.Value, y: ir.Value) -> bool:
    """Whether the operator can compute y from x: a constant of higher rank would have given y axes of its own."""
    same_rank = x.shape is not None and y.shape is not None and len(x.shape) == len(y.shape)
    return same_rank and x.dtype == ir.DataType.FLOAT


def _is(number: float | None, wanted: float) -> bool:
    return number is not None and math.isclose(number, wanted, rel_tol=1e-3)


def _argument_of_erf(erf: ir.Node) -> ir.Value | None:
    """x of erf(x / sqrt(2))."""
    scaled = multiple_of(erf.inputs[0])
    return scaled[0] if scaled is not None and _is(scaled[1], math.sqrt(0.5)) else None


def _argument_of_tanh(tanh: ir.Node) -> ir.Value | None:
    """x of tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    scaled = multiple_of(tanh.inputs[0])
    if scaled is None or not _is(scaled[1], math.sqrt(2 / math.pi)):
        return None
    terms = operands(scaled[0], "Add")
    for x, cubic in (terms, terms[::-1]) if terms is not None else ():
        small = multiple_of(cubic)
        if small is not None and _is(small[1], _FORMULA) and _is_cube(small[0], x):
            return x
    return None


def _is_cube(value: ir.Value, x: ir.Value) -> bool:
    power = operands(value, "Pow")
    if power is not None:
        return power[0] is x and _is(constant_number(power[1]), 3)
    factors = operands(value, "Mul")
    if factors is None:
        return False
    return any(one is x and operands(other, "Mul") == (x, x) for one, other in (factors, factors[::-1]))


class _Product(NamedTuple):
    """A value that is what we started from, times a constant, and perhaps times x."""

    value: ir.Value
    factor: float
    times_x: bool


def _half_of_x_times_one_plus(value: ir.Value, x: ir.Value) -> ir.Value | None:
    """The result of x (1 + value) / 2, in whichever order exporters multiply."""
    sums = [node for node in readers(value, "Add") if any(_is(constant_number(item), 1) for item in node.inputs)]
    products = [_Product(node.outputs[0], 1.0, False) for node in sums]
    for _ in range(2):  # by x and by 1/2, or by x/2 at once
        products = [after for before in products for after in _multiplied(before, x)]
        for product in products:
            if product.times_x and _is(product.factor, 0.5):
                return product.value
    return None


def _multiplied(before: _Product, x: ir.Value) -> Iterator[_Product]:
    """What a product is multiplied to by one more node: with a constant, with x, or with a multiple of x."""
    for node in readers(before.value, "Mul"):
        other = next((item for item in node.inputs if item is not before.value), None)
        number, scaled = constant_number(other), multiple_of(other)
        if number is not None:
            yield _Product(node.outputs[0], before.factor * number, before.times_x)
        elif other is x and not before.times_x:
            yield _Product(node.outputs[0], before.factor, True)
        elif scaled is not None and scaled[0] is x and not before.times_x:
            yield _Product(node.outputs[0], before.factor * scaled[1], True)
    for node in readers(before.value, "Div"):
        number = constant_number(node.inputs[1])
        if number and node.inputs[0] is before.value:
            yield _Product(node.outputs[0], before.factor / number, before.times_x)
