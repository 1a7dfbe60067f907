"""A loss: a class that emits operators."""

from dataclasses import dataclass
from typing import Any, ClassVar

from onnxtrain.losses import ReducedLoss, mean_over


@dataclass(frozen=True)
class Charbonnier(ReducedLoss):
    """Mean over all elements of sqrt(d^2 + 1) - 1, with d = y - t: Charbonnier's smooth absolute error."""

    name: ClassVar[str] = "charbonnier"
    predicts = "numbers"

    def build(self, op: Any, prediction: Any, target: Any, weights: Any = None) -> Any:
        """Emit the loss."""
        difference = (prediction - target).with_shape(prediction.shape)
        return mean_over(op, op.Sqrt(difference * difference + 1.0) - 1.0, prediction, weights)
