"""Hints about parameters that no gradient of the loss reaches, though one of another value would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.path import Forward, Route
from onnxtrain.errors.formatting import listed
from onnxtrain.errors.hints import Hint
from onnxtrain.graph.clone import needed_for
from onnxtrain.graph.patterns import Patterns, escape, pattern_list
from onnxtrain.graph.value import is_float
from onnxtrain.parameters.trainable import UNREACHED, Initializer, parameter_table

_ROUNDING = ("Cast", "CastLike", "Ceil", "Floor", "Round", "Sign")
"""Operators that pass straight-through gradients alone; those that quantize have a hint of their own."""

_CHOOSING = ("ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Hardmax", "Less", "LessOrEqual")
"""Operators that compare numbers or choose positions, which pass no gradient at all."""


class Unreached:
    """The parameters that no gradient of the loss reaches, from the table of a working copy."""

    def __init__(
        self, model: ir.Model, table: Sequence[Initializer], *, train: Patterns | None, freeze: Patterns | None
    ) -> None:
        self._model, self._train, self._freeze = model, train, pattern_list(freeze)
        values = model.graph.initializers
        self._lost = {row.name: values[row.name] for row in table if row.reason == UNREACHED}

    def stopped(self, ends: Sequence[str]) -> Iterator[Hint]:
        """Name those between which and the loss stand rounding, comparisons or the choice of a position."""
        rounded, path = self._reached(ends, straight_through=True)
        integers = [node for node in path if not node.op_type.startswith("Cast") or not is_float(node.outputs[0])]
        rounding = dict.fromkeys(node.op_type for node in integers if node.op_type in _ROUNDING)
        if rounding:
            told = "straight_through=True passes it on unchanged (straight-through estimator)."
            yield Hint(f"{_not_trained(rounded, rounding)} {told}", surprising=True)
        needed = needed_for(self._values(ends)) if self._lost else set()
        choices = [node for node in self._model.graph if node in needed and node.op_type in _CHOOSING]
        read = [str(value.name) for node in choices for value in node.inputs if value is not None]
        chosen, path = self._reached(read, straight_through=False)
        if names := [name for name in chosen if name not in rounded]:
            made = {value for node in path for value in node.outputs}
            choosing = dict.fromkeys(node.op_type for node in choices if made.intersection(node.inputs))
            yield Hint(_not_trained(names, choosing))

    def of_outputs(
        self, ends: Sequence[str], others: Sequence[str], *, straight_through: bool, chosen: bool, named: bool
    ) -> Iterator[Hint]:
        """Name those of outputs without a loss, and such outputs where losses are given by name.

        ``chosen`` if the caller chose the only output with a loss, ``named`` if losses are given by output.
        """
        names, path = self._reached(others, straight_through=straight_through)
        if names:
            outputs = [name for name in others if any(value.name == name for node in path for value in node.outputs)]
            one = len(names) == 1
            yield Hint(
                f"No loss reads {listed(outputs)}, so that {listed(names)} {'is' if one else 'are'} not trained. "
                f'loss={{output: loss, ...}} trains several outputs, and freeze="{names[0]}" keeps '
                f"{'it' if one else 'the first'} without this hint.",
                surprising=not chosen,
            )
        elif named and (outputs := [name for name in others if self._is_beside(name, ends)]):
            yield Hint(f"No loss reads {listed(outputs)}; loss={{output: loss, ...}} takes one for each.")

    def _is_beside(self, output: str, ends: Sequence[str]) -> bool:
        """Return whether an output is neither computed from values with a loss nor the other way round."""
        forward, own, ys = Forward.of(self._model), self._values([output]), self._values(ends)
        return not forward.path(Route(ys, own)) and not forward.path(Route(own, ys))

    def _reached(self, ends: Sequence[str], *, straight_through: bool) -> tuple[list[str], list[ir.Node]]:
        """Return the parameters that a gradient of some values reaches, and its path."""
        ys = self._values(ends) if self._lost else ()
        if not ys:
            return [], []
        forward = Forward.of(self._model, straight_through=straight_through)
        if not (path := forward.path(Route(ys, tuple(self._lost.values())))):
            return [], []
        read = {str(value.name) for node in path for value in node.inputs if value is not None}
        others = [name for name in self._model.graph.initializers if name not in self._lost or name not in read]
        copy = self._model.clone()  # the table expands functions
        rows = parameter_table(
            copy,
            [value for node in copy.graph for value in node.outputs if value.name in ends],
            train=self._train,
            freeze=[*self._freeze, *map(escape, others)],
            straight_through=straight_through,
        )
        names = [row.name for row in rows if row.trainable and row.name in self._lost]
        return names, forward.path(Route(ys, tuple(self._lost[name] for name in names)))

    def _values(self, names: Sequence[str]) -> tuple[ir.Value, ...]:
        return tuple(value for node in self._model.graph for value in node.outputs if value.name in names)


def _not_trained(names: Sequence[str], operators: Iterable[str]) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'} not trained: no gradient passes {listed(operators)}."
