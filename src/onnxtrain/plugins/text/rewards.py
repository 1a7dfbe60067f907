"""Metrics of preferences by TRL's names: rewards of chosen and rejected answers, their margins and accuracies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import OptionError
from onnxtrain.metrics.base import LossMetric, MetricInput, NamedMetric

_State = tuple[float, float, float, float, float]
"""Sums of the chosen and the rejected rewards, their counts, and the number of pairs in the right order."""


def reward_metric(metric_input: MetricInput, name: str) -> NamedMetric:
    """Return a metric of rewards for a loss."""
    rewards = metric_input.rewards
    if rewards is None:
        raise OptionError(
            f"The metric {name} is for preferences, but the loss {metric_input.loss} has no rewards; it goes with dpo, "
            "orpo, kto and reward."
        )
    if name == "rewards/accuracies" and not metric_input.pairs:
        raise OptionError(
            f"The metric {name} compares the answers of a pair, but the loss {metric_input.loss} has single ones; "
            "measure rewards/margins."
        )
    return NamedMetric(name, lambda y_true, y_pred: _measured(*rewards(y_true, y_pred)), _added, _VALUES[name])


def _measured(chosen: Array, rejected: Array) -> _State:
    right = float(np.count_nonzero(chosen > rejected)) if len(chosen) == len(rejected) else 0.0
    return float(chosen.sum()), float(rejected.sum()), float(len(chosen)), float(len(rejected)), right


def _added(one: _State, other: _State) -> _State:
    first, second, third, fourth, fifth = (a + b for a, b in zip(one, other, strict=True))
    return first, second, third, fourth, fifth


def _mean(total: float, count: float) -> float:
    return total / count if count else float("nan")


_VALUES: Final[dict[str, Callable[[_State], float]]] = {
    "rewards/chosen": lambda state: _mean(state[0], state[2]),
    "rewards/rejected": lambda state: _mean(state[1], state[3]),
    "rewards/margins": lambda state: _mean(state[0], state[2]) - _mean(state[1], state[3]),
    "rewards/accuracies": lambda state: _mean(state[4], state[2]),
}

CHOSEN, REJECTED, MARGINS, ACCURACIES = (LossMetric(functools.partial(reward_metric, name=name)) for name in _VALUES)
"""Mean reward of chosen and of rejected answers, their difference, and the share of pairs in which the chosen one has
the higher reward."""
