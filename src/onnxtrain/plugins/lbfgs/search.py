"""BFGS over the parameters of a trainer, with limited memory or with the whole inverse Hessian."""

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

MOST_PARAMETERS = 20_000
"""Parameters whose whole inverse Hessian is kept: 3.2 GB of float64."""


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
    history: int | None = 50,
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
        history: Number of earlier steps from which the inverse Hessian is approximated. None keeps all of it, N x N
            numbers for N parameters, and updates it by the self-scaled Broyden formula: far fewer steps for solutions
            of equations, where the curvatures differ by many orders of magnitude.
        tolerance: End where no element of the gradient is larger.
        progress: Called after each step with its number and the loss.

    Returns:
        Loss, numbers of steps and evaluations, and why it ended.

    Raises:
        OptionError: An argument is outside its range, the trainer has masks, or too many parameters for the whole
            inverse Hessian.

    Source:
        J. Nocedal, S. Wright, "Numerical Optimization", algorithms 7.4 and 3.5. M. Al-Baali, E. Spedicato, F.
        Maggioni, "Broyden's quasi-Newton methods for a nonlinear system of equations and unconstrained optimization",
        2014, by J. Urbán, P. Stefanou, J. Pons, "Unveiling the optimization process of physics informed neural
        networks", 2025.

    Example:
        >>> import numpy as np
        >>> import onnxtrain
        >>> x = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
        >>> trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((1, 8, 1), activation="tanh"), loss="mse")
        >>> onnxtrain.lbfgs.minimize(trainer, x, x**3, steps=200).loss < 1e-4
        True
    """
    for name, value, least in (("steps", steps, 1), ("history", history, 1), ("tolerance", tolerance, 0)):
        if value is not None and not value >= least:
            raise OptionError(f"{name} is {value!r}; minimize needs a number of at least {least}.")
    if trainer.masks:
        raise OptionError("The trainer has masks, which minimize does not keep; train it with fit.")
    start = {name: np.array(array) for name, array in trainer.parameters.items()}
    x = np.concatenate([array.reshape(-1) for array in start.values()]).astype(np.float64)
    if history is None and x.size > MOST_PARAMETERS:
        raise OptionError(
            f"history is None, but the trainer has {x.size} parameters; minimize keeps the whole inverse Hessian of at "
            f"most {MOST_PARAMETERS}: give a number of steps."
        )
    search = _Search(_gradients(trainer, (inputs, targets, sample_weight), start), x, history)
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


class _Steps:
    """The inverse Hessian of L-BFGS: the last steps, with the changes of the gradient along them."""

    def __init__(self, history: int) -> None:
        self._pairs: deque[tuple[Vector, Vector]] = deque(maxlen=history)
        self.clear = self._pairs.clear

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, moved: Vector, turned: Vector, _: float) -> None:
        """Take a step."""
        self._pairs.append((moved, turned))

    def direction(self, gradient: Vector) -> Vector:
        """Return minus the approximated inverse Hessian times the gradient (two-loop recursion)."""
        q, shares = gradient.copy(), []
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


class _Matrix:
    """The whole inverse Hessian H, by the self-scaled Broyden update.

    ::

        H' = (H - H y y^T H / y^T H y + phi v v^T) / tau + s s^T / s^T y,  v = sqrt(y^T H y) (s / s^T y - H y / y^T H y)

    for a step s that changes the gradient by y. BFGS has phi and tau of 1.
    """

    def __init__(self) -> None:
        self._h: np.ndarray[Any, np.dtype[np.float64]] | None = None
        self._scale: float | None = None

    def __bool__(self) -> bool:
        return self._h is not None

    def clear(self) -> None:
        """Forget all but the scale."""
        self._h = None

    def add(self, s: Vector, y: Vector, curvature: float) -> None:
        """Take a step, and s^T B s for the Hessian B before it."""
        sy, tau, phi = float(s @ y), 1.0, 1.0
        self._scale = scale = sy / float(y @ y)
        if self._h is None:
            self._h = np.eye(len(s)) * scale
            hy = self._h @ y
            yhy = float(y @ hy)
        else:
            hy = self._h @ y
            yhy = float(y @ hy)
            if not yhy > 0:  # rounded away
                self.clear()
                return
            tau, phi = _scaled(curvature / sy, yhy / sy, len(s))
        v = np.sqrt(yhy) * (s / sy - hy / yhy)
        self._h /= tau
        self._h += np.stack([hy, v, s], 1) @ np.stack([-hy / (yhy * tau), v * (phi / tau), s / sy])

    def direction(self, gradient: Vector) -> Vector:
        """Return minus H times the gradient."""
        if self._h is not None:
            return -(self._h @ gradient)
        return -gradient * (self._scale or 1 / max(np.abs(gradient).sum(), 1e-300))


def _scaled(b: float, h: float, size: int) -> tuple[float, float]:
    """Return tau and phi of the self-scaled Broyden update, for s^T B s / s^T y and y^T H y / s^T y."""
    a = max(b * h - 1, 1e-300)
    rho = min(1.0, 1 / (b * (1 + np.sqrt(a / (1 + a)))))
    theta = max((rho - 1) / a, min(1 / rho, (1 - b) / b))
    sigma = 1 + theta * a
    root = abs(sigma) ** (1 / (1 - size)) if size > 1 else 1.0
    tau = min(rho * root, sigma) if theta <= 0 else rho * min(root, 1 / theta)
    return float(tau), float((1 - theta) / (1 + a * theta))


class _Search:
    """A point, its loss and gradient, and the inverse Hessian by the steps before it."""

    def __init__(self, function: Function, x: Vector, history: int | None) -> None:
        self._function, self.x = function, x
        self.loss, self.gradient = function(x)
        self.evaluations = 1
        self._inverse = _Matrix() if history is None else _Steps(history)

    def step(self) -> bool:
        """Move to a point of a smaller loss; return False where there is none."""
        while True:
            direction = self._inverse.direction(self.gradient)
            found = self._line_search(direction) if self.gradient @ direction < 0 else None
            if found is not None:
                break
            if not self._inverse:
                return False
            self._inverse.clear()  # and try the gradient itself
        length, loss, gradient = found
        moved, turned = length * direction, gradient - self.gradient
        if moved @ turned > 0:
            self._inverse.add(moved, turned, float(-length * (moved @ self.gradient)))
        self.x, self.loss, self.gradient = self.x + moved, loss, gradient
        return True

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
