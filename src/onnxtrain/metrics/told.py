"""Metrics told how to read the predictions of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import OptionError
from onnxtrain.metrics.base import Metric, MetricFunction, NamedMetric, PredictionKind
from onnxtrain.metrics.choice import canonical, from_object, unknown
from onnxtrain.metrics.error_rates import CharacterErrorRate, WordErrorRate
from onnxtrain.metrics.means import BUILT_IN
from onnxtrain.metrics.reading import Reading
from onnxtrain.metrics.whole_metrics import SHOWN, WHOLE, Predictions, find_whole_metric

_DESCRIPTIONS: Final[dict[PredictionKind, str]] = {
    "classes": "scores over classes",
    "binary": "independent yes-or-no logits",
    "numbers": "numbers",
}


def told(reading: Reading, metric: str | Metric | MetricFunction) -> NamedMetric:
    """A metric told how to read this loss's predictions; one of a user's own is left as it is.

    Raises:
        OptionError: there is no such metric, or it is for other predictions.
    """
    name = canonical(metric) if isinstance(metric, str) else None
    if name in (CharacterErrorRate.name, WordErrorRate.name):
        return from_object(_error_rate(reading, str(name)))
    whole = find_whole_metric(name)
    if whole is not None:
        return whole.named(reader(reading, whole.name, whole.reads), reading.counted)
    built_in = next((key for key, entry in BUILT_IN.items() if key == name or entry.function is metric), None)
    if built_in is None and isinstance(metric, str):
        raise unknown(metric)
    if built_in is None:
        return from_object(metric)
    shown = metric if isinstance(metric, str) else built_in
    options = _options(reading, built_in)
    found = BUILT_IN[built_in].named(shown, lambda y_true, y_pred: _aligned(reading, y_true, y_pred), **options)
    return _counting(found, reading)


def _counting(metric: NamedMetric, reading: Reading) -> NamedMetric:
    return NamedMetric(metric.name, metric.measure, metric.join, metric.finish, counted=reading.counted)


def reader(reading: Reading, name: str, reads: Sequence[PredictionKind]) -> Callable[[Array, Array], Predictions]:
    """Bring targets and predictions of this loss to the form that a metric takes.

    Raises:
        OptionError: the metric is for other predictions.
    """
    kind = reading.predicts
    if kind is None or kind not in reads:
        wanted = " or ".join(_DESCRIPTIONS[each] for each in reads)
        given = "are not known" if kind is None else f"are {_DESCRIPTIONS[kind]}"
        raise OptionError(
            f"The metric {name} is for {wanted}, but with the loss {reading.loss} predictions {given}; measure "
            f"{_fitting(kind)}a function of (y_true, y_pred)."
        )

    def read(y_true: Array, y_pred: Array) -> Predictions:
        aligned = _aligned(reading, y_true, y_pred)
        return Predictions.of(kind, *aligned, axis=reading.axis, ignore_index=reading.ignore_index)

    return read


def _fitting(kind: PredictionKind | None) -> str:
    """The metrics for predictions of a kind, in words."""
    names = [name for name, entry in BUILT_IN.items() if kind in entry.reads]
    names += [name for name in SHOWN if kind in WHOLE[name].reads]
    return "".join(f"{name}, " for name in names) + "or " if names else "another, or "


def _aligned(reading: Reading, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Targets beside the predictions that are for them, these as logits."""
    given = _log(y_pred) if reading.probabilities else y_pred
    return (y_true[:, reading.later :], given[:, : -reading.later]) if reading.later else (y_true, given)


def _error_rate(reading: Reading, name: str) -> CharacterErrorRate:
    if name == WordErrorRate.name:
        raise OptionError(
            f"The metric {name} needs the class of the space between words; give it as "
            "onnxtrain.metrics.WordErrorRate(space=1)."
        )
    if reading.sequence is None:
        raise OptionError(
            f"The metric {name} is for labels in order, as the loss ctc takes them, not for the loss {reading.loss}; "
            "measure another, or a function of (y_true, y_pred)."
        )
    return reading.sequence


def _options(reading: Reading, name: str) -> dict[str, Any]:
    """The arguments of a built-in metric.

    Raises:
        OptionError: it is for other predictions.
    """
    if reading.predicts is None:
        if name != "accuracy":
            return {}
        raise OptionError(
            f"accuracy needs to know what the predictions are, which the loss {reading.loss} does not say; give it "
            "predicts='classes' or predicts='binary', or measure a function of (y_true, y_pred)."
        )
    if reading.predicts not in BUILT_IN[name].reads:
        wanted = " or ".join(_DESCRIPTIONS[kind] for kind in BUILT_IN[name].reads)
        raise OptionError(
            f"The metric {name} is for {wanted}, but with the loss {reading.loss} predictions are "
            f"{_DESCRIPTIONS[reading.predicts]}; measure {_fitting(reading.predicts)}a function of (y_true, y_pred)."
        )
    if reading.predicts == "binary":
        return {"binary": True, "threshold": 0.0} if name == "accuracy" else {}
    if reading.predicts == "numbers":
        return {}
    options = {"axis": reading.axis, "ignore_index": reading.ignore_index}
    return options | {"binary": False} if name == "accuracy" else options


def _log(probabilities: Array) -> Array:
    values = probabilities.astype(np.float64)
    return np.log(np.maximum(values, np.finfo(np.float64).tiny))
