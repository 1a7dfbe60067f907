"""Losses of numbers: counts, positive amounts, quantiles, relative and logarithmic errors, directions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np

from onnxtrain.data.conversion import Array, first_row
from onnxtrain.data.target_checks import Examples, TargetCheck
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import (
    ReducedLoss,
    TargetForm,
    TargetKind,
    count_of,
    known_size,
    mean_of,
    mean_over,
    node_rank,
    softplus,
)
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import PredictionKind

_EPSILON = 1e-7
"""Keras's ``backend.epsilon()``."""


@dataclass(frozen=True)
class AtLeast:
    """Values are at least 0, or above 0; messages name the ``loss``."""

    loss: str
    above: bool = False

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """Raise a `DataError` that names the first example with an invalid value."""
        wrong = targets <= 0 if self.above else targets < 0
        if wrong.any():
            example = int(examples[first_row(wrong)])
            raise DataError(
                f"{what} has {float(targets[wrong][0]):.6g} at example {example}, but {self.loss} needs numbers "
                f"{'above 0' if self.above else 'of at least 0'}."
            )


class NumberLoss(ReducedLoss):
    """Base of losses that are a mean over all elements."""

    predicts = "numbers"
    elementwise: ClassVar[bool] = True

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        return mean_over(op, self.terms(op, prediction, target), prediction, weights)

    def terms(self, op: Builder, y: Value, t: Value) -> Value:
        """Emit the term of each element."""
        raise OptionError(f"{type(self).__name__} does not define terms().")


@checks_arguments
@dataclass(frozen=True)
class Poisson(NumberLoss):
    """Negative log-likelihood of counts t for rates y: the mean of y - t log(y + 1e-7), as Keras's ``Poisson``.

    Args:
        log_input: Predictions are logarithms of rates: the mean of exp(y) - t y, as ``torch.nn.PoissonNLLLoss()``, for
            models that do not end in an Exp or a Softplus.
    """

    name: ClassVar[str] = "poisson"

    log_input: bool = False

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that counts are at least 0."""
        return AtLeast(self.name)

    def terms(self, op: Builder, y: Value, t: Value) -> Value:
        """Emit the term of each element."""
        return op.Exp(y) - t * y if self.log_input else y - t * op.Log(y + _EPSILON)


@checks_arguments
@dataclass(frozen=True)
class Gamma(NumberLoss):
    """Deviance of the gamma distribution: the mean of 2 (log(y / t) + t / y - 1), for amounts t and means y above 0.

    As ``sklearn.metrics.mean_gamma_deviance``; it is least where y is the mean of t, whose errors are relative.

    Args:
        log_input: Predictions are logarithms of means, as of a generalized linear model with a log link, for models
            that do not end in an Exp or a Softplus.
    """

    name: ClassVar[str] = "gamma"

    log_input: bool = False

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that amounts are above 0."""
        return AtLeast(self.name, above=True)

    def terms(self, op: Builder, y: Value, t: Value) -> Value:
        """Emit the term of each element, with r = log t - log y: 2 (exp(r) - 1 - r)."""
        ratio = op.Log(t) - (y if self.log_input else op.Log(y))
        return (op.Exp(ratio) - 1.0 - ratio) * 2.0


@checks_arguments
@dataclass(frozen=True)
class LogCosh(NumberLoss):
    """Mean over all elements of log cosh d, with d = y - t: d^2 / 2 if that is small, else about |d| - log 2."""

    name: ClassVar[str] = "log_cosh"

    def terms(self, op: Builder, y: Value, t: Value) -> Value:
        """Emit the term of each element: log cosh d = |d| + softplus(-2 |d|) - log 2."""
        distance = op.Abs(y - t)
        return distance + softplus(op, distance * -2.0) - math.log(2)


@checks_arguments
@dataclass(frozen=True)
class MeanAbsolutePercentageError(NumberLoss):
    """Mean over all elements of 100 |y - t| / max(|t|, 1e-7), in percent, as Keras; the metric is a fraction."""

    name: ClassVar[str] = "mean_absolute_percentage_error"

    def terms(self, op: Builder, y: Value, t: Value) -> Value:
        """Emit the term of each element."""
        return op.Abs(y - t) / op.Max(op.Abs(t), op.scalar(_EPSILON, t)) * 100.0


