"""A loss: a class that emits operators."""

from dataclasses import dataclass
from typing import Any, ClassVar

from onnxtrain.losses import ReducedLoss, mean_over


@dataclass(frozen=True)
class LogCosh(ReducedLoss):
    """Mean over all elements of log(cosh(y - t)), which is y - t + softplus(2 (t - y)) - log(2)."""

    name: ClassVar[str] = "log_cosh"
    predicts = "numbers"

    def build(self, op: Any, prediction: Any, target: Any, weights: Any = None) -> Any:
        """Emit the loss."""
        difference = (prediction - target).with_shape(prediction.shape)
        terms = difference + op.Softplus(difference * -2.0).with_shape(prediction.shape) - 0.6931471805599453
        return mean_over(op, terms, prediction, weights)
