"""Resolve metrics given as names, functions or objects, and adapt them to the predictions of a loss."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.registries import Registry
from onnxtrain.errors.spelling import ALIASES, suggestion
from onnxtrain.metrics.base import (
    LossMetric,
    Metric,
    MetricFunction,
    MetricInput,
    NamedMetric,
    PredictionKind,
    extended,
    is_metric,
)
from onnxtrain.metrics.dataset_metrics import (
    DATASET_METRIC_NAMES,
    DATASET_METRICS,
    SHOWN,
    Predictions,
    find_dataset_metric,
)
from onnxtrain.metrics.error_rates import CharacterErrorRate, WordErrorRate
from onnxtrain.metrics.means import BUILT_IN, checked_options
from onnxtrain.operators.call_text import name_of, split_list

_METRIC_ALIASES: Final = {
    "acc": "accuracy",
    "mape": "mean_absolute_percentage_error",
    "cer": CharacterErrorRate.name,
    "wer": WordErrorRate.name,
}


def resolve_metric(metric: str | Metric | MetricFunction, **options: Any) -> NamedMetric:
    """Find a metric by name, or take a function of (y_true, y_pred) or an object with the methods of a metric.

    Args:
        metric: A name such as ``"accuracy"``, ``"f1"`` or ``"mean_squared_error"``; a function of all targets and all
            predictions; or a :class:`Metric`.
        options: Arguments of a metric found by name, such as ``ignore_index``; metrics of a whole dataset also take
            ``predicts``, the meaning of predictions: ``"classes"``, ``"binary"`` or ``"numbers"``, and ``axis``, that
            of classes or of independent binary outputs.

    Raises:
        OptionError: The metric or an argument of it does not exist.

    >>> import numpy as np
    >>> resolve_metric("accuracy", threshold=0.0)(np.array([1, 0]), np.array([2.5, -1.0]))
    1.0
    """
    if not isinstance(metric, str):
        return from_object(metric)
    name = canonical(metric)
    if name in BUILT_IN:
        return BUILT_IN[name].named(metric, **options)
    whole = find_dataset_metric(name)
    if whole is None and name in METRICS and not isinstance(added := METRICS[name], LossMetric):
        return _named(added, name)
    if whole is None:
        raise unknown(metric)
    known = {"predicts": whole.reads[0], "axis": 1, "ignore_index": None}
    found = known | checked_options(metric, options, known)
    metric_input = MetricInput("", found["predicts"], found["axis"], found["ignore_index"])
    if found["predicts"] not in whole.reads:
        raise OptionError(
            f"predicts is {found['predicts']!r}, but the metric {metric} is for {' or '.join(whole.reads)}."
        )
    read = functools.partial(
        Predictions.of, found["predicts"], axis=metric_input.axis, ignore_index=metric_input.ignore_index
    )
    return whole.named(read, metric_input.counted)


def _is_valid(given: object) -> bool:
    return callable(given) or is_metric(given) or isinstance(given, LossMetric)


METRICS: Final[Registry[Any]] = Registry("metric", _is_valid, "a function of (y_true, y_pred) or a Metric")
"""Metrics of plugins."""


def _named(added: Any, name: str) -> NamedMetric:
    """Return a metric of a plugin under the name that it is registered by."""
    return dataclasses.replace(from_object(added), name=name)


def canonical(name: str) -> str:
    """Resolve aliases of a metric's name."""
    return _METRIC_ALIASES.get(name, ALIASES.get(name, name))


def listed(metrics: Any) -> list[Any]:
    """List metrics one by one; a text may hold several, separated by commas."""
    if metrics is None:
        return []
    if isinstance(metrics, str):
        return split_list(metrics)
    if isinstance(metrics, np.ndarray):
        metrics = np.atleast_1d(metrics).tolist()
    if callable(metrics) or is_metric(metrics):
        return [metrics]
    if isinstance(metrics, bytes | Mapping) or not isinstance(metrics, Iterable):
        raise OptionError(
            f"metrics is {_shown(metrics)}; give names such as 'accuracy,f1', functions of (y_true, y_pred), or a list "
            "of these."
        )
    found: list[Any] = []
    for each in metrics:
        found += split_list(each) if isinstance(each, str) else [each]
    return found