@checks_arguments
@dataclass(frozen=True)
class MeanSquaredLogarithmicError(NumberLoss):
    """Mean over all elements of (log(1 + y) - log(1 + t))^2; y below 1e-7 counts as 1e-7, as in Keras."""

    name: ClassVar[str] = "mean_squared_logarithmic_error"

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that targets are at least 0."""
        return AtLeast(self.name)

    def terms(self, op: Builder, y: Value, t: Value) -> Value:
        """Emit the term of each element."""
        first, second = (op.Log(op.Max(each, op.scalar(_EPSILON, each)) + 1.0) for each in (y, t))
        return (first - second) * (first - second)


@checks_arguments
@dataclass(frozen=True)
class Quantile(ReducedLoss):
    """Quantile (pinball) loss: the mean of max(q (t - y), (q - 1) (t - y)), least where y is the q-quantile of t.

    As ``sklearn.metrics.mean_pinball_loss``.

    Args:
        q: The quantile, between 0 and 1; or several, one for each element along the last axis of the prediction
            [N, ..., K]. Targets [N, ...] then have one axis less, or [N, ..., 1].
    """

    name: ClassVar[str] = "quantile"

    q: float | Sequence[float] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        raw: Any = self.q
        several = isinstance(raw, Sequence | np.ndarray)
        given = [*raw] if several else [raw]
        if not given or not all(isinstance(each, float | int | np.number) and 0 < each < 1 for each in given):
            raise OptionError(f"q is {self.q!r}; quantile needs a number between 0 and 1, or several.")
        object.__setattr__(self, "q", tuple(map(float, given)) if several else float(given[0]))

    @property
    def predicts(self) -> PredictionKind | None:  # type: ignore[override]
        """Numbers, where each target has one prediction."""
        return None if isinstance(self.q, tuple) else "numbers"

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """True where each target has one prediction."""
        return not isinstance(self.q, tuple)

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the shape of the prediction, without the axis of quantiles."""
        if not isinstance(self.q, tuple):
            return prediction.shape
        if node_rank(prediction) < 2 or known_size(prediction, -1) not in (None, len(self.q)):
            raise OptionError(
                f"quantile has {len(self.q)} quantiles, but {prediction.name!r} has the shape {prediction.shape}; its "
                "last axis needs one element for each of them."
            )
        return (prediction.shape or ())[:-1]

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the shape [N, ..., 1] for targets that have it beside several quantiles."""
        own = prediction.shape or ()
        column = isinstance(self.q, tuple) and len(shape) == len(own) and shape[-1] == 1
        return replace(now, shape=(*own[:-1], 1) if column else None)

    def with_form(self, form: TargetForm) -> Self:
        """Return the loss for targets of this form."""
        return self if form.shape is None else cast(Self, _OfColumns(**vars(self)))

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        apart = (
            op.Unsqueeze(target, op.ints(-1)) if node_rank(target) < node_rank(prediction) else target
        ) - prediction
        q = op.constant(np.asarray(self.q), prediction.dtype)
        return mean_over(op, op.Max(q * apart, (q - 1.0) * apart), prediction, weights)


class _OfColumns(Quantile):
    """Several quantiles of targets [N, ..., 1]."""

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the shape of the prediction, with one element along the axis of quantiles."""
        return (*(super().target_shape(prediction, kind) or ()), 1)


@checks_arguments
@dataclass(frozen=True)
class CosineSimilarity(ReducedLoss):
    """Mean over rows of -cos(y, t), from -1 (the same direction) to 1; vectors are along the last axis, as in Keras.

    A vector of zeros has the cosine 0.
    """

    name: ClassVar[str] = "cosine_similarity"
    predicts = "numbers"

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the shape of the prediction."""
        if node_rank(prediction) < 2:
            raise OptionError(
                f"cosine_similarity compares vectors [batch, ..., features], but {prediction.name!r} has the shape "
                f"{prediction.shape}."
            )
        return prediction.shape

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""

        def unit(vectors: Value) -> Value:
            square = op.ReduceSum(vectors * vectors, op.ints(-1), keepdims=1)
            return vectors / op.Sqrt(op.Max(square, op.scalar(1e-12, vectors)))

        cosines = op.ReduceSum(unit(prediction) * unit(target), op.ints(-1), keepdims=0)
        terms = -cosines.with_shape((prediction.shape or ())[:-1])
        return mean_of(op, terms, count_of(op, terms, prediction), weights)
