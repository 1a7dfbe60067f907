"""Diversity measures: smooth surrogates for the number of non-zero weights, minimized by SSGD.

A measure is a function g(u) = f(z) of a weight u, with z = u² (reweighted ℓ2) or z = |u| (reweighted ℓ1). The
sum of g over a layer approximates the number of its non-zero weights. SSGD scales the step of every weight by
w² / mean(w²):

    w² = 1 / f'(z)    at z = u²   for ℓ2
    w² = 1 / f'(z)²   at z = |u|  for ℓ1

A function is a measure if g is symmetric (a function of z always is), increasing in |u|, finite, and strictly concave
in z (f' decreases strictly).

Measures are written with Python's operators and NumPy's functions, so that the same code runs on arrays and emits
the graph of SSGD's body. Source of the framework: C.-H. Lee, I. Fedorov, B. D. Rao, H. Garudadri, "SSGD:
Sparsity-Promoting Stochastic Gradient Descent Algorithm for Unbiased DNN Pruning", ICASSP 2020.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from onnxtrain.errors import OperatorError


@dataclass(frozen=True)
class Measure(ABC):
    """A measure with its parameters."""

    name: ClassVar[str]
    domain: ClassVar[str] = "epsilon above 0"

    reweighting: str = "l2"
    epsilon: float = 0.01
    p: float = 0.5

    def __post_init__(self) -> None:
        if self.reweighting not in ("l1", "l2"):
            raise OperatorError(f"reweighting is {self.reweighting!r}, but must be 'l1' or 'l2'.").about(
                "reweighting", got=self.reweighting
            )
        self.check()

    def check(self) -> None:
        """Check that the parameters are in the measure's domain."""
        if not (0 < self.epsilon < math.inf):
            raise OperatorError(
                f"The measure {self.name!r} has epsilon {self.epsilon:g}, but needs one above 0 and finite: "
                "at 0 it is not finite or not strictly concave."
            ).about(self.name, got=self.epsilon)

    @abstractmethod
    def value(self, z: Any) -> Any:
        """Compute f(z)."""

    @abstractmethod
    def inverse_derivative(self, z: Any) -> tuple[Any, Any]:
        """Return (h, factor) with factor * h = 1 / f'(z), scaled so that h does not overflow."""

    def derivative(self, z: Any) -> Any:
        """Compute f'(z)."""
        h, factor = self.inverse_derivative(z)
        return 1 / (factor * h)

    def of(self, u: ArrayLike) -> np.ndarray:
        """Compute g(u)."""
        with np.errstate(all="ignore"):
            return np.asarray(self.value(self.argument(np.asarray(u, dtype=np.float64))))

    def argument(self, u: Any, block: Sequence[int] = ()) -> Any:
        """Compute z from u."""
        if block:
            squares = (u * u).block_means(block)
            return np.sqrt(squares) if self.reweighting == "l1" else squares
        return np.absolute(u) if self.reweighting == "l1" else u * u

    def squared_weight(self, u: ArrayLike) -> np.ndarray:
        """Compute w² elementwise."""
        with np.errstate(all="ignore"):
            h, factor = self.inverse_derivative(self.argument(np.asarray(u, dtype=np.float64)))
            inverse = np.asarray(factor * h)
            return inverse * inverse if self.reweighting == "l1" else inverse


class LogSum(Measure):
    """f(z) = log(z + ε): w² = u² + ε for ℓ2, w = |u| + ε for ℓ1.

    Source: E. J. Candès, M. B. Wakin, S. P. Boyd, "Enhancing Sparsity by Reweighted ℓ1 Minimization", Journal of
    Fourier Analysis and Applications 14, 2008.

    Example:
        >>> LogSum(epsilon=0.5).squared_weight([0.0, 1.0])
        array([0.5, 1.5])
    """

    name = "log-sum"

    def value(self, z: Any) -> Any:  # noqa: D102 (documented by the base class)
        return np.log(z + self.epsilon)

    def inverse_derivative(self, z: Any) -> tuple[Any, Any]:  # noqa: D102
        return z + self.epsilon, 1.0


