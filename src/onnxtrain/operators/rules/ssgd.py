"""SSGD: gradient descent whose steps grow with the magnitude of a weight, so that small weights vanish."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onnxtrain.errors import OperatorError
from onnxtrain.operators.arithmetic import Tensor, Wide
from onnxtrain.operators.measures import BUILT_IN
from onnxtrain.operators.measures import measure as find_measure
from onnxtrain.operators.optimizer import Optimizer, optimizer
from onnxtrain.operators.schema import FRACTION, PENALTY, POSITIVE, Attribute, Attributes, Interval, State
from onnxtrain.operators.sparsity import Layer, block_of


def rule(
    R: Wide,
    T: Wide,
    X: Tensor,
    G: Tensor,
    V: Tensor | None = None,
    *,
    measure: str,
    reweighting: str,
    epsilon: Wide,
    p: Wide,
    regularization: Wide,
    alpha: Wide,
    norm_coefficient: Wide,
    max_scale: Wide,
    block: tuple[int, ...],
) -> tuple[Any, ...]:
    """Update one variable (a layer); returns X_new and, with momentum, V_new."""
    chosen = find_measure(measure, reweighting=reweighting, epsilon=float(epsilon), p=float(p))
    layer = Layer.of(X, chosen, block)
    G_regularized = norm_coefficient * X + G
    direction = G_regularized if V is None else alpha * V + G_regularized
    X_new = X - (R * layer.scale(float(max_scale))) * direction
    if float(regularization) > 0:
        X_new = X_new - layer.shrinkage(X, R * regularization)
    return (X_new,) if V is None else (X_new, direction)


def check(attributes: Attributes) -> None:
    """Raise OperatorError for an unknown measure, parameters outside its domain, or negative settings."""
    find_measure(
        str(attributes["measure"]),
        reweighting=str(attributes["reweighting"]),
        epsilon=float(attributes["epsilon"]),
        p=float(attributes["p"]),
    )
    for name in ("regularization", "alpha", "max_scale"):
        if not float(attributes[name]) >= 0:
            raise OperatorError(f"SSGD: {name} is {attributes[name]:g}, but must be 0 or more.")
    if any(size < 1 for size in attributes["block"]):
        raise OperatorError(f"SSGD: block is {attributes['block']}, but each size must be 1 or more.").about(
            "block", got=attributes["block"]
        )


DETAILS = """`Layer` holds the weights w of the variable, computed in float64. With z = X² for l2 and z = |X| for l1,
w² = 1 / f'(z) for l2 and w² = 1 / f'(z)² for l1:

- `layer.scale(m)` is s = w² / mean(w²), at most m where m > 0; 0 where mean(w²) is 0. It is computed relative to the
  largest weight where w² itself could overflow (exponential, tanh).
- `layer.shrinkage(X, r)` is 2 r X / mean(w²) for l2, r w sign(X) / mean(w²) for l1.

With `block`, the weights of a block are reweighted together: z is the mean of X² over the block for l2 and its root
for l1, and X over that root takes the place of sign(X). Blocks start at the first element of each axis; the last one
along an axis may be smaller. The setting in Python is (outputs, inputs) of a weight matrix instead; in a convolution
the inputs of a block are channels at one position of the kernel, if these suffice.

The measures, with ε for `epsilon`:

