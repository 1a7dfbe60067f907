"""Limited-memory BFGS over the parameters of a trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.operators.rules.momentum import Momentum
from onnxtrain.training.trainer import Trainer

Vector = np.ndarray[Any, np.dtype[np.float64]]
Function = Callable[[Vector], tuple[float, Vector]]

_ENOUGH, _FLAT = 1e-4, 0.9
"""Constants of the strong Wolfe conditions, of Nocedal and Wright."""

_LONGEST = 20
"""Evaluations of a line search."""


@dataclass(frozen=True)
class Point:
    """The end of a minimization.

    Attributes:
        loss: The loss.
        steps: Number of steps.
        evaluations: Number of evaluations of the loss and its gradient.
        reason: Why it ended.
    """

    loss: float
    steps: int
    evaluations: int
    reason: str


@checks_arguments
def minimize(
    trainer: Trainer,
    inputs: Any,
    targets: Any = None,
    sample_weight: Any = None,
    *,
    steps: int = 1000,
    history: int = 50,
    tolerance: float = 0.0,
    progress: Callable[[int, float], object] | None = None,
) -> Point:
    """Minimize the loss of a trainer on one batch by L-BFGS with a strong Wolfe line search; set its parameters.

    The search runs in float64 on the CPU; losses and gradients are those of the step graph, in the model's type: for
    accuracies below 1e-3 give a model in float64. The optimizer of the trainer, its states, clipping and groups do not
    matter. Parameters that are not trained stay as they are. A line search compares losses of one function: give a
    model whose Dropout is off.

    Args:
        trainer: The trainer.
        inputs: The batch, as for ``train_step``; all of the data, since every step sees the same.
        targets: Its targets.
        sample_weight: Weights of its examples.
        steps: Largest number of steps, each of which evaluates the gradient once or a few times.
        history: Number of earlier steps from which the inverse Hessian is approximated.
        tolerance: End where no element of the gradient is larger.
        progress: Called after each step with its number and the loss.

    Returns:
        Loss, numbers of steps and evaluations, and why it ended.

    Raises:
        OptionError: An argument is outside its range, or the trainer has masks.

    Source:
        J. Nocedal, S. Wright, "Numerical Optimization", algorithms 7.4 and 3.5.

    Example:
        >>> import numpy as np
        >>> import onnxtrain
        >>> x = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
        >>> trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((1, 8, 1), activation="tanh"), loss="mse")
        >>> onnxtrain.lbfgs.minimize(trainer, x, x**3, steps=200).loss < 1e-4
        True
    """
    for name, value, least in (("steps", steps, 1), ("history", history, 1), ("tolerance", tolerance, 0)):
        if not value >= least:
            raise OptionError(f"{name} is {value!r}; minimize needs a number of at least {least}.")
    if trainer.masks:
        raise OptionError("The trainer has masks, which minimize does not keep; train it with fit.")
    start = {name: np.array(array) for name, array in trainer.parameters.items()}
    function = _gradients(trainer, (inputs, targets, sample_weight), start)
    x = np.concatenate([array.reshape(-1) for array in start.values()]).astype(np.float64)
    search = _Search(function, x, history)
    taken, reason = 0, f"{steps} steps are done"
    for taken in range(1, steps + 1):
        if np.abs(search.gradient).max(initial=0.0) <= tolerance:
            taken, reason = taken - 1, "no element of the gradient is above the tolerance"
            break
        if not search.step():
            taken, reason = taken - 1, "no step along the gradient makes the loss smaller"
            break
        if progress is not None:
            progress(taken, search.loss)
    trainer.set_weights(dict(_split(search.x, start)))
    return Point(search.loss, taken, search.evaluations, reason)


def _split(x: Vector, like: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Divide one vector into arrays by name."""
    begin = 0
    for name, array in like.items():
        yield name, x[begin : begin + array.size].reshape(array.shape).astype(array.dtype)
        begin += array.size


