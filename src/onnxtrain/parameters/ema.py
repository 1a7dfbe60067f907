"""The option for exponential moving averages of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.lowering.training_info.recipe import Averaging
from onnxtrain.lowering.training_info.update import AVERAGE


@checks_arguments
@dataclass(frozen=True)
class EMA(Averaging):
    """Exponential moving average A of every parameter X: A_new = d A + (1 - d) X_new.

    After the first update A is X, as in ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``.
    The step graph computes it, at the cost of the memory of A and the time to read X and A and to write A. Running
    statistics of batch normalization are not averaged.

    Args:
        decay: d, in [0, 1); 0.999 and 0.9999 are usual.
        start: Number of updates with A = X (d = 0) before the average begins.
        warmup: True if d is min(decay, (1 + n) / (10 + n)) at update n, counted from 1, so that early weights are
            forgotten sooner (as in TensorFlow with ``num_updates``).

    Raises:
        OptionError: A value is outside its range.

    Example:
        >>> import numpy as np
        >>> import onnxtrain
        >>> model = onnxtrain.examples.mlp((4, 3))
        >>> trainer = onnxtrain.Trainer(model, loss="mse", ema=onnxtrain.EMA(0.99, warmup=True))
        >>> loss = trainer.train_step(np.ones((2, 4)), np.zeros((2, 3)))
        >>> trainer.evaluate(np.ones((2, 4)), np.zeros((2, 3)), ema=True).keys()
        dict_keys(['loss'])
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 <= self.decay < 1:
            raise OptionError(f"ema: decay is {self.decay!r}, but must be a number, 0 or more and below 1.")
        if isinstance(self.start, bool) or not isinstance(self.start, int) or self.start < 0:
            raise OptionError(f"ema: start is {self.start!r}, but must be a number of updates, 0 or more.")


def choose_ema(ema: float | EMA | None) -> EMA | None:
    """Resolve the option: a decay, or an object."""
    return ema if ema is None or isinstance(ema, EMA) else EMA(ema)


def average_name(parameter: str) -> str:
    """Return the name of the state that holds the moving average of a parameter."""
    return f"{parameter}/{AVERAGE}"
