"""Sparsity promotion: how much of its step every weight of a layer takes.

A learning rate multiplied by the scale makes any update rule promote sparsity: ``R * scale`` is float64 and takes
the place of R, element by element, and the rule does not change. SSGD is this on plain gradient descent and on
momentum. The update is scaled, not the gradient: under Adam a constant scale of the gradient would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.pruning.measures import Measure

SMALLEST_MEAN = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Layer:
    """The weights w of a layer (one variable) in relative form: 1 / f'(z) = factor * h.

    Attributes:
        measure: The measure that they come from.
        h: Per weight.
        factor: One for all; where it is infinite, h is not.
        inverse_mean: 1 / mean of h (ℓ2) or h² (ℓ1), 0 for a layer of absorbing zeros.
    """

    measure: Measure
    h: Wide
    factor: Wide | float
    inverse_mean: Wide

    @classmethod
    def of(cls, X: Tensor, measure: Measure) -> Layer:
        """The weights of a variable, computed in float64."""
        h, factor = measure.inverse_derivative(measure.argument(X.wide()))
        squares = h * h if measure.reweighting == "l1" else h
        mean = np.sum(squares) / X.count()
        return cls(measure, h, factor, where(mean < SMALLEST_MEAN, 0.0, 1 / mean))

    def scale(self, max_scale: float = 0.0) -> Wide:
        """s = w² / mean(w²), at most ``max_scale`` where that is above 0."""
        squares = self.h * self.h if self.measure.reweighting == "l1" else self.h
        s = squares * self.inverse_mean
        capped: Wide = np.minimum(s, max_scale) if max_scale > 0 else s
        return capped

    def shrinkage(self, X: Tensor, rate: Wide) -> Tensor:
        """What affine scaling takes off for the regularization: rate 2 X / mean(w²), or rate w sign(X) / mean(w²)."""
        common = rate * self.inverse_mean / self.factor
        off: Tensor = common * self.h * np.sign(X) if self.measure.reweighting == "l1" else 2 * common * X
        return off
