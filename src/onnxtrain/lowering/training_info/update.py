"""Build the update of an algorithm: optimizer nodes, moving averages, and the global norm of gradients.

The norm sums the squares of each row of a gradient [rows, columns] in the gradient's type, then the rows in float64,
then the gradients in the order of the parameters. A rank with some of the rows sums them with the same operator, so
that the norm has the same bits for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import Builder, Value
from onnxtrain.lowering.training_info.recipe import Averaging, Block, UpdateRule
from onnxtrain.operators.arithmetic import Tensor
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.registry import OPTIMIZERS

_LONGEST_ROW = 1 << 14
"""Largest number of elements in a row, if the shape allows it: ranks exchange rows that cross two shares."""

Variables = Mapping[str, tuple[Value, ...]]
"""X, G and the states of parameters by name."""

AVERAGE = "average"
"""Suffix, after the parameter's name and a slash, of the name of its moving average."""


def optimizer_nodes(
    op: Builder,
    rules: Mapping[str, UpdateRule],
    rate: Value,
    count: Value,
    variables: Variables,
    sparsified: Mapping[str, Block],
) -> dict[str, tuple[Value, ...]]:
    """Emit the update of all parameters; return their new values and states by name."""
    alike: list[tuple[UpdateRule, dict[str, tuple[Value, ...]]]] = []
    for name, own in variables.items():
        found = next((members for rule, members in alike if rule == rules[name]), None)
        if found is None:
            found = {}
            alike.append((rules[name], found))
        found[name] = own
    news: dict[str, tuple[Value, ...]] = {}
    for rule, members in alike:
        scaled = rate if rule.rate_scale == 1.0 else rate * rule.rate_scale
        counted = count - rule.missed if rule.missed else count
        news |= _nodes(op, rule.optimizer, scaled, counted, members, sparsified)
    return {name: news[name] for name in variables}


def average_node(
    op: Builder,
    averaging: Averaging,
    count: Value,
    first_count: int,
    averages: Mapping[str, Value],
    xs: Mapping[str, Value],
) -> dict[str, Value]:
    """Emit the moving averages A of parameters X, by name: A_new = A + (1 - d) (X - A)."""
    done = op.cast(count, ir.DataType.DOUBLE) - float(first_count)
    decay = op.scalar(averaging.decay, done)
    if averaging.warmup:
        decay = op.Min(decay, (done + 2.0) / (done + 11.0))
    decay = op.Where(op.binary("Less", done, float(max(averaging.start, 1))), op.scalar(0.0, done), decay)
    schema = OPTIMIZERS["SGD"].schema
    given = [*averages.values(), *(xs[name] for name in averages)]
    news = op.several(
        schema.name,
        (decay - 1.0).with_shape(()),
        count,
        *given,
        outputs=len(averages),
        domain=schema.domain,
        **schema.complete({"weight_decay": -1.0}),
    )
    for new, old in zip(news, averages.values(), strict=True):
        new.ir.type, new.ir.shape = old.ir.type, old.ir.shape
    return dict(zip(averages, news, strict=True))


def _nodes(
    op: Builder, optimizer: Optimizer, rate: Value, count: Value, variables: Variables, sparsified: Mapping[str, Block]
) -> dict[str, tuple[Value, ...]]:
    if not optimizer.promotes_sparsity:
        return _node(op, optimizer, rate, count, variables)
    chosen: dict[Block, dict[str, tuple[Value, ...]]] = {}
    for name, own in variables.items():
        if name in sparsified:
            chosen.setdefault(sparsified[name], {})[name] = own
    others = {name: own for name, own in variables.items() if name not in sparsified}
    news: dict[str, tuple[Value, ...]] = {}
    for block, members in chosen.items():
        if optimizer.sparsity_modifier is None:
            attributes = {**optimizer.node_attributes(), "block": block}
            news |= _node(op, optimizer, rate, count, members, attributes)
        else:
            news |= _scaled_node(op, optimizer, rate, count, members, block)
    if others:
        news |= _node(op, optimizer.plain(), rate, count, others)
    return news


def _node(
    op: Builder,
    optimizer: Optimizer,
    rate: Value,
    count: Value,
    variables: Variables,
    attributes: Mapping[str, Any] | None = None,
) -> dict[str, tuple[Value, ...]]:
    """Emit one node over the variables: all X, all G, then each state of all parameters."""
    groups = list(zip(*variables.values(), strict=True))
    given = optimizer.node_attributes() if attributes is None else attributes
    news = op.several(
        optimizer.schema.name,
        rate,
        count,
        *(value for group in groups for value in group),
        outputs=len(variables) * (len(groups) - 1),
        domain=optimizer.schema.domain,
        **{name: value for name, value in given.items() if value != ()},
    )
    for new, old in zip(news, [value for group in (groups[0], *groups[2:]) for value in group], strict=True):
        new.ir.type, new.ir.shape = old.ir.type, old.ir.shape
    return {name: tuple(news[index :: len(variables)]) for index, name in enumerate(variables)}


def _scaled_node(
    op: Builder, optimizer: Optimizer, rate: Value, count: Value, variables: Variables, block: Block
) -> dict[str, tuple[Value, ...]]:
    """Emit a node with updates that are scaled element by element.

    The operator steps from zero, so that it returns its update D alone, without rounding against X. Weight decay, which
    needs X, is applied around it::
    """
    modifier = optimizer.sparsity_modifier
    assert modifier is not None
    attributes = optimizer.node_attributes()
    decay, shrinking = (float(attributes.pop(name, 0.0)) for name in ("norm_coefficient", "norm_coefficient_post"))
    stepped = {}
    for name, (x, gradient, *states) in variables.items():
        decayed = (x * decay + gradient).with_shape(x.shape) if decay else gradient
        stepped[name] = (op.zeros_like(x), decayed, *states)
    # Operators may require the attribute, so it is set to 0 instead of omitted.
    if "norm_coefficient" in optimizer.node_attributes():
        attributes["norm_coefficient"] = 0.0
    found = _node(op, optimizer, rate, count, stepped, attributes)
    news = {}
    for name, (step, *states) in found.items():
        x = variables[name][0]
        moved = modifier.apply(Tensor(x), Tensor(step), block)
        new = moved if not shrinking else (1 - shrinking) * moved
        assert isinstance(new.data, Value)
        news[name] = (new.data.with_shape(x.shape), *states)
    return news


def row_axes(shape: Sequence[int]) -> int:
    """Return the number of leading axes that count the rows of a gradient."""
    axes = min(1, max(0, len(shape) - 1))
    while axes < len(shape) - 1 and math.prod(shape[axes:]) > _LONGEST_ROW:
        axes += 1
    return axes


def row_squares(op: Builder, gradient: Value, shape: Sequence[int]) -> Value:
    """Sum the squares of each row of a gradient; the result has the axes that count rows."""
    if not shape:
        return gradient * gradient
    axes = row_axes(shape)
    squares = op.ReduceSumSquare(gradient, op.ints(*range(axes, len(shape))), keepdims=0)
    return squares.with_shape(tuple(shape[:axes]))


def norm_of(op: Builder, squares: Sequence[Value]) -> Value:
    """Return the norm of all gradients in float64, from the sums of squares of their rows."""
    return op.Sqrt(op.sum_of([op.ReduceSum(op.cast(rows, ir.DataType.DOUBLE), keepdims=0) for rows in squares]))
