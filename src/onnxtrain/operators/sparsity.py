"""Sparsity promotion: a scale for the step of every weight of a layer.

Any update rule promotes sparsity if ``R * scale``, float64 and elementwise, replaces its learning rate R. SSGD is plain
gradient descent or momentum with this scale. The update is scaled, not the gradient: under Adam a constant scale of the
gradient would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnxtrain.errors import OperatorError, OptionError
from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.operators.measures import Measure, measure
from onnxtrain.spelling import checks_arguments

SMALLEST_MEAN = float(np.finfo(np.float64).tiny)


class Layer(NamedTuple):
    """The weights w of a layer (one variable) in relative form: 1 / f'(z) = factor * h.

    Attributes:
        measure: The measure that defines them.
        h: One value per weight; finite even if ``factor`` overflows.
        factor: One value for the layer.
        inverse_mean: 1 / mean of h (ℓ2) or h² (ℓ1); 0 for a layer of absorbing zeros.
    """

    measure: Measure
    h: Wide
    factor: Wide | float
    inverse_mean: Wide

    @classmethod
    def of(cls, X: Tensor, measure: Measure) -> Layer:
        """Compute the weights w of a variable in float64."""
        h, factor = measure.inverse_derivative(measure.argument(X.wide()))
        squares = h * h if measure.reweighting == "l1" else h
        mean = np.sum(squares) / X.count()
        return cls(measure, h, factor, where(mean < SMALLEST_MEAN, 0.0, 1 / mean))

    def scale(self, max_scale: float = 0.0) -> Wide:
        """Compute s = w² / mean(w²), at most ``max_scale`` if that is above 0."""
        squares = self.h * self.h if self.measure.reweighting == "l1" else self.h
        s = squares * self.inverse_mean
        capped: Wide = np.minimum(s, max_scale) if max_scale > 0 else s
        return capped

    def shrinkage(self, X: Tensor, rate: Wide) -> Tensor:
        """Compute the step of the regularization: 2 rate X / mean(w²) for ℓ2, rate w sign(X) / mean(w²) for ℓ1."""
        common = rate * self.inverse_mean / self.factor
        off: Tensor = common * self.h * np.sign(X) if self.measure.reweighting == "l1" else 2 * common * X
        return off


@checks_arguments
@dataclass(frozen=True)
class Sparsity:
    """Sparsity promotion for an update rule: ``Adam(sparsity=Sparsity())``, ``Momentum(sparsity=Sparsity())``.

    With the update D of the rule and the scale s of SSGD::

        X_new = X + s * D        s = min(w² / mean(w²), max_scale)

    The update is scaled, not the gradient: under Adam a constant scale of the gradient cancels. Weight decay that is
    added to the gradient is part of D; Adam's ``norm_coefficient_post`` applies after the scaling.

    Args:
        measure: "log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh", or a registered one.
        reweighting: "l2" or "l1".
        epsilon: Parameter of all measures except "p-norm", above 0.
        p: Parameter of "p-norm", in (0, 2] for l2, (0, 1] for l1.
        max_scale: Largest s; 0 is no limit.

    Raises:
        OptionError: The measure is unknown, or a parameter is out of its range.

    Example:
        >>> import numpy as np
        >>> x, step = np.array([1.0, 3.0]), np.array([-0.1, -0.1])
        >>> Sparsity(measure="p-norm", p=1.0).apply(Tensor(x), Tensor(step)).data  # s = |x| / 2
        array([0.95, 2.85])
    """

    measure: str = "log-sum"
    reweighting: str = "l2"
    epsilon: float = 0.01
    p: float = 0.5
    max_scale: float = 0.0

    def __post_init__(self) -> None:
        try:
            self.resolve()
        except OperatorError as error:
            raise OptionError(str(error)) from None
        if not 0 <= self.max_scale < float("inf"):
            raise OptionError(f"Sparsity: max_scale is {self.max_scale!r}, but must be a finite number, 0 or more.")

    def resolve(self) -> Measure:
        """Return the measure."""
        return measure(self.measure, reweighting=self.reweighting, epsilon=self.epsilon, p=self.p)

    def apply(self, X: Tensor, step: Tensor) -> Tensor:
        """Return X + s * step for one layer, on arrays or graph values."""
        moved: Tensor = X + Layer.of(X, self.resolve()).scale(self.max_scale) * step
        return moved
