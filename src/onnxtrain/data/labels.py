"""Targets as people have them: texts, whole numbers as floats, one axis too many or too few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onnxtrain.data.conversion import Array, are_truth_values, is_number, kind_of, to_truth_values
from onnxtrain.data.files import GrowingArray
from onnxtrain.errors import DataError
from onnxtrain.ir.value import Dimension

_BLOCK = 2**18
"""Number of targets that are examined at a time."""


def learn_labels(targets: Array, classes: int | None, declared: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the texts among targets in alphabetical order: the first is class 0.

    Args:
        targets: The targets.
        classes: How many classes the model has, where that is known.
        declared: The labels that the data declare, also those without an example. They count unless they are more than
            the classes.

    Raises:
        DataError: There is only one, or there are more than classes.
    """
    found = {str(label) for block in _texts(targets) for label in np.unique(block)}
    if declared and (classes is None or len(declared) <= classes):
        found |= set(declared)
    labels = tuple(sorted(found))
    if len(labels) < 2:
        raise DataError(f"the targets hold one text only ({some_labels(labels)}), so there is nothing to tell apart.")
    if classes is not None and len(labels) > classes:
        raise DataError(
            f"the targets hold {len(labels)} different texts ({some_labels(labels)}), but the model has {classes} "
            "classes."
        )
    return labels


def fewer_labels(labels: Sequence[str], classes: int) -> str:
    """Return what to say where data have fewer labels than the model has classes."""
    return (
        f"The model tells {classes} classes apart, but the targets hold {len(labels)} labels ({some_labels(labels)}), "
        f"which become its classes 0 to {len(labels) - 1}. Where they are other classes of it, set trainer.labels to "
        f"the labels of all {classes} in their order; where they are all, give the model a head of {len(labels)} "
        f"classes with onnxtrain.replace_head or --new-head {len(labels)}."
    )


def no_labels(labels: Sequence[str], classes: int | None) -> str:
    """Return what to say where nothing tells which label is which class."""
    has = f"has {classes} classes" if classes is not None else "came without its labels"
    return (
        f"the targets hold the labels {some_labels(labels)}, but the model {has}, and nothing tells which label is "
        "which class; keep the .labels.json file that onnxtrain writes beside a model, or give the numbers of classes."
    )


def to_indices(targets: Array, labels: Sequence[str]) -> Array:
    """The classes of texts.

    Raises:
        DataError: A text is none of the labels.
    """
    order = np.argsort(np.asarray(labels, dtype=str))
    known = np.asarray(labels, dtype=str)[order]
    found = GrowingArray((), np.dtype(np.int64))
    for texts in _texts(targets):
        places = np.minimum(np.searchsorted(known, texts), len(known) - 1)
        wrong = known[places] != texts
        if wrong.any():
            raise DataError(
                f"the target {str(texts[wrong][0])!r} is none of the labels of this model: {some_labels(labels)}."
            )
        found.append(order[places])
    return found.finish().reshape(targets.shape)


def are_labels(targets: Array, labels: Sequence[str], rank: int) -> bool:
    """Return whether targets are class labels: texts, or numbers where a label is the text of a number.

    Other numbers are those of the classes, from zero; more axes than ``rank`` make them distributions over classes.
    """
    kind = kind_of(targets.dtype)
    numbers = kind in ("integer", "float") and targets.ndim == rank
    return kind == "string" or (numbers and any(map(is_number, labels)))


def _texts(targets: Array) -> Iterator[Array]:
    """Targets as texts, some at a time: those of a large file are in a file themselves."""
    for block in _blocks(targets):
        if kind_of(block.dtype) == "float" and (block == np.floor(block)).all():
            block = block.astype(np.int64)
        yield block.astype(str)


def _blocks(targets: Array) -> Iterator[Array]:
    flat = targets.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        yield flat[start : start + _BLOCK]


def some_labels(labels: Sequence[str]) -> str:
    """List labels as a message shows them."""
    return ", ".join(map(repr, labels[:8])) + (", ..." if len(labels) > 8 else "")


def as_classes(targets: Array, prediction: Sequence[Dimension], axis: int) -> Array:
    """Labels as a loss on classes takes them: [N, 1] as [N], and floats that are whole numbers as integers.

    Args:
        targets: Targets of any form; distributions over classes stay as they are.
        prediction: The shape of the scores, with the classes on ``axis``.
        axis: The axis of the classes.
    """
    rank, shape = len(prediction), targets.shape
    if targets.ndim == rank and prediction[axis] != 1:
        last = prediction[-1]
        if shape[axis] == 1:
            targets = targets.squeeze(axis)
        elif shape[-1] == 1 and isinstance(last, int) and last != 1:
            targets = targets[..., 0]
    if targets.ndim == rank - 1 and kind_of(targets.dtype) == "float" and all(map(_are_whole, _blocks(targets))):
        targets = GrowingArray.of(targets, np.dtype(np.int64)).finish()
    return targets


def _are_whole(block: Array) -> bool:
    return bool((np.abs(block) < 2.0**63).all() and (block == np.floor(block)).all())  # false for NaN, too


def as_numbers(targets: Array, prediction: Sequence[Dimension]) -> Array:
    """Return numbers in the shape of the prediction, where only a last axis of size 1 is missing, or is too many.

    The texts true and false become 1 and 0.
    """
    rank = len(prediction)
    if kind_of(targets.dtype) == "string" and all(map(are_truth_values, _blocks(targets))):
        targets = GrowingArray.of(targets, np.dtype(bool), to_truth_values).finish()
    if rank and targets.ndim == rank - 1 and prediction[-1] == 1:
        return targets[..., None]
    if targets.ndim == rank + 1 and targets.shape[-1] == 1:
        return targets[..., 0]
    return targets
