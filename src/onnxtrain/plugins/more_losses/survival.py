"""Survival times: the partial likelihood of Cox's model, and the concordance index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxtrain.data.conversion import Array, first_row
from onnxtrain.data.target_checks import Examples, TargetCheck
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import ReducedLoss, TargetKind, known_size, node_rank
from onnxtrain.lowering.training_info.recipe import LossTerms

_FAR = 1e9


@dataclass(frozen=True)
class SurvivalCheck:
    """Rows are a time of at least 0, and 1 for an event or 0 for the end of the observation."""

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """Raise a `DataError` that names the first example with an invalid value."""
        wrong = np.stack([targets[:, 0] < 0, ~np.isin(targets[:, 1], (0, 1))], 1)
        if wrong.any():
            row = first_row(wrong)
            raise DataError(
                f"{what} has ({float(targets[row, 0]):.6g}, {float(targets[row, 1]):.6g}) at example "
                f"{int(examples[row])}, but cox needs a time of at least 0, and 1 for an event or 0 for the end of the "
                "observation."
            )


@checks_arguments
@dataclass(frozen=True)
class Cox(ReducedLoss):
    """Negative log partial likelihood of Cox's proportional hazards, for log hazards y [N] or [N, 1].

    Targets [N, 2] are the time and the event: 1, or 0 where only the observation ended (censored). The mean over the
    events i of::

        log sum of exp(y_j) over the j at risk, t_j >= t_i  -  y_i

    Equal times are Breslow's form. The examples of a batch are compared with each other, within a micro-batch only: use
    large batches. With ``sample_weight``, the terms of i and of j have their weights.

    Source:
        D. Cox, "Regression models and life-tables", 1972; J. Katzman et al., "DeepSurv", 2018.
    """

    name: ClassVar[str] = "cox"

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N, 2]: times and events."""
        rank = node_rank(prediction)
        if rank > 2 or (rank == 2 and known_size(prediction, 1) not in (None, 1)):
            raise OptionError(
                f"cox needs one log hazard per example, [batch] or [batch, 1], but {prediction.name!r} has the shape "
                f"{prediction.shape}."
            )
        return ((prediction.shape or (None,))[0], 2)

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check times and events."""
        return SurvivalCheck()

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss; 0 for a batch without an event."""
        rows = (prediction.shape or (None,))[:1]
        hazard = op.reshape(prediction, [-1], known=rows)
        time, event = (op.Gather(target, op.constant(column), axis=1).with_shape(rows) for column in (0, 1))
        share, counted = hazard, event
        if weights is not None:
            some = op.binary("Greater", weights, 0)
            share = op.Where(some, hazard + op.Log(op.Where(some, weights, op.ones_like(weights))), hazard - _FAR)
            counted = event * weights
        at_risk = op.GreaterOrEqual(op.Unsqueeze(time, op.ints(0)), op.Unsqueeze(time, op.ints(1)))  # [i, j]
        others = (1.0 - op.cast(at_risk, hazard.dtype)) * _FAR
        total = op.ReduceLogSumExp(op.Unsqueeze(share, op.ints(0)) - others, op.ints(1), keepdims=0)
        terms = (total.with_shape(rows) - hazard) * counted
        count = op.ReduceSum(event, keepdims=0).with_shape(())
        return LossTerms((op.ReduceSum(terms, keepdims=0) / op.Max(count, 1.0)).with_shape(()), count)


def concordance_index(y_true: Array, y_pred: Array) -> float:
    """Return the share of comparable pairs whose predicted log hazards have the order of their times.

    A pair is comparable if the shorter of its times ended in an event; equal predictions count one half. 0.5 is chance.
    NaN where no pair is comparable. As ``lifelines.utils.concordance_index`` of -y_pred where times differ.

    >>> concordance_index(np.array([[1, 1], [2, 0], [3, 1]]), np.array([0.5, 0.1, 0.2]))
    1.0
    """
    time, event, hazard = y_true[:, 0], y_true[:, 1] > 0, np.asarray(y_pred, np.float64).reshape(-1)
    pairs = event[:, None] & (time[:, None] < time[None, :])
    apart = hazard[:, None] - hazard[None, :]
    good = np.where(apart > 0, 1.0, np.where(apart == 0, 0.5, 0.0))
    return float(good[pairs].mean()) if pairs.any() else float("nan")
