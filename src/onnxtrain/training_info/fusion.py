"""Activations that exporters write as several nodes, as the one operator that ONNX Runtime has for them.

ONNX Runtime fuses them itself, but not in a training step: gradients read what lies between, which then has to be
kept, four or five tensors of the size of the widest layer where one is enough. So they are fused before the gradient
is built, in working copies for sessions of ONNX Runtime only: a step graph for any runtime has standard operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.operator import TRAINING_DOMAIN
from onnxtrain.graph import Builder
from onnxtrain.graph.replace import remove_nodes, substitute

DOMAIN = "com.microsoft"

_FORMULA = 0.044715
"""The factor of x^3 in Gelu's approximation by tanh."""


def fuse_activations(model: ir.Model) -> None:
    """Write Gelu, exact or approximated by tanh, as one node of ONNX Runtime's own domain, in place.

    Only where nobody else reads what lies between: a Gradient node may name any value.
    """
    graph = model.graph
    named = _named(graph)
    replaced: set[ir.Node] = set()
    for node in list(graph):
        kind = {"Erf": "Gelu", "Tanh": "FastGelu"}.get(node.op_type)
        if kind is None or node.domain:
            continue
        x = _argument_of_erf(node) if kind == "Gelu" else _argument_of_tanh(node)
        y = None if x is None else _half_of_x_times_one_plus(node.outputs[0], x)
        if x is None or y is None or not _has_kernel(x, y):
            continue
        inside = _between(x, y)
        if _are_seen(inside, y, named):
            continue
        last = y.producer()
        assert last is not None
        op = Builder(graph, graph.opset_imports[""], before=last)
        op.scope = f"fused {node.name}" if node.name else ""
        result = op.several(kind, op.wrap(x), outputs=1, domain=DOMAIN)[0].ir
        result.type, result.shape = y.type, y.shape
        substitute(graph, {y: result})
        name, y.name = y.name, None
        result.name = name
        replaced |= inside
    if replaced:
        graph.opset_imports.setdefault(DOMAIN, 1)
        remove_nodes(graph, replaced)


def _has_kernel(x: ir.Value, y: ir.Value) -> bool:
    """Whether the operator can compute y from x: a constant of higher rank would have given y axes of its own."""
    same_rank = x.shape is not None and y.shape is not None and len(x.shape) == len(y.shape)
    return same_rank and x.dtype == ir.DataType.FLOAT


def _named(graph: ir.Graph) -> set[str]:
    """Names that Gradient nodes speak of."""
    names: set[str] = set()
    for node in graph:
        if node.op_type == "Gradient" and node.domain == TRAINING_DOMAIN:
            lists = [node.attributes[key].as_strings() for key in ("xs", "zs") if key in node.attributes]
            names |= {name for listed in lists for name in listed} | {node.attributes["y"].as_string()}
    return names


def _number(value: ir.Value | None) -> float | None:
    """The number that a value holds, where it is a constant of one element."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1:
        return None
    return float(np.asarray(tensor.numpy()).reshape(()))


def _is(number: float | None, wanted: float) -> bool:
    return number is not None and math.isclose(number, wanted, rel_tol=1e-3)


def _scaled(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """What a value is a constant multiple of, and the factor."""
    node = None if value is None else value.producer()
    if node is None or node.domain or node.op_type not in ("Mul", "Div"):
        return None
    first, second = node.inputs
    number = _number(second)
    if number is not None and first is not None:
        return first, (number if node.op_type == "Mul" else 1 / number if number else math.inf)
    number = _number(first)
    if node.op_type == "Mul" and number is not None and second is not None:
        return second, number
    return None


def _terms(value: ir.Value | None, operator: str) -> tuple[ir.Value, ir.Value] | None:
    """The two inputs of the node that a value is the result of, where it is this operator."""
    node = None if value is None else value.producer()
    if node is None or node.domain or node.op_type != operator or None in node.inputs[:2]:
        return None
    first, second = node.inputs[:2]
    assert first is not None
    assert second is not None
    return first, second


def _argument_of_erf(erf: ir.Node) -> ir.Value | None:
    """x of erf(x / sqrt(2))."""
    scaled = _scaled(erf.inputs[0])
    return scaled[0] if scaled is not None and _is(scaled[1], math.sqrt(0.5)) else None


def _argument_of_tanh(tanh: ir.Node) -> ir.Value | None:
    """x of tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    scaled = _scaled(tanh.inputs[0])
    if scaled is None or not _is(scaled[1], math.sqrt(2 / math.pi)):
        return None
    terms = _terms(scaled[0], "Add")
    for x, cubic in (terms, terms[::-1]) if terms is not None else ():
        small = _scaled(cubic)
        if small is not None and _is(small[1], _FORMULA) and _is_cube(small[0], x):
            return x
    return None


def _is_cube(value: ir.Value, x: ir.Value) -> bool:
    power = _terms(value, "Pow")
    if power is not None:
        return power[0] is x and _is(_number(power[1]), 3)
    factors = _terms(value, "Mul")
    if factors is None:
        return False
    return any(one is x and _terms(other, "Mul") == (x, x) for one, other in (factors, factors[::-1]))


@dataclass(frozen=True)
class _Product:
    """A value that is what we started from, times a constant, and perhaps times x."""

    value: ir.Value
    factor: float
    times_x: bool


def _half_of_x_times_one_plus(value: ir.Value, x: ir.Value) -> ir.Value | None:
    """The result of x (1 + value) / 2, in whichever order exporters multiply."""
    sums = [node for node in _readers(value, "Add") if any(_is(_number(item), 1) for item in node.inputs)]
    products = [_Product(node.outputs[0], 1.0, False) for node in sums]
    for _ in range(2):  # by x and by 1/2, or by x/2 at once
        products = [after for before in products for after in _multiplied(before, x)]
        for product in products:
            if product.times_x and _is(product.factor, 0.5):
                return product.value
    return None


def _multiplied(before: _Product, x: ir.Value) -> Iterator[_Product]:
    """What a product is multiplied to by one more node: with a constant, with x, or with a multiple of x."""
    for node in _readers(before.value, "Mul"):
        other = next((item for item in node.inputs if item is not before.value), None)
        number, scaled = _number(other), _scaled(other)
        if number is not None:
            yield _Product(node.outputs[0], before.factor * number, before.times_x)
        elif other is x and not before.times_x:
            yield _Product(node.outputs[0], before.factor, True)
        elif scaled is not None and scaled[0] is x and not before.times_x:
            yield _Product(node.outputs[0], before.factor * scaled[1], True)
    for node in _readers(before.value, "Div"):
        number = _number(node.inputs[1])
        if number and node.inputs[0] is before.value:
            yield _Product(node.outputs[0], before.factor / number, before.times_x)


def _readers(value: ir.Value, operator: str) -> list[ir.Node]:
    return [node for node, _ in value.uses() if node.op_type == operator and not node.domain]


def _between(x: ir.Value, y: ir.Value) -> set[ir.Node]:
    """The nodes that compute y from x, constants apart."""
    found: set[ir.Node] = set()
    pending = [y]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found and node.op_type != "Constant":
            found.add(node)
            pending += [value for value in node.inputs if value is not None and value is not x]
    return found


def _are_seen(inside: set[ir.Node], y: ir.Value, named: set[str]) -> bool:
    """Whether something else than y depends on what these nodes give, or may name it."""
    outputs = [output for node in inside for output in node.outputs if output is not y]
    return any(
        output.is_graph_output() or output.name in named or any(reader not in inside for reader, _ in output.uses())
        for output in outputs
    )
