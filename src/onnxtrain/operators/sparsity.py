"""Sparsity promotion: a scale for the step of every weight of a layer.

Any update rule promotes sparsity if ``R * scale``, float64 and elementwise, replaces its learning rate R. SSGD is plain
gradient descent or momentum with this scale. The update is scaled, not the gradient: under Adam a constant scale of the
gradient would cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnxtrain.errors import OperatorError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.operators.arithmetic import Tensor, Wide, where
from onnxtrain.operators.measures import Measure, measure

SMALLEST_MEAN = float(np.finfo(np.float64).tiny)


class Layer(NamedTuple):
    """The weights w of a layer (one variable) in relative form: 1 / f'(z) = factor * h.

    Attributes:
        measure: The measure that defines them.
        h: One value per weight; finite even if ``factor`` overflows.
        factor: One value for the layer.
        inverse_mean: 1 / mean of h (ℓ2) or h² (ℓ1); 0 for a layer of absorbing zeros.
        norms: With blocks under ℓ1, the root mean square of the block of each weight.
    """

    measure: Measure
    h: Wide
    factor: Wide | float
    inverse_mean: Wide
    norms: Wide | None = None

    @classmethod
    def of(cls, X: Tensor, measure: Measure, block: Sequence[int] = ()) -> Layer:
        """Compute the weights w of a variable in float64; with blocks, one w for each block."""
        z = measure.argument(X.wide(), block)
        h, factor = measure.inverse_derivative(z)
        squares = h * h if measure.reweighting == "l1" else h
        mean = np.sum(squares) / X.count()
        norms = z if block and measure.reweighting == "l1" else None
        return cls(measure, h, factor, where(mean < SMALLEST_MEAN, 0.0, 1 / mean), norms)

    def scale(self, max_scale: float = 0.0) -> Wide:
        """Compute s = w² / mean(w²), at most ``max_scale`` if that is above 0."""
        squares = self.h * self.h if self.measure.reweighting == "l1" else self.h
        s = squares * self.inverse_mean
        capped: Wide = np.minimum(s, max_scale) if max_scale > 0 else s
        return capped

    def shrinkage(self, X: Tensor, rate: Wide) -> Tensor:
        """Compute the step of the regularization.

        It is 2 rate X / mean(w²) for ℓ2, and rate w sign(X) / mean(w²) for ℓ1, where X over the root mean square of
        its block takes the place of sign(X).
        """
        common = rate * self.inverse_mean / self.factor
        if self.measure.reweighting == "l2":
            off: Tensor = 2 * common * X
        elif self.norms is None:
            off = common * self.h * np.sign(X)
        else:
            off = where(self.norms > 0, common * self.h / self.norms, 0.0) * X
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
        block: (outputs, inputs) of a block of a weight matrix; see :class:`onnxtrain.SSGD`.

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
    block: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", block_of("Sparsity", self.block))
        try:
            self.resolve()
        except OperatorError as error:
            raise OptionError(str(error)) from None
        if not 0 <= self.max_scale < float("inf"):
            raise OptionError(f"Sparsity: max_scale is {self.max_scale!r}, but must be a finite number, 0 or more.")

    def resolve(self) -> Measure:
        """Return the measure."""
        return measure(self.measure, reweighting=self.reweighting, epsilon=self.epsilon, p=self.p)

    def apply(self, X: Tensor, step: Tensor, block: Sequence[int] = ()) -> Tensor:
        """Return X + s * step for one layer, on arrays or graph values.

        Args:
            X: The layer.
            step: The update.
            block: The size of a block along each axis of X; by default blocks of one weight.
        """
        moved: Tensor = X + Layer.of(X, self.resolve(), block).scale(self.max_scale) * step
        return moved


def block_of(label: str, block: object) -> tuple[int, int]:
    """Return a block as (outputs, inputs)."""
    pair = tuple(block) if isinstance(block, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in pair):
        raise OptionError(
            f"{label}: block is {block!r}; it needs two integers of at least 1, the outputs and the inputs of a block, "
            "such as (4, 1)."
        ).about("block", got=block)
    return pair[0], pair[1]
