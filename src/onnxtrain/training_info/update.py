"""The update of an algorithm: optimizer nodes, moving averages, and the global norm of gradients.

The squares of each row of a gradient [rows, columns] are summed in its own type, the sums of all rows in float64, and
the sums of all gradients in the order of the parameters. A rank that has only some rows computes their sums with the
same operator, so that the norm has the same bits for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.ir import Builder, Value
from onnxtrain.operators.arithmetic import Tensor
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.registry import OPTIMIZERS
from onnxtrain.training_info.recipe import Averaging, UpdateRule

_LONGEST_ROW = 1 << 14
"""Elements of a row where the shape allows it: a row that two processes share is sent to both."""

Variables = Mapping[str, tuple[Value, ...]]
"""X, G and the states of parameters by name."""

AVERAGE = "average"
"""What follows a parameter's name, and a slash, in that of its moving average."""


def optimizer_nodes(
    op: Builder,
    rules: Mapping[str, UpdateRule],
    rate: Value,
    count: Value,
    variables: Variables,
    sparsified: Collection[str],
) -> dict[str, tuple[Value, ...]]:
    """Emit the update of all parameters: their new values and states by name.

    One node updates all parameters of one rule, whatever group they are in. Where its optimizer promotes sparsity, it
    does so for those in ``sparsified``, and a second node takes plain steps for the others.
    """
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
        news |= _nodes(op, rule.optimizer, scaled, count, members, sparsified)
    return {name: news[name] for name in variables}


def average_node(
    op: Builder,
    averaging: Averaging,
    count: Value,
    first_count: int,
    averages: Mapping[str, Value],
    xs: Mapping[str, Value],
) -> dict[str, Value]:
    """Emit the moving averages A of parameters X, by name: A_new = A + (1 - d) (X - A).

    It is one step of SGD on A, with the rate d - 1, X as the gradient and a weight decay of -1, so that it takes the
    one kernel over all parameters, and reads and writes each number once.

    Args:
        op: Where to emit.
        averaging: How d comes from the number of updates.
        count: The update count before this update.
        first_count: That of the first update.
        averages: A, by parameter.
        xs: X after the update.
    """
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
    op: Builder, optimizer: Optimizer, rate: Value, count: Value, variables: Variables, sparsified: Collection[str]
) -> dict[str, tuple[Value, ...]]:
    if not optimizer.promotes_sparsity:
        return _node(op, optimizer, rate, count, variables)
    chosen = {name: own for name, own in variables.items() if name in sparsified}
    others = {name: own for name, own in variables.items() if name not in sparsified}
    news: dict[str, tuple[Value, ...]] = {}
    if chosen:
        promote = _node if optimizer.sparsity_modifier is None else _scaled_node
        news |= promote(op, optimizer, rate, count, chosen)
    if others:
        news |= _node(op, optimizer.plain(), rate, count, others)
    return news


def _node(
    op: Builder,
    optimizer: Optimizer,
    rate: Value,
    count: Value,
    variables: Variables,
    attributes: Mapping[str, float | str] | None = None,
) -> dict[str, tuple[Value, ...]]:
    """One node over the variables: all X, all G, then all of each state."""
    groups = list(zip(*variables.values(), strict=True))
    news = op.several(
        optimizer.schema.name,
        rate,
        count,
        *(value for group in groups for value in group),
        outputs=len(variables) * (len(groups) - 1),
        domain=optimizer.schema.domain,
        **(optimizer.node_attributes() if attributes is None else attributes),
    )
    for new, old in zip(news, [value for group in (groups[0], *groups[2:]) for value in group], strict=True):
        new.ir.type, new.ir.shape = old.ir.type, old.ir.shape
    return {name: tuple(news[index :: len(variables)]) for index, name in enumerate(variables)}


def _scaled_node(
    op: Builder, optimizer: Optimizer, rate: Value, count: Value, variables: Variables
) -> dict[str, tuple[Value, ...]]:
    """A node whose updates are scaled element by element.

    The operator steps from zero, so that what it returns is its update D alone, without rounding against X.
    Weight decay, which needs X, is done around it::

        D     = operator(0, norm_coefficient * X + G, states)
        X_new = (1 - norm_coefficient_post) * (X + s * D)
    """
    modifier = optimizer.sparsity_modifier
    assert modifier is not None
    attributes = optimizer.node_attributes()
    decay, shrinking = (float(attributes.pop(name, 0.0)) for name in ("norm_coefficient", "norm_coefficient_post"))
    stepped = {}
    for name, (x, gradient, *states) in variables.items():
        decayed = (x * decay + gradient).with_shape(x.shape) if decay else gradient
        stepped[name] = (op.zeros_like(x), decayed, *states)
    # Operators may require the attribute, so that it is given as 0 rather than left out.
    if "norm_coefficient" in optimizer.node_attributes():
        attributes["norm_coefficient"] = 0.0
    found = _node(op, optimizer, rate, count, stepped, attributes)
    news = {}
    for name, (step, *states) in found.items():
        x = variables[name][0]
        moved = modifier.apply(Tensor(x), Tensor(step))
        new = moved if not shrinking else (1 - shrinking) * moved
        assert isinstance(new.data, Value)
        news[name] = (new.data.with_shape(x.shape), *states)
    return news


def row_axes(shape: Sequence[int]) -> int:
    """Return the number of leading axes whose indices count the rows of a gradient."""
    axes = min(1, max(0, len(shape) - 1))
    while axes < len(shape) - 1 and math.prod(shape[axes:]) > _LONGEST_ROW:
        axes += 1
    return axes


def row_squares(op: Builder, gradient: Value, shape: Sequence[int]) -> Value:
    """Sum the squares of each row of a gradient [shape]; the result has the axes that count rows."""
    if not shape:
        return gradient * gradient
    axes = row_axes(shape)
    squares = op.ReduceSumSquare(gradient, op.ints(*range(axes, len(shape))), keepdims=0)
    return squares.with_shape(tuple(shape[:axes]))


def norm_of(op: Builder, squares: Sequence[Value]) -> Value:
    """Return the square root of the sum of the rows' squares of all gradients, in float64."""
    return op.Sqrt(op.sum_of([op.ReduceSum(op.cast(rows, ir.DataType.DOUBLE), keepdims=0) for rows in squares]))