class PNorm(Measure):
    """f(z) = z^(p/2) for ℓ2, z^p for ℓ1: g(u) = |u|^p; w² = (2/p) |u|^(2−p) for ℓ2, w = (1/p) |u|^(1−p) for ℓ1.

    Source: B. D. Rao, K. Kreutz-Delgado, "An Affine Scaling Methodology for Best Basis Selection", IEEE
    Transactions on Signal Processing 47, 1999.

    Example:
        >>> PNorm(p=1.0).squared_weight([0.0, 3.0])
        array([0., 6.])
    """

    name = "p-norm"
    domain = "0 < p ≤ 2 for l2, 0 < p ≤ 1 for l1"

    @property
    def exponent(self) -> float:
        """The power of z in f."""
        return self.p if self.reweighting == "l1" else self.p / 2

    def check(self) -> None:  # noqa: D102
        if not 0 < self.exponent <= 1:
            largest = 1 if self.reweighting == "l1" else 2
            raise OperatorError(
                f"The measure 'p-norm' has p {self.p:g}, but with reweighting {self.reweighting!r} needs one above "
                f"0 and at most {largest} ({largest} is plain gradient descent): beyond, it is not concave."
            )

    def value(self, z: Any) -> Any:  # noqa: D102
        return z**self.exponent

    def inverse_derivative(self, z: Any) -> tuple[Any, Any]:  # noqa: D102
        return z ** (1 - self.exponent), 1 / self.exponent


class Arctan(Measure):
    """f(z) = atan(z / ε): w² = (u⁴ + ε²) / ε for ℓ2, w = (u² + ε²) / ε for ℓ1.

    Source: I. W. Selesnick, I. Bayram, "Sparse Signal Estimation by Maximally Sparse Convex Optimization", IEEE
    Transactions on Signal Processing 62, 2014.
    """

    name = "arctan"

    def value(self, z: Any) -> Any:  # noqa: D102
        return np.arctan(z / self.epsilon)

    def inverse_derivative(self, z: Any) -> tuple[Any, Any]:  # noqa: D102
        return z * z + self.epsilon**2, 1 / self.epsilon


class GemanMcClure(Measure):
    """f(z) = z / (z + ε): w² = (u² + ε)² / ε for ℓ2, w = (|u| + ε)² / ε for ℓ1.

    Source: S. Geman, D. E. McClure, "Statistical Methods for Tomographic Image Reconstruction", Bulletin of the
    International Statistical Institute 52, 1987.
    """

    name = "geman-mcclure"

    def value(self, z: Any) -> Any:  # noqa: D102
        return z / (z + self.epsilon)

    def inverse_derivative(self, z: Any) -> tuple[Any, Any]:  # noqa: D102
        return (z + self.epsilon) * (z + self.epsilon), 1 / self.epsilon


class Exponential(Measure):
    """f(z) = 1 − e^(−z/ε): w² = ε e^(u²/ε) for ℓ2, w = ε e^(|u|/ε) for ℓ1.

    Aggressive: w² grows exponentially, so with a small ε only the few largest weights of a layer move. Use it with
    ``max_scale``. The scale is computed relative to the largest weight and never overflows.

    Source: P. S. Bradley, O. L. Mangasarian, "Feature Selection via Concave Minimization and Support Vector
    Machines", ICML 1998.
    """

    name = "exponential"

    def value(self, z: Any) -> Any:  # noqa: D102
        return 1 - np.exp(-z / self.epsilon)

    def inverse_derivative(self, z: Any) -> tuple[Any, Any]:  # noqa: D102
        largest = np.max(z, initial=0.0)
        return np.exp((z - largest) / self.epsilon), self.epsilon * np.exp(largest / self.epsilon)


class Tanh(Measure):
    """f(z) = tanh(z / ε): w² = ε cosh²(u²/ε) for ℓ2, w = ε cosh²(|u|/ε) for ℓ1.

    As aggressive as the exponential measure with twice the exponent; use it with ``max_scale``, too. The scale
    is computed relative to the largest weight, through cosh²(t) = e^(2t) (1 + e^(−2t))² / 4, and never overflows.

    Source: tanh meets the conditions of the framework (Lee et al. 2020).
    """

    name = "tanh"

    def value(self, z: Any) -> Any:  # noqa: D102
        return np.tanh(z / self.epsilon)

    def inverse_derivative(self, z: Any) -> tuple[Any, Any]:  # noqa: D102
        largest = np.max(z, initial=0.0)
        folded = 1 + np.exp(-2 * (z / self.epsilon))
        h = np.exp(2 * ((z - largest) / self.epsilon)) * (folded * folded)
        return h, 0.25 * self.epsilon * np.exp(2 * (largest / self.epsilon))


BUILT_IN: dict[str, type[Measure]] = {
    measure.name: measure for measure in (LogSum, PNorm, Arctan, GemanMcClure, Exponential, Tanh)
}
"""The built-in measures; the native kernels implement all of them."""