def _gradients(trainer: Trainer, batch: tuple[Any, ...], like: Mapping[str, np.ndarray]) -> Function:
    """Return the loss and its gradient as a function of all parameters."""
    # Momentum whose average forgets everything: its state is the gradient, and a rate of 0 moves nothing.
    plain = Momentum(learning_rate=0.0, alpha=0.0, beta=1.0, norm_coefficient=0.0, mode="standard")
    copy = trainer.rebuilt(optimizer=plain, sparsify=None, clip_value=None, clip_norm=None, groups=(), ema=None)

    def function(x: Vector) -> tuple[float, Vector]:
        copy.set_weights(dict(_split(x, like)))
        loss = copy.train_step(*batch)
        states = copy.state_dict()
        return loss, np.concatenate([states[f"{name}/V"].reshape(-1) for name in like]).astype(np.float64)

    return function


class _Search:
    """A point, its loss and gradient, and the steps before it."""

    def __init__(self, function: Function, x: Vector, history: int) -> None:
        self._function, self.x = function, x
        self.loss, self.gradient = function(x)
        self.evaluations = 1
        self._pairs: deque[tuple[Vector, Vector]] = deque(maxlen=history)

    def step(self) -> bool:
        """Move to a point of a smaller loss; return False where there is none."""
        while True:
            direction = self._direction()
            found = self._line_search(direction) if self.gradient @ direction < 0 else None
            if found is not None:
                break
            if not self._pairs:
                return False
            self._pairs.clear()  # and try the gradient itself
        length, loss, gradient = found
        moved, turned = length * direction, gradient - self.gradient
        if moved @ turned > 0:
            self._pairs.append((moved, turned))
        self.x, self.loss, self.gradient = self.x + moved, loss, gradient
        return True

    def _direction(self) -> Vector:
        """Return minus the approximated inverse Hessian times the gradient (two-loop recursion)."""
        q, shares = self.gradient.copy(), []
        for s, y in reversed(self._pairs):
            shares.append((s @ q) / (s @ y))
            q -= shares[-1] * y
        if self._pairs:
            s, y = self._pairs[-1]
            q *= (s @ y) / (y @ y)
        else:
            q /= max(np.abs(q).sum(), 1e-300)
        for (s, y), share in zip(self._pairs, reversed(shares), strict=True):
            q += (share - (y @ q) / (s @ y)) * s
        return -q

    def _line_search(self, direction: Vector) -> tuple[float, float, Vector] | None:
        """Return a length with its loss and gradient that fulfils the strong Wolfe conditions, else the best."""
        begin = float(self.gradient @ direction)
        low = (0.0, self.loss, begin, self.gradient)
        high: tuple[float, float, float] | None = None
        length = 1.0
        for _ in range(_LONGEST):
            loss, gradient = self._function(self.x + length * direction)
            self.evaluations += 1
            slope = float(gradient @ direction)
            finite = bool(np.isfinite(loss) and np.isfinite(slope))
            if not finite or loss > self.loss + _ENOUGH * length * begin or (low[0] > 0 and loss >= low[1]):
                high = (length, loss if finite else np.inf, slope)
            elif abs(slope) <= -_FLAT * begin:
                return length, loss, gradient
            else:
                if high is None and slope < 0:
                    low, length = (length, loss, slope, gradient), 2 * length
                    continue
                if high is None or slope * (high[0] - low[0]) >= 0:
                    high = low[:3]
                low = (length, loss, slope, gradient)
            length = _between(low[:3], high)
        return None if low[0] == 0 else (low[0], low[1], low[3])


def _between(low: tuple[float, float, float], high: tuple[float, float, float]) -> float:
    """Return the minimum of the cubic through two points and their slopes, away from the ends; else the middle."""
    (a, loss_a, slope_a), (b, loss_b, slope_b) = low, high
    with np.errstate(all="ignore"):
        first = slope_a + slope_b - 3 * (loss_a - loss_b) / (a - b)
        second = np.copysign(np.sqrt(first * first - slope_a * slope_b), b - a)
        found = float(b - (b - a) * (slope_b + second - first) / (slope_b - slope_a + 2 * second))
    edge = abs(b - a) / 10
    return found if min(a, b) + edge < found < max(a, b) - edge else (a + b) / 2
