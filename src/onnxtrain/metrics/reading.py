"""Match metrics with losses: a metric names the kinds of predictions it accepts, a loss the kind it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from onnxtrain.metrics.base import Counted, PredictionKind

if TYPE_CHECKING:
    from onnxtrain.metrics.error_rates import CharacterErrorRate


class Reading(NamedTuple):
    """The interpretation of the predictions and targets of a loss.

    Attributes:
        loss: the loss's name.
        predicts: what predictions are; None where the loss does not say.
        axis: the axis of the classes.
        ignore_index: a label that does not count.
        probabilities: whether predictions are probabilities over classes instead of logits.
        later: how many places along axis 1 a target stands behind the prediction that is for it.
        sequence: how to read labels in order from scores of steps, where the loss is for these.
    """

    loss: str
    predicts: PredictionKind | None
    axis: int = 1
    ignore_index: int | None = None
    probabilities: bool = False
    later: int = 0
    sequence: CharacterErrorRate | None = None

    @property
    def counted(self) -> Counted:
        """Which predictions a metric counts."""
        return Counted(self.axis, self.ignore_index, self.later)