_PAST_THE_KNEE = "it is not strictly concave: f' is 0 past its knee, where w would be infinite"
REFUSED = {"mcp": _PAST_THE_KNEE, "scad": _PAST_THE_KNEE, "capped-l1": _PAST_THE_KNEE}
"""Penalties from the literature that are not measures, with the condition that each violates."""

_registered: dict[str, type[Measure]] = {}


def measure(name: str, *, reweighting: str = "l2", epsilon: float = 0.01, p: float = 0.5) -> Measure:
    """Return the measure with this name and these parameters.

    Example:
        >>> measure("arctan", reweighting="l1", epsilon=1.0).squared_weight([2.0])
        array([25.])
    """
    known = BUILT_IN | _registered
    if name in known:
        return known[name](reweighting, epsilon, p)
    if name in REFUSED:
        raise OperatorError(f"{name!r} cannot be a measure: {REFUSED[name]}; use 'log-sum' or 'p-norm'.")
    raise OperatorError(
        f"There is no measure {name!r}; there are {', '.join(map(repr, known))}, and more can be registered with "
        "onnxtrain.operators.measures.register_measure."
    ).about(name, wanted=known)


def register_measure(name: str, function: Any, *, largest: float = 10.0) -> None:
    """Register a custom measure, which the attribute ``measure`` of SSGD then accepts by name.

    It runs in NumPy and as a body of standard operators; native kernels implement the built-in measures only.

    Example:
        >>> register_measure("cauchy", lambda z: 1 / (1 + z))
        >>> measure("cauchy").squared_weight([0.0, 2.0])
        array([1., 5.])
        >>> unregister_measure("cauchy")
    """
    if name in BUILT_IN or name in REFUSED or name in _registered:
        raise OperatorError(f"There is a measure {name!r} already; choose another name.").about(name)
    derivative = getattr(function, "derivative", function)
    value = getattr(function, "value", None)
    check_conditions(name, derivative, value, largest=largest)
    own = {
        "name": name,
        "domain": "none",
        "__doc__": getattr(function, "__doc__", None),
        "check": lambda self: None,
        "inverse_derivative": lambda self, z: (1 / derivative(z), 1.0),
        "derivative": lambda self, z: derivative(z),
        "value": lambda self, z: _no_value(name) if value is None else value(z),
    }
    _registered[name] = type(f"Registered {name}", (Measure,), own)


def unregister_measure(name: str) -> None:
    """Remove a measure that :func:`register_measure` added."""
    _registered.pop(name, None)


def check_conditions(
    name: str,
    derivative: Callable[[Any], Any],
    value: Callable[[Any], Any] | None = None,
    *,
    largest: float = 10.0,
) -> None:
    """Check numerically that f is increasing, finite and strictly concave; symmetry holds by construction."""
    grid = np.linspace(0.0, largest, 201)[1:]
    with np.errstate(all="ignore"):
        slope = np.broadcast_to(np.asarray(derivative(grid), dtype=np.float64), grid.shape)
        tiny = np.asarray([1e-200, 1e-150])
        area = tiny * np.abs(np.broadcast_to(np.asarray(derivative(tiny), dtype=np.float64), tiny.shape))
        at_zero = np.float64(0.0) if value is None else np.float64(value(np.float64(0.0)))
    label = f"{name!r} cannot be a measure"
    broken = ~np.isfinite(slope)
    if broken.any():
        raise OperatorError(f"{label}: it is not finite: f'({grid[broken][0]:g}) is {slope[broken][0]}.")
    # If f is finite at 0, the area under f' between z and 2z vanishes as z goes to 0.
    if not np.isfinite(at_zero) or not area[0] < area[1]:
        raise OperatorError(f"{label}: it is not finite: f(z) has no limit as z goes to 0.").about(label)
    flat = ~(slope > 0)
    if flat.any():
        raise OperatorError(
            f"{label}: it is not increasing: f'({grid[flat][0]:g}) is {slope[flat][0]:g}, so that w would be "
            "infinite or undefined; where f' only underflows, check a smaller range with largest=."
        )
    rising = ~(slope[1:] < slope[:-1])
    if rising.any():
        at = int(np.argmax(rising))
        raise OperatorError(
            f"{label}: it is not strictly concave: f' does not fall between {grid[at]:g} and {grid[at + 1]:g} "
            f"({slope[at]:g}, {slope[at + 1]:g})."
        )


def _no_value(name: str) -> Any:
    raise OperatorError(f"The measure {name!r} was registered by f' alone; register an object with value(z), too.")
