"""What an algorithm graph computes: loss and gradient, their sums over micro-batches, clipping, and the update."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ir import Builder, Value
from onnxtrain.operators.schema import State
from onnxtrain.training_info.algorithm import Algorithm
from onnxtrain.training_info.gradient_norm import norm_of, row_squares
from onnxtrain.training_info.recipe import LossTerms, Recipe
from onnxtrain.training_info.rounding import Rounding, widened
from onnxtrain.training_info.update import AVERAGE, average_node, optimizer_nodes


def drops(recipe: Recipe) -> bool:
    """Whether the main graph draws masks of Dropout, from seeds."""
    return any(node.op_type == "Dropout" and "seed" in node.attributes for node in recipe.model.graph)


class Writer:
    """Writes the algorithms of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.schema = recipe.optimizer.schema

    def step(self, builder: Algorithm) -> Algorithm:
        """Loss, gradient and update in one."""
        terms = builder.loss()
        gradients = self._masked(builder, builder.gradient(terms.loss))
        self._update(builder, self._clip(builder, gradients))
        builder.updates.update(self.recipe.statistics)
        self._return(builder, terms)
        return builder

    def _return(self, builder: Algorithm, terms: LossTerms) -> None:
        builder.result(self.recipe.names.loss, terms.loss)
        for name, part in terms.parts.items():
            builder.result(name, part)

    def accumulating(self, builder: Algorithm) -> Algorithm:
        """accumulator += weight * gradient, total += weight, loss_total += weight * loss.

        Of a loss that is a sum, gradients and losses are added as they are, and nothing is divided.
        """
        op = builder.op
        if drops(self.recipe):
            self._count(builder)  # masks are drawn by it
        terms = builder.loss()
        scaled = terms.loss if terms.sums else terms.loss * terms.weight
        weight = op.scalar(0, terms.loss) if terms.sums else terms.weight
        gradients = self._masked(builder, builder.gradient(scaled))
        for (name, value), gradient in zip(builder.parameters.items(), gradients, strict=True):
            accumulator = builder.state(f"{name}/accumulated", _repeated(0.0, value))
            builder.update(accumulator, gradient if self.recipe.alone else accumulator + gradient)
        for total_name, term in (("accumulated_weight", weight), ("accumulated_loss", scaled)):
            total, term = builder.state(total_name, np.zeros((), np.float64)), op.cast(term, ir.DataType.DOUBLE)
            # Alone, of type double, it is what the Gradient node names, and keeps that name.
            builder.update(total, op.Identity(term) if self.recipe.alone else total + term)
        builder.updates.update(self.recipe.statistics)
        self._return(builder, terms)
        return builder

    def applying(self, builder: Algorithm) -> Algorithm:
        """gradient = accumulator / total; update; clear the accumulators, where that is asked for."""
        op = builder.op
        weight = builder.state("accumulated_weight", np.zeros((), np.float64))
        total = builder.state("accumulated_loss", np.zeros((), np.float64))
        divisor = op.Where(op.binary("Equal", weight, 0), 1, weight)  # where nothing counted, all sums are 0
        accumulators = [
            builder.state(f"{name}/accumulated", _repeated(0.0, value)) for name, value in builder.parameters.items()
        ]
        self._update(builder, self._clip(builder, accumulators, 1 / divisor))
        builder.result(self.recipe.names.loss, op.cast(total / divisor, ir.DataType.FLOAT))
        for state in accumulators if self.recipe.cleared else ():
            builder.update(state, op.zeros_like(state))
        for state in (weight, total) if self.recipe.cleared else ():
            builder.update(state, op.scalar(0.0, state))
        return builder

    def _masked(self, builder: Algorithm, gradients: list[Value]) -> list[Value]:
        """Zero where the mask is false: every update rule then keeps a zero weight and its states at zero."""
        op = builder.op
        masked = []
        for name, gradient in zip(builder.parameters, gradients, strict=True):
            if name in self.recipe.masks:
                mask = builder.constant(f"{name}/mask", self.recipe.masks[name])
                gradient = op.Where(mask, gradient, op.scalar(0.0, gradient)).with_shape(gradient.shape)
            masked.append(gradient)
        return masked

    def _clip(self, builder: Algorithm, gradients: list[Value], scale: Value | None = None) -> list[Value]:
        """Gradients, times a scale where there is one, after clipping: of all products one, which updates take in."""
        op, clipping = builder.op, self.recipe.clipping
        if any(g.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) for g in gradients):
            gradients, scale = _scaled(op, gradients, scale), None  # squares of sums leave the range of float16
        if clipping.value is not None:
            bound, scale, scaled = clipping.value, None, _scaled(op, gradients, scale)
            gradients = [op.Clip(g, op.scalar(-bound, g), op.scalar(bound, g)).with_shape(g.shape) for g in scaled]
        if clipping.norm is None:
            return _scaled(op, gradients, scale)
        if self.recipe.given_squares is None:
            shapes = [_shape(value) for value in builder.parameters.values()]
            squares = [row_squares(op, g, shape) for g, shape in zip(gradients, shapes, strict=True)]
        else:
            squares = [builder.state(*item) for item in self.recipe.given_squares.items()]
        norm = norm_of(op, squares)
        if scale is not None:
            norm = norm * scale
        # min(1, bound / norm) in a form that is right for norm = 0 and lets NaN through.
        factor = op.scalar(clipping.norm, norm) / op.Max(norm, op.scalar(clipping.norm, norm))
        return _scaled(op, gradients, factor if scale is None else factor * scale)

    def _count(self, builder: Algorithm) -> Value:
        return builder.state(self.recipe.names.count, np.asarray(self.schema.first_count, np.int64))

    def _update(self, builder: Algorithm, gradients: Sequence[Value]) -> None:
        """One optimizer node over all parameters that are updated alike, two where only some are sparsified; T + 1."""
        op = builder.op
        rate = builder.input(self.recipe.names.learning_rate, ir.DataType.FLOAT, ())
        count = self._count(builder)
        held = {name: op.wrap(value) for name, value in builder.parameters.items()}
        states: dict[str, dict[str, tuple[Value, ...]]] = {name: {} for name in held}
        rules = {name: self.recipe.rule_of(name) for name in held}
        optimizers = {id(rule.optimizer): rule.optimizer for rule in rules.values()}
        used = {key: optimizer.states for key, optimizer in optimizers.items()}
        for role in self.schema.states:
            for name, value in builder.parameters.items():
                if role in used[id(rules[name].optimizer)]:
                    states[name][role.name] = self._state(builder, f"{name}/{role.name}", role, value)
        op.scope = "update"
        xs = {name: widened(op, (value,), "X") for name, value in held.items()}
        variables = {
            name: (xs[name], gradient, *(widened(op, kept, letter) for letter, kept in states[name].items()))
            for name, gradient in zip(xs, gradients, strict=True)
        }
        sparsified = self.recipe.sparsified
        if sparsified is None:
            sparsified = [name for name, value in builder.parameters.items() if len(_shape(value)) >= 2]
        news = optimizer_nodes(op, rules, rate, count, variables, sparsified)
        own_rounding = Rounding("bfloat16", self.recipe.seed)
        for name, own in news.items():
            for new in own:
                new.ir.type, new.ir.shape = xs[name].ir.type, xs[name].ir.shape
            (x,) = own_rounding.rounded(op, (held[name],), "X", own[0], count)
            builder.update(held[name], x)
            for (letter, kept), new in zip(states[name].items(), own[1:], strict=True):
                rounding = self.recipe.rounding
                to_keep = (new,) if rounding is None else rounding.rounded(op, kept, letter, new, count)
                for old, part in zip(kept, to_keep, strict=True):
                    builder.update(old, part)
        if self.recipe.averaging is not None:
            self._average(builder, count, {name: own[0] for name, own in news.items()})
        builder.update(count, count + 1)
        op.scope = ""

    def _state(self, builder: Algorithm, name: str, role: State, parameter: ir.Value) -> tuple[Value, ...]:
        """The tensors of a state of a parameter."""
        first, rounding = _repeated(role.initial, parameter), self.recipe.rounding
        kept = {name: first} if rounding is None else rounding.first_values(name, first)
        return tuple(builder.state(*item) for item in kept.items())

    def _average(self, builder: Algorithm, count: Value, xs: Mapping[str, Value]) -> None:
        """The moving averages of all parameters, which start at zero and are the parameters after the first update."""
        assert self.recipe.averaging is not None
        averages = {
            name: builder.state(f"{name}/{AVERAGE}", _repeated(0.0, value))
            for name, value in builder.parameters.items()
        }
        first = self.schema.first_count
        for name, new in average_node(builder.op, self.recipe.averaging, count, first, averages, xs).items():
            builder.update(averages[name], new)


def _scaled(op: Builder, gradients: list[Value], scale: Value | None) -> list[Value]:
    """Gradients times a scalar."""
    if scale is None:
        return gradients
    scales = {dtype: op.cast(scale, dtype) for dtype in dict.fromkeys(g.dtype for g in gradients)}
    return [(g * scales[g.dtype]).with_shape(g.shape) for g in gradients]


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None
    return tuple(int(size) for size in value.shape.numpy())


def _repeated(number: float, like: ir.Value) -> np.ndarray:
    """One number in the type and shape of a value; takes no memory."""
    return _repeated_number(number, _dtype(like), _shape(like))


@functools.lru_cache(256)
def _repeated_number(number: float, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Read only, so that all states of a shape have the same one."""
    return np.broadcast_to(np.asarray(number, dtype), shape)


def _dtype(value: ir.Value) -> np.dtype[Any]:
    """The type that a value is computed in."""
    assert value.dtype is not None
    return np.dtype(np.float32) if value.dtype == ir.DataType.BFLOAT16 else value.dtype.numpy()
