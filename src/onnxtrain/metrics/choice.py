"""The metric that a user means: a name, a function of targets and predictions, or an object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import DataError, OptionError
from onnxtrain.metrics.base import Metric, MetricFunction, NamedMetric, is_metric
from onnxtrain.metrics.error_rates import CharacterErrorRate, WordErrorRate
from onnxtrain.metrics.means import BUILT_IN, checked_options
from onnxtrain.metrics.reading import Reading
from onnxtrain.metrics.whole_metrics import SHOWN, WHOLE_NAMES, Predictions, find_whole_metric
from onnxtrain.spelling import suggestion
from onnxtrain.training.aliases import ALIASES
from onnxtrain.training.call_text import name_of, split_list

_METRIC_ALIASES: Final = {
    "acc": "accuracy",
    "mape": "mean_absolute_percentage_error",
    "cer": CharacterErrorRate.name,
    "wer": WordErrorRate.name,
}


def resolve_metric(metric: str | Metric | MetricFunction, **options: Any) -> NamedMetric:
    """Find a metric by name, or take a function of (y_true, y_pred) or an object with the methods of a metric.

    Args:
        metric: a name such as ``"accuracy"``, ``"f1"`` or ``"mean_squared_error"``; a function of all targets and all
            predictions; or a :class:`Metric`.
        options: further arguments of a metric found by name, such as ``ignore_index``; of a metric of a whole data set
            also ``predicts``: what predictions are, ``"classes"``, ``"binary"`` or ``"numbers"``.

    Raises:
        OptionError: there is no such metric, or it has no such argument.

    >>> import numpy as np
    >>> resolve_metric("accuracy", threshold=0.0)(np.array([1, 0]), np.array([2.5, -1.0]))
    1.0
    """
    if not isinstance(metric, str):
        return from_object(metric)
    name = canonical(metric)
    if name in BUILT_IN:
        return BUILT_IN[name].named(metric, **options)
    whole = find_whole_metric(name)
    if whole is None:
        raise unknown(metric)
    known = {"predicts": whole.reads[0], "axis": 1, "ignore_index": None}
    for option in options:
        if option not in known:
            raise OptionError(
                f"{option}={options[option]!r} is given, but the metric {metric} has no such argument; it has "
                f"{', '.join(known)}."
            )
    found = {**known, **checked_options(metric, options)}
    reading = Reading("", found["predicts"], found["axis"], found["ignore_index"])
    if found["predicts"] not in whole.reads:
        raise OptionError(
            f"predicts is {found['predicts']!r}, but the metric {metric} is for {' or '.join(whole.reads)}."
        )
    read = functools.partial(Predictions.of, found["predicts"], axis=reading.axis, ignore_index=reading.ignore_index)
    return whole.named(read, reading.counted)


def canonical(name: str) -> str:
    """The name that a metric has here."""
    return _METRIC_ALIASES.get(name, ALIASES.get(name, name))


def listed(metrics: Any) -> list[Any]:
    """Metrics one by one; texts may list several, with commas between them.

    Raises:
        OptionError: they are neither metrics nor a list of some.

    >>> listed("accuracy, top_k(5)")
    ['accuracy', 'top_k(5)']
    """
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
    """The error for a name that no metric has, with the nearest that one has."""
    names = [*BUILT_IN, *WHOLE_NAMES, *_METRIC_ALIASES, *_METRIC_ALIASES.values(), *_loss_aliases()]
    near = suggestion(name_of(name), names)
    shown = ", ".join([*BUILT_IN, *SHOWN, "f1_micro", "top_k(5)", CharacterErrorRate.name])
    return OptionError(f"there is no metric '{name}': use {shown} or a function of (y_true, y_pred).{near}")


def _loss_aliases() -> list[str]:
    return [alias for alias, name in ALIASES.items() if name in BUILT_IN]


def from_object(metric: Any) -> NamedMetric:
    """The metric that a function, or an object with the methods of a metric, is.

    Raises:
        OptionError: it is neither.
    """
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
        raise OptionError(f"the metric is the class {metric.__name__}; give an object: {metric.__name__}().")
    if not callable(metric):
        raise OptionError(f"a metric is a name or a function of (y_true, y_pred), not {_shown(metric)}.")
    name = getattr(metric, "__name__", None) or type(getattr(metric, "func", metric)).__name__
    _check_arguments(metric, name)
    return NamedMetric(
        name,
        lambda y_true, y_pred: [(np.array(y_true), np.array(y_pred))],  # the session's buffers have other values later
        _extended,
        functools.partial(_of_all, metric, name),
        of_output=True,
    )


def _extended(one: list[Any], other: list[Any]) -> list[Any]:
    one.extend(other)
    return one


def _of_all(function: MetricFunction, name: str, batches: list[tuple[Array, Array]]) -> float:
    """The value of a function for all targets and predictions at once.

    Raises:
        DataError: batches have different shapes, so that they do not join.
        OptionError: the function returns something else than a number.
    """
    arrays = []
    for what, parts in zip(("targets", "predictions"), zip(*batches, strict=True), strict=True):
        shapes = dict.fromkeys(part.shape[1:] for part in parts)
        if len(shapes) > 1:
            raise DataError(
                f"The metric {name} sees all data at once, but batches have {what} of the shapes "
                f"{', '.join(map(str, shapes))} for an example, which do not join; give data of one length, or "
                "an object with start, update, merge and result."
            )
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