def unknown(name: str) -> OptionError:
    """Return the error for an unknown metric, with the nearest name."""
    aliases = [*_METRIC_ALIASES, *_METRIC_ALIASES.values(), *_loss_aliases()]
    names = [*BUILT_IN, *DATASET_METRIC_NAMES, *METRICS, *aliases]
    near = suggestion(name_of(name), names)
    shown = ", ".join(
        [
            *BUILT_IN,
            *SHOWN,
            "f1_micro",
            "top_k(5)",
            CharacterErrorRate.name,
            *(name for name in METRICS if "/" not in name),
        ]
    )
    return OptionError(f"There is no metric '{name}': use {shown} or a function of (y_true, y_pred).{near}").about(
        "metrics", got=name
    )


def _loss_aliases() -> list[str]:
    return [alias for alias, name in ALIASES.items() if name in BUILT_IN]


def from_object(metric: Any) -> NamedMetric:
    """Wrap a function, or an object with the methods of a metric."""
    if isinstance(metric, NamedMetric):
        return metric
    if is_metric(metric):
        return NamedMetric(
            str(metric.name),
            lambda y_true, y_pred: metric.update(metric.start(), y_true, y_pred),
            metric.merge,
            metric.result,
            bool(getattr(metric, "of_output", True)),
            number=bool(getattr(metric, "number", True)),
        )
    if isinstance(metric, type):
        raise OptionError(f"The metric is the class {metric.__name__}; give an object: {metric.__name__}().")
    if not callable(metric):
        raise OptionError(f"A metric is a name or a function of (y_true, y_pred), not {_shown(metric)}.")
    name = getattr(metric, "__name__", None) or type(getattr(metric, "func", metric)).__name__
    _check_arguments(metric, name)
    return NamedMetric(
        name,
        lambda y_true, y_pred: [(np.array(y_true), np.array(y_pred))],  # the session reuses its buffers
        extended,
        functools.partial(_of_all, metric, name),
        of_output=True,
    )


def _of_all(function: MetricFunction, name: str, batches: list[tuple[Array, Array]]) -> float:
    """Evaluate a function on all targets and predictions at once."""
    arrays = []
    for what, parts in zip(("targets", "predictions"), zip(*batches, strict=True), strict=True):
        shapes = dict.fromkeys(part.shape[1:] for part in parts)
        if len(shapes) > 1:
            raise DataError(
                f"The metric {name} sees all data at once, but batches have {what} of the shapes "
                f"{', '.join(map(str, shapes))} per example, which cannot be concatenated; give data of one length, or "
                "an object with start, update, merge and result."
            ).about(name, got=shapes)
        arrays.append(np.concatenate(parts))
    value = function(*arrays)
    try:
        found = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.size != 1 or isinstance(value, str | bytes) or value is None:
        raise OptionError(f"The metric function {name!r} returned {_shown(value)}; it needs to return one number.")
    return float(found.reshape(()))


def _check_arguments(function: MetricFunction, name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise OptionError(
            f"The metric function {name!r} takes the arguments {signature}; it is called with two: the targets and the "
            "predictions."
        ) from None


def _shown(value: object) -> str:
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
    short = f" {value!r}" if isinstance(value, int | float | str | bytes) and len(repr(value)) < 40 else ""
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}{short}{shape}"


_DESCRIPTIONS: Final[dict[PredictionKind, str]] = {
    "classes": "scores over classes",
    "binary": "independent binary logits",
    "numbers": "numbers",
}


def metric_for_loss(metric_input: MetricInput, metric: str | Metric | MetricFunction | LossMetric) -> NamedMetric:
    """Adapt a metric to the predictions of a loss; a user-defined one stays as it is."""
    name = canonical(metric) if isinstance(metric, str) else None
    if name in (CharacterErrorRate.name, WordErrorRate.name):
        return from_object(_error_rate(metric_input, str(name)))
    whole = find_dataset_metric(name)
    if whole is not None:
        return whole.named(reader(metric_input, whole.name, whole.reads), metric_input.counted)
    built_in = next((key for key, entry in BUILT_IN.items() if key == name or entry.function is metric), None)
    if built_in is None and isinstance(metric, str):
        if metric not in METRICS:
            raise unknown(metric)
        added = METRICS[metric]
        return added.of(metric_input) if isinstance(added, LossMetric) else _named(added, metric)
    if built_in is None:
        return metric.of(metric_input) if isinstance(metric, LossMetric) else from_object(metric)
    shown = metric if isinstance(metric, str) else built_in
    options = _options(metric_input, built_in)
    found = BUILT_IN[built_in].named(shown, lambda y_true, y_pred: _aligned(metric_input, y_true, y_pred), **options)
    return dataclasses.replace(found, counted=metric_input.counted)


