"""Metrics told how to read the predictions of a loss."""

from __future__ import annotations

from typing import Any, Final, cast

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.spelling import suggestion
from onnxtrain.training.aliases import ALIASES
from onnxtrain.training.call_text import name_of
from onnxtrain.training.data.conversion import Array
from onnxtrain.training.metrics.base import Measure, Metric, PredictionKind
from onnxtrain.training.metrics.choice import NamedMetric, resolve_metric
from onnxtrain.training.metrics.error_rates import CharacterErrorRate, WordErrorRate
from onnxtrain.training.metrics.means import BUILT_IN
from onnxtrain.training.metrics.reading import Reading
from onnxtrain.training.metrics.whole_metrics import WHOLE, MeasuredWhole, Predictions, WholeMetric, find_whole_metric

_DESCRIPTIONS: Final[dict[PredictionKind, str]] = {
    "classes": "scores over classes",
    "binary": "independent yes-or-no logits",
    "numbers": "numbers",
}


def measure(reading: Reading, metric: str | Metric | Measure) -> Measure:
    """A metric told how to read this loss's predictions; a function of a user's own is left as it is.

    Raises:
        OptionError: there is no such metric, or it is for other predictions.
    """
    if hasattr(metric, "start"):
        return cast("Measure", metric)
    if metric in (CharacterErrorRate.name, WordErrorRate.name):
        return _error_rate(reading, str(metric))
    whole = find_whole_metric(metric)
    if whole is not None:
        return measure_whole(reading, whole)
    wanted = ALIASES.get(metric, metric) if isinstance(metric, str) else metric
    name = next((name for name, entry in BUILT_IN.items() if wanted in (name, entry.function)), None)
    if name is None and isinstance(metric, str):
        names = ", ".join([*BUILT_IN, *WHOLE, "top_k(5)", CharacterErrorRate.name])
        near = suggestion(name_of(metric), [*BUILT_IN, *WHOLE, "top_k", *ALIASES])
        raise OptionError(f"there is no metric '{metric}': use {names} or a function of (y_true, y_pred).{near}")
    if name is None:
        return resolve_metric(metric)
    shown = metric if isinstance(metric, str) else name
    terms, options = BUILT_IN[name].terms, _options(reading, name)
    return NamedMetric(shown, lambda y_true, y_pred: terms(*_aligned(reading, y_true, y_pred), **options))


def measure_whole(reading: Reading, metric: WholeMetric) -> MeasuredWhole:
    """A metric of a whole data set told how to read this loss's predictions.

    Raises:
        OptionError: it is for other predictions.
    """
    kind = reading.predicts
    if kind is None or kind not in metric.reads:
        reads = " or ".join(_DESCRIPTIONS[each] for each in metric.reads)
        given = "are not known" if kind is None else f"are {_DESCRIPTIONS[kind]}"
        raise OptionError(
            f"The metric {metric.name} is for {reads}, but with the loss {reading.loss} predictions {given}; measure "
            "another, or a function of (y_true, y_pred)."
        )

    def read(y_true: Array, y_pred: Array) -> Predictions:
        aligned = _aligned(reading, y_true, y_pred)
        return Predictions.of(kind, *aligned, axis=reading.axis, ignore_index=reading.ignore_index)

    return MeasuredWhole(metric, read)


def _aligned(reading: Reading, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Targets beside the predictions that are for them, these as logits."""
    given = _log(y_pred) if reading.probabilities else y_pred
    return (y_true[:, reading.later :], given[:, : -reading.later]) if reading.later else (y_true, given)


def _error_rate(reading: Reading, name: str) -> Measure:
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
        reads = " or ".join(_DESCRIPTIONS[kind] for kind in BUILT_IN[name].reads)
        fitting = ", ".join(other for other, entry in BUILT_IN.items() if reading.predicts in entry.reads)
        raise OptionError(
            f"The metric {name} is for {reads}, but with the loss {reading.loss} predictions are "
            f"{_DESCRIPTIONS[reading.predicts]}; measure {fitting}, or a function of (y_true, y_pred)."
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
