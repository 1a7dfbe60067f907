"""Checks of target values: labels in range, values from 0 to 1, distributions that sum to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from onnxtrain.data.conversion import Array, first_row, kind_of
from onnxtrain.errors import DataError, OptionError

# Tolerances for probabilities and their sums after rounding to 16 bits or to two decimals.
_NUMBER_TOLERANCE: Final = 1e-3
_SUM_TOLERANCE: Final = 0.02

Examples = Sequence[int] | Array


class TargetCheck(Protocol):
    """Interface of target checks; equal checks test the same."""

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """Raise a `DataError` that names the first example with an invalid value."""


class LabelCheck(NamedTuple):
    """Labels are from 0 to ``classes - 1``; at least 0 where the number of classes is unknown."""

    classes: int | None
    ignore_index: int | None = None
    unit: str = "classes"

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """See `TargetCheck`."""
        check_labels(targets, self.classes, self.ignore_index, what=what, examples=examples, unit=self.unit)


class BinaryCheck(NamedTuple):
    """Values are from 0 to 1; messages name the ``loss``."""

    loss: str

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """See `TargetCheck`."""
        _check_between_0_and_1(targets, what, examples, self.loss)


class RelevanceCheck(NamedTuple):
    """Relevances [N, k] are at least 0, or -1 for no document, and every query has one; messages name the ``loss``."""

    loss: str

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """See `TargetCheck`."""
        wrong = (targets < 0) & (targets != -1)
        if wrong.any():
            raise DataError(
                f"{what} has the relevance {float(targets[wrong][0]):.6g} at example {_example(wrong, examples)}, but "
                f"{self.loss} needs numbers of at least 0, or -1 where a query has no more documents."
            )
        none = np.asarray((targets < 0).all(1))
        if none.any():
            raise DataError(f"{what} has no document at example {_example(none, examples)}: all relevances are -1.")


class BoxCheck(NamedTuple):
    """Boxes [N, M, 5] have a class, a size, and a centre in the image; negative classes are padding."""

    loss: str
    classes: int | None

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """See `TargetCheck`."""
        kind, sides = targets[..., 0], targets[..., 1:]
        real = kind >= 0
        end = np.inf if self.classes is None else self.classes
        wrong = real & ((kind >= end) | (kind != np.floor(kind)))
        if wrong.any():
            raise DataError(
                f"{what} has a box of class {float(kind[wrong][0]):.6g} at example {_example(wrong, examples)}, but "
                f"{self.loss} needs {_classes(self.classes)}, or -1 for padding."
            )
        outside = (sides < -_NUMBER_TOLERANCE) | (sides > 1 + _NUMBER_TOLERANCE)
        wrong = real & outside.any(-1)
        if wrong.any():
            raise DataError(
                f"{what} has the box {_box(sides[wrong][0])} at example {_example(wrong, examples)}, but {self.loss} "
                "needs x and y of the centre, width and height in fractions of the image, from 0 to 1: divide by its "
                "size."
            )
        wrong = real & (sides[..., 2:] <= 0).any(-1)
        if wrong.any():
            raise DataError(
                f"{what} has the box {_box(sides[wrong][0])} of no size at example {_example(wrong, examples)}; leave "
                "it out, with class -1."
            )


def _classes(classes: int | None) -> str:
    return "integers of at least 0" if classes is None else f"classes 0 to {classes - 1}"


def _box(sides: Array) -> str:
    return "(" + ", ".join(f"{float(side):.4g}" for side in sides) + ")"


class DistributionCheck(NamedTuple):
    """Values are from 0 to 1 and sum to 1 along the class axis; messages name the ``loss``."""

    loss: str
    axis: int

    def __call__(self, targets: Array, what: str, examples: Examples) -> None:
        """See `TargetCheck`."""
        _check_between_0_and_1(targets, what, examples, self.loss)
        sums = targets.sum(axis=self.axis, dtype=np.float64)
        wrong = np.abs(sums - 1) > _SUM_TOLERANCE
        if not wrong.any():
            return
        others = [axis for axis in range(1, targets.ndim) if axis != self.axis and _sums_to_one(targets, axis)]
        hint = f"axis {others[0]} has this sum: give the loss axis={others[0]}" if others else _ADVICE
        raise DataError(
            f"{what} has a distribution with the sum {sums[wrong][0]:.4g} at example {_example(wrong, examples)}, "
            f"but {self.loss} needs distributions over the classes, with the sum 1 along axis {self.axis}; {hint}."
        )


_ADVICE: Final = "correct the data, or give the loss check_targets=False to accept any"

_MISSING: Final = (
    "if it marks a missing label, leave the example out, or give it any label and the sample_weight 0; "
    "check_targets=False would train on the number itself"
)


def _sums_to_one(targets: Array, axis: int) -> bool:
    return bool((np.abs(targets.sum(axis=axis, dtype=np.float64) - 1) <= _SUM_TOLERANCE).all())


def _check_between_0_and_1(targets: Array, what: str, examples: Examples, loss: str) -> None:
    outside = (targets < -_NUMBER_TOLERANCE) | (targets > 1 + _NUMBER_TOLERANCE)
    if outside.any():
        raise DataError(
            f"{what} has {float(targets[outside][0]):.6g} at example {_example(outside, examples)}, but {loss} "
            f"needs numbers from 0 to 1; {_MISSING if (targets[outside] < 0).all() else _ADVICE}."
        )


def _example(wrong: Array, examples: Examples) -> int:
    return int(examples[first_row(wrong)])


def check_labels(
    targets: Array,
    classes: int | None,
    ignore_index: int | None = None,
    *,
    what: str = "the targets",
    examples: Examples | None = None,
    unit: str = "classes",
) -> None:
    """Raise a `DataError` unless every label is an integer from 0 to ``classes - 1``."""
    verb = "have" if what == "the targets" else "has"
    if kind_of(targets.dtype) not in ("integer", "boolean"):
        raise DataError(f"{what} {verb} labels of type {targets.dtype}, but class indices must be integers.").about(
            what, got=targets.dtype
        )
    outside = targets < 0
    if classes is not None:
        outside |= targets >= classes
    if ignore_index is not None:
        outside &= targets != ignore_index
    if not outside.any():
        return
    row = first_row(outside)
    example = row if examples is None else int(examples[row])
    range_ = "at least 0" if classes is None else f"0 to {classes - 1} ({classes} {unit})"
    besides = f" or {ignore_index}, which is ignored" if ignore_index is not None else ""
    raise DataError(
        f"{what} {verb} label {targets[outside][0]} at example {example}, but labels must be {range_}{besides}."
    ).about(what, got=targets[outside][0], wanted=range_)


def checked_class_weights(given: Any) -> tuple[float, ...] | dict[int, float]:
    """Return class weights as a tuple, or by class where a dictionary is given."""
    keys = [*given] if isinstance(given, Mapping) else []
    if not all(isinstance(key, int | np.integer) and not isinstance(key, bool) and key >= 0 for key in keys):
        raise OptionError(f"class_weights has the classes {keys}; classes are integers of at least 0.").about(
            "class_weights", got=keys
        )
    try:
        found = np.asarray([*given.values()] if isinstance(given, Mapping) else given)
        weights = found.astype(np.float64) if kind_of(found.dtype) in ("integer", "float") else np.zeros((0, 0))
    except (TypeError, ValueError, OverflowError):
        weights = np.zeros((0, 0))
    if weights.ndim != 1 or isinstance(given, set | frozenset):
        raise OptionError(
            f"class_weights is a {type(given).__name__}, but must have one number per class; give a "
            "list such as [1, 2.5], or a dictionary from class to weight."
        )
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
        raise OptionError("class_weights needs finite numbers of at least 0, not all 0.")
    values = tuple(weights.tolist())
    return dict(zip(map(int, keys), values, strict=True)) if isinstance(given, Mapping) else values


def check_weights(weights: Array, what: str = "sample_weight") -> Array:
    """Return example weights after a check."""
    if weights.dtype.kind not in "fiub" or weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all():
        raise DataError(
            f"{what} is {weights.dtype} of shape {weights.shape}; it needs one finite number of at least 0 per example."
        )
    return weights


def none_negative_below(targets: Array, end: int) -> bool:
    """Return whether all integers are from 0 to ``end - 1``, in one pass: as unsigned, negative ones are large.

    >>> none_negative_below(np.array([0, 2]), 3), none_negative_below(np.array([-1, 2]), 3)
    (True, False)
    """
    if targets.dtype.kind not in "iu":
        return False
    return bool(targets.view(f"u{targets.dtype.itemsize}").max(initial=0) < end)
