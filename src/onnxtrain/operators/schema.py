"""An optimizer operator as data: its attributes, its tensors, and the update rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import OperatorError
from onnxtrain.graph.domains import TRAINING_DOMAIN

Attributes = Mapping[str, Any]
"""Attribute values by name: float32 values (as a file stores them) held in float64, texts, and tuples of integers."""


class Interval(NamedTuple):
    """Interval of the values that an attribute should have."""

    low: float = -math.inf
    high: float = math.inf
    low_included: bool = True
    high_included: bool = False

    def __contains__(self, number: Any) -> bool:  # a tuple's own takes any object
        if not math.isfinite(number):
            return False
        above = number >= self.low if self.low_included else number > self.low
        return bool(above and (number <= self.high if self.high_included else number < self.high))

    def __str__(self) -> str:
        parts = []
        if self.low > -math.inf:
            parts.append(f"{self.low:g} or more" if self.low_included else f"above {self.low:g}")
        if self.high < math.inf:
            parts.append(f"at most {self.high:g}" if self.high_included else f"below {self.high:g}")
        return " and ".join(parts) or "finite"


NOT_NEGATIVE = Interval(0.0)
POSITIVE = Interval(0.0, low_included=False)
FRACTION = Interval(0.0, 1.0)


class Attribute(NamedTuple):
    """One attribute of an operator."""

    name: str
    doc: str
    default: float | str | tuple[int, ...] | None = None
    kind: type[float] | type[str] | type[tuple[int, ...]] = float
    choices: tuple[str, ...] = ()
    sensible: Interval = NOT_NEGATIVE
    familiar: str = ""


class State(NamedTuple):
    """A tensor that an optimizer keeps per variable, of the variable's type and shape."""

    name: str
    doc: str
    initial: float = 0.0
    used: Callable[[Attributes], bool] = lambda attributes: True


Rule = Callable[..., tuple[Any, ...]]
"""``rule(R, T, X, G, *states, **attributes)`` returns X_new and the new states, written as in the specification.

R, T and the number attributes are :class:`~onnxtrain.operators.arithmetic.Wide`, the rest are tensors.
"""


class OptimizerSchema(NamedTuple):
    """Schema of an optimizer operator."""

    name: str
    doc: str
    rule: Rule
    attributes: tuple[Attribute, ...]
    states: tuple[State, ...]
    domain: str = TRAINING_DOMAIN
    version: int = 1
    first_count: int = 0
    counted: bool = True
    details: str = ""
    check: Callable[[Attributes], None] = lambda attributes: None

    def used_states(self, attributes: Attributes) -> tuple[State, ...]:
        """Return the states that the operator has with these (complete) attributes."""
        return tuple(state for state in self.states if state.used(attributes))

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all attributes: the given ones, checked, and the defaults of the others."""
        known = [attribute.name for attribute in self.attributes]
        for name in given:
            if name not in known:
                raise OperatorError(f"{self.name} has no attribute {name!r}; its attributes are {', '.join(known)}.")
        values = {a.name: self._value(a, given.get(a.name)) for a in self.attributes}
        self.check(values)
        return values

    def _value(self, attribute: Attribute, given: Any) -> float | str | tuple[int, ...]:
        label = f"{self.name}: the attribute {attribute.name!r}"
        value = attribute.default if given is None else given
        allowed = f"one of {', '.join(map(repr, attribute.choices))}" if attribute.choices else "a string"
        needed = {float: "a number", tuple: "a list of integers"}.get(attribute.kind, allowed)
        if value is None:
            raise OperatorError(f"{label} is required, but missing; give {needed}.")
        if attribute.kind is float:
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise OperatorError(f"{label} is {value!r}, but must be {needed}.")
            return float(np.float32(value))  # as a file stores it
        if attribute.kind is tuple:
            listed = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
            if not all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in listed):
                raise OperatorError(f"{label} is {value!r}, but must be {needed}.")
            return tuple(map(int, listed))
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str) or (attribute.choices and text not in attribute.choices):
            raise OperatorError(f"{label} is {text!r}, but must be {needed}.")
        return text


ALPHA = Attribute(
    "alpha", "Weight of the old value in the average of the gradient.", sensible=FRACTION, familiar="betas[0]"
)
BETA = Attribute(
    "beta", "Weight of the old value in the average of the squared gradient.", sensible=FRACTION, familiar="betas[1]"
)
PENALTY = Attribute(
    "norm_coefficient", "Adds norm_coefficient * X to the gradient (weight decay).", familiar="weight_decay"
)
MODE = Attribute(
    "mode",
    "Form of momentum that moves the variable.",
    kind=str,
    choices=("standard", "nesterov"),
    familiar="nesterov",
)
AVERAGE = State("V", "The running average of the gradient.")
SQUARES = State("H", "The running average of the squared gradient.")
