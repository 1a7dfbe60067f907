"""The activation functions that LSTM, GRU and RNN name in their attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnxtrain.autodiff.node import Node, describe
from onnxtrain.autodiff.rules.activation import activation
from onnxtrain.errors import GradientError
from onnxtrain.graph import Value


class Activation(NamedTuple):
    """An activation function with its parameters, by the name that the recurrent operators know."""

    name: str
    alpha: float | None
    beta: float | None

    def __call__(self, x: Value) -> Value:
        """The function's value, emitted through the builder of its argument."""
        op, alpha, beta = x.op, self.alpha, self.beta
        match self.name:
            case "Affine":
                assert alpha is not None
                assert beta is not None
                return x * alpha + beta
            case "ScaledTanh":
                assert alpha is not None
                assert beta is not None
                return op.Tanh(x * beta) * alpha
            case "HardSigmoid":
                return activation(self.name, x, alpha=alpha, beta=beta)
            case "LeakyRelu" | "ThresholdedRelu" | "Elu":
                return activation(self.name, x, alpha=alpha)
            case _:
                return op.several(self.name, x, outputs=1)[0]


# Defaults of alpha and beta; None for a function without that parameter.
_PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "affine": (1.0, 0.0),
    "elu": (1.0, None),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01, None),
    "relu": (None, None),
    "scaledtanh": (1.0, 1.0),
    "sigmoid": (None, None),
    "softplus": (None, None),
    "softsign": (None, None),
    "tanh": (None, None),
    "thresholdedrelu": (1.0, None),
}
_NAMES = {name.lower(): name for name in ("Affine", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "ScaledTanh")}
_NAMES |= {name.lower(): name for name in ("Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu")}


def activations(node: Node, default: Sequence[str], directions: int) -> list[list[Activation]]:
    """The activation functions of each direction; alpha and beta go to the functions that have them, in order.

    Raises:
        GradientError: A function is unknown.
    """
    names = node.attribute("activations") or list(default) * directions
    if isinstance(names, str):  # of a fused operator: names in one string, alpha and beta for every function
        numbers = [node.attribute(f"activation_{kind}") for kind in ("alpha", "beta")]
        triples = zip(names.split(), *numbers, strict=True)
        return _by_direction([_with_numbers(name, alpha, beta) for name, alpha, beta in triples], len(default))
    alphas, betas = (iter(node.attribute(f"activation_{kind}") or ()) for kind in ("alpha", "beta"))
    found = []
    for name in names:
        if name.lower() not in _PARAMETERS:
            raise GradientError(
                f"{describe(node.ir)}: the activation {name!r} is unknown; the operator knows "
                f"{', '.join(sorted(_NAMES.values()))}."
            ).about(describe(node.ir), got=name, wanted=sorted(_NAMES.values()))
        alpha, beta = _PARAMETERS[name.lower()]
        found.append(
            _with_numbers(
                name,
                next(alphas, alpha) if alpha is not None else None,
                next(betas, beta) if beta is not None else None,
            )
        )
    return _by_direction(found[: directions * len(default)], len(default))


def numbers_with_defaults(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]
) -> tuple[list[float], list[float]] | None:
    """Complete ``activation_alpha`` and ``activation_beta`` by the defaults; ``None`` where a function is unknown."""
    if any(name.lower() not in _PARAMETERS for name in names):
        return None
    defaults = [_PARAMETERS[name.lower()] for name in names]
    alpha, beta = ([number for number in column if number is not None] for column in zip(*defaults, strict=True))
    return [*alphas, *alpha[len(alphas) :]], [*betas, *beta[len(betas) :]]


def _with_numbers(name: str, alpha: float | None, beta: float | None) -> Activation:
    """A function with the parameters that it has."""
    has_alpha, has_beta = (number is not None for number in _PARAMETERS[name.lower()])
    return Activation(_NAMES[name.lower()], alpha if has_alpha else None, beta if has_beta else None)


def _by_direction(found: list[Activation], count: int) -> list[list[Activation]]:
    return [found[begin : begin + count] for begin in range(0, len(found), count)]