| `measure` | f and w |
|---|---|
""" + "\n".join(f"| {name} | {(found.__doc__ or name).splitlines()[0]} |" for name, found in BUILT_IN.items())


@optimizer(
    "One step of sparsity-promoting gradient descent. Every weight's step is scaled by s = w² / mean(w²), "
    "the mean taken over its variable (a layer). The diversity measure defines w, which grows with the size of the "
    "weight: large weights learn and small ones vanish. Without regularization the fixed points are those of the loss "
    "alone.",
    rule,
    Attribute(
        "measure",
        "The diversity measure: log-sum, p-norm, arctan, geman-mcclure, exponential or tanh, or the name of a "
        "registered one.",
        kind=str,
    ),
    Attribute(
        "reweighting",
        "l2 for a measure of the square of a weight, l1 for one of its absolute value.",
        kind=str,
        choices=("l1", "l2"),
    ),
    Attribute(
        "epsilon", "Parameter of all measures except p-norm; a smaller one promotes sparsity more.", sensible=POSITIVE
    ),
    Attribute(
        "p",
        "Exponent of p-norm: above 0 and at most 2 (l2) or 1 (l1), where it is plain gradient descent.",
        sensible=Interval(0.0, 2.0, low_included=False, high_included=True),
    ),
    Attribute("regularization", "Weight λ of the measure in the objective."),
    Attribute(
        "alpha",
        "Weight of the old momentum; at 0 there is no momentum and no V.",
        sensible=FRACTION,
        familiar="momentum",
    ),
    PENALTY,
    Attribute("max_scale", "The largest s; at 0 there is no limit."),
    Attribute("block", "The size of a block along each axis of X; empty for blocks of one weight.", (), kind=tuple),
    states=(State("V", "The momentum, where alpha is above 0.", used=lambda a: float(a["alpha"]) > 0),),
    counted=False,
    details=DETAILS.replace("|u|", "abs(u)").replace("|X|", "abs(X)"),
    check=check,
)
@dataclass(frozen=True)
class SSGD(Optimizer):
    """Sparsity-promoting gradient descent: prunes a network while it trains.

    With learning rate R, parameter X (a layer), its gradient G and, for ``alpha > 0``, the state V::

        w²    = 1 / f'(X²)  for l2,  1 / f'(|X|)²  for l1      f: the measure
        s     = min(w² / mean(w²), max_scale)                  no limit for max_scale = 0
        G'    = norm_coefficient * X + G
        V_new = alpha * V + G'                                 direction D; G' itself for alpha = 0
        A     = 2 R λ X / mean(w²)  for l2,  R λ w sign(X) / mean(w²)  for l1      λ: regularization
        X_new = X - R * s * D - A

    With ε > 0 no weight becomes exactly zero; a threshold removes the vanished ones. With "p-norm" a zero weight stays
    zero. s averages 1 over a layer, so the steps of the remaining weights grow like 1 / density: see ``max_scale``.

    PyTorch has no SSGD; ``measure="p-norm", p=2`` (l2) is ``torch.optim.SGD(lr=learning_rate,
    momentum=alpha, weight_decay=norm_coefficient)``.

    Args:
        learning_rate: R, 0 or more.
        measure: "log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh", or a registered one.
        reweighting: "l2" or "l1".
        epsilon: Parameter of all measures except "p-norm", above 0.
        p: Parameter of "p-norm", in (0, 2] for l2, (0, 1] for l1.
        regularization: λ, 0 or more.
        alpha: Momentum, in [0, 1).
        norm_coefficient: Weight decay added to the gradient (L2 regularization), 0 or more.
        max_scale: Largest s; 0 is no limit.
        block: (outputs, inputs) of a block of a weight matrix, whose weights are reweighted together, so that whole
            blocks vanish. In a convolution the inputs of a block are channels at one position of the kernel, if these
            suffice. The operator's attribute has one size for each axis of the stored tensor instead.

    Raises:
        OptionError: A setting is outside its range, or the measure is unknown.

    Source:
        C.-H. Lee, I. Fedorov, B. D. Rao, H. Garudadri, "SSGD: Sparsity-Promoting Stochastic Gradient Descent
        Algorithm for Unbiased DNN Pruning", ICASSP 2020.

    Example:
        >>> import numpy as np
        >>> [state.name for state in SSGD(alpha=0.9).states], SSGD().states
        (['V'], ())
        >>> from onnxtrain.operators import ssgd
        >>> x, g = np.array([1.0, 3.0]), np.array([1.0, 1.0])
        >>> ssgd(0.1, 0, x, g, measure="p-norm", p=1.0)  # w² = 2 |x|, s = |x| / 2
        (array([0.95, 2.85]),)
    """

    learning_rate: float = 0.01
    measure: str = "log-sum"
    reweighting: str = "l2"
    epsilon: float = 0.01
    p: float = 0.5
    regularization: float = 0.0
    alpha: float = 0.0
    norm_coefficient: float = 0.0
    max_scale: float = 0.0
    block: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", block_of("SSGD", self.block))
        super().__post_init__()

    def node_attributes(self) -> dict[str, Any]:
        """Return all attributes of a node whose weights have no blocks; ``block`` depends on the stored tensor."""
        return {**super().node_attributes(), "block": ()}

    @property
    def native(self) -> bool:
        """True where the native kernels implement the measure: the built-in ones, not registered ones."""
        return self.measure in BUILT_IN

    @property
    def promotes_sparsity(self) -> bool:
        """False for the measure that is plain gradient descent."""
        return not (self.measure == "p-norm" and self.p == (1.0 if self.reweighting == "l1" else 2.0))

    def plain(self) -> SSGD:
        """Return the same operator without sparsity promotion, for biases and normalization."""
        return replace(self, measure="p-norm", reweighting="l2", p=2.0, regularization=0.0, max_scale=0.0, block=(1, 1))