def reader(
    metric_input: MetricInput, name: str, reads: Sequence[PredictionKind]
) -> Callable[[Array, Array], Predictions]:
    """Return a function that converts targets and predictions of a loss for a metric."""
    kind = _fitting_kind(metric_input, name, reads)

    def read(y_true: Array, y_pred: Array) -> Predictions:
        aligned = _aligned(metric_input, y_true, y_pred)
        return Predictions.of(kind, *aligned, axis=metric_input.axis, ignore_index=metric_input.ignore_index)

    return read


def _fitting_kind(metric_input: MetricInput, name: str, reads: Sequence[PredictionKind]) -> PredictionKind:
    """Return what the predictions of a loss are; refuse a metric that is for others, and list those for these."""
    kind = metric_input.predicts
    if kind is not None and kind in reads:
        return kind
    wanted = " or ".join(_DESCRIPTIONS[each] for each in reads)
    given = "are not known" if kind is None else f"are {_DESCRIPTIONS[kind]}"
    names = [other for other, entry in BUILT_IN.items() if kind in entry.reads]
    names += [other for other in SHOWN if kind in DATASET_METRICS[other].reads]
    fitting = "".join(f"{other}, " for other in names) + "or " if names else "another, or "
    raise OptionError(
        f"The metric {name} is for {wanted}, but with the loss {metric_input.loss} predictions {given}; measure "
        f"{fitting}a function of (y_true, y_pred)."
    )


def _aligned(metric_input: MetricInput, y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Align targets with their predictions, and convert probabilities to logits."""
    given = _logits(metric_input, y_pred) if metric_input.probabilities else y_pred
    return (y_true[:, metric_input.later :], given[:, : -metric_input.later]) if metric_input.later else (y_true, given)


def _error_rate(metric_input: MetricInput, name: str) -> CharacterErrorRate:
    if name == WordErrorRate.name:
        raise OptionError(
            f"The metric {name} needs the class of the space between words; give it as "
            "onnxtrain.metrics.WordErrorRate(space=1)."
        )
    if metric_input.sequence is None:
        raise OptionError(
            f"The metric {name} is for label sequences, as the loss ctc takes them, not for the loss "
            f"{metric_input.loss}; measure another, or a function of (y_true, y_pred)."
        )
    return metric_input.sequence


def _options(metric_input: MetricInput, name: str) -> dict[str, Any]:
    """Return the arguments of a built-in metric."""
    if metric_input.predicts is None:
        if name != "accuracy":
            return {}
        if metric_input.detections is not None:
            raise OptionError(
                f"accuracy is for classes, but the loss {metric_input.loss} predicts boxes; measure map or map_50."
            ).about("accuracy", got=metric_input.loss)
        raise OptionError(
            f"accuracy needs to know what the predictions are, which the loss {metric_input.loss} does not say; give "
            "it predicts='classes' or predicts='binary', or measure a function of (y_true, y_pred)."
        ).about("accuracy", got=metric_input.loss)
    kind = _fitting_kind(metric_input, name, BUILT_IN[name].reads)
    if kind == "binary":
        return {"binary": True, "threshold": 0.0} if name == "accuracy" else {}
    if kind == "numbers":
        return {}
    options = {"axis": metric_input.axis, "ignore_index": metric_input.ignore_index}
    return options | {"binary": False} if name == "accuracy" else options


def _logits(metric_input: MetricInput, probabilities: Array) -> Array:
    """Convert probabilities to logits; the logarithm of zero is -100, as in losses."""
    with np.errstate(divide="ignore", invalid="ignore"):
        p = probabilities.astype(np.float64)
        log_p = np.maximum(np.log(np.maximum(p, 0)), -100)
        return log_p - np.maximum(np.log(np.maximum(1 - p, 0)), -100) if metric_input.predicts == "binary" else log_p
