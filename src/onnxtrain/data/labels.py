"""Conversion of targets: strings, integers as floats, one axis too many or too few."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np

from onnxtrain.data.conversion import Array, are_truth_values, is_number, kind_of, to_truth_values
from onnxtrain.data.files import GrowingArray
from onnxtrain.errors import DataError
from onnxtrain.errors.formatting import listed
from onnxtrain.graph.value import Dimension

_BLOCK = 2**18
"""Targets that are converted at a time."""


def learn_labels(targets: Array, classes: int | None, orders: Iterable[Sequence[str]] = ()) -> tuple[str, ...]:
    """Return the string targets in the order of their classes: a known order that has them all, else the alphabet's."""
    found = {str(label) for block in _texts(targets) for label in np.unique(block)} - {""}
    known = next((order for order in orders if found <= set(order)), sorted(found))
    is_short = classes is None or len(known) <= classes
    labels = tuple(str(label) for label in known if is_short or label in found)
    if len(labels) < 2:
        raise DataError(
            f"all targets have the same label, {some_labels(labels)}; classification needs at least two."
        ).about("targets", got=labels[0])
    if classes is not None and len(labels) > classes:
        raise DataError(
            f"the targets have {len(labels)} different labels ({some_labels(labels)}), but the model has {classes} "
            "classes."
        ).about("targets", got=len(labels), wanted=classes)
    return labels


def is_order_known(labels: Iterable[str], orders: Iterable[Sequence[str]]) -> bool:
    """Return whether one of the known orders has all labels, so that none is assumed."""
    found = set(labels)
    return any(found <= set(order) for order in orders)


def doubts(labels: Sequence[str], classes: int | None, recorded: Sequence[str]) -> list[str]:
    """Return sentences about an order of labels that training learned, where it may not be that of the model."""
    found = []
    if classes is not None and len(labels) < classes:
        found.append(fewer_labels(labels, classes))
    if recorded and not set(labels) <= set(recorded):
        found.append(
            f"The file says that its classes are {some_labels(recorded)}; training makes them {some_labels(labels)}. "
            "Other tools go on reading the old names."
        )
    moved = _first_out_of_order(labels)
    if moved is not None:
        found.append(
            "The labels are numbers in alphabetical order, as in PyTorch and Keras: "
            f"{labels[moved]!r} is class {moved}. For the order of the numbers give them as class indices, or set "
            "trainer.labels."
        )
    return found


def _first_out_of_order(labels: Sequence[str]) -> int | None:
    """Return the first class of integers in alphabetical order that the order of their values moves; else ``None``."""
    if not all(label.isdecimal() and len(label) < 19 for label in labels) or list(labels) != sorted(labels):
        return None
    pairs = enumerate(zip(labels, sorted(labels, key=int), strict=True))
    return next((index for index, (one, two) in pairs if one != two), None)


def assumed_order(labels: Sequence[str]) -> str:
    """Return the warning about an evaluation that takes the alphabetical order of labels for that of the classes."""
    return (
        f"The file does not say which label is which class; the labels of the targets are taken in alphabetical order: "
        f"{some_labels(labels)}. Set trainer.labels for another order."
    )


def fewer_labels(labels: Sequence[str], classes: int) -> str:
    """Return the warning about data with fewer labels than the model has classes."""
    return (
        f"The model has {classes} classes, but the targets have {len(labels)} labels ({some_labels(labels)}), "
        f"which become its classes 0 to {len(labels) - 1}. If they are other classes of the model, set trainer.labels "
        f"to the labels of all {classes} classes in order; if there are no others, replace the head with one of "
        f"{len(labels)} classes: onnxtrain.replace_head or --new-head {len(labels)}."
    )


def no_labels(labels: Sequence[str], classes: int | None) -> str:
    """Return the error about labels whose classes are unknown."""
    has = f"has {classes} classes" if classes is not None else "has no labels"
    return (
        f"the targets are the labels {some_labels(labels)}, but the model {has}, and their classes are unknown; keep "
        "the .labels.json file that onnxtrain writes beside a model, or give class indices."
    )


def as_groups(targets: Array) -> Array:
    """Convert labels that only tell which examples belong together: texts to hashes, [N, 1] to [N]."""
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if kind_of(targets.dtype) != "string":
        return as_classes(targets, (None,) * (targets.ndim + 1), 1)
    if (targets == "").any():
        raise _without_label(targets, int((targets == "").argmax()), "empty")
    texts, positions = np.unique(targets.astype(str), return_inverse=True)
    hashes = [blake2b(str(text).encode(), digest_size=7).digest() for text in texts]
    return np.array([int.from_bytes(each) for each in hashes], np.int64)[positions.reshape(targets.shape)]


def to_indices(targets: Array, labels: Sequence[str], missing: float | None = None) -> Array:
    """Convert string labels to class indices; empty ones become the missing label, or are refused."""
    order = np.argsort(np.asarray(labels, dtype=str))
    known = np.asarray(labels, dtype=str)[order]
    found = GrowingArray((), np.dtype(np.float64 if missing is not None and np.isnan(missing) else np.int64))
    for before, texts in zip(itertools.count(step=_BLOCK), _texts(targets), strict=False):
        positions = np.minimum(np.searchsorted(known, texts), len(known) - 1)
        empty = (texts == "") | ((texts == str(missing)) & (known[positions] != texts))
        if empty.any() and missing is None:
            raise _without_label(targets, before + int(empty.argmax()), "empty")
        wrong = (known[positions] != texts) & ~empty
        if wrong.any():
            raise DataError(
                f"the target {str(texts[wrong][0])!r} is not a label of this model; its labels are "
                f"{some_labels(labels)}."
            ).about("targets", got=str(texts[wrong][0]), wanted=[*labels])
        found.append(np.where(empty, missing or 0, order[positions]) if empty.any() else order[positions])
    return found.finish().reshape(targets.shape)


def are_labels(targets: Array, labels: Sequence[str], rank: int) -> bool:
    """Return whether targets are class labels: strings, or numbers where the labels are numbers as strings."""
    kind = kind_of(targets.dtype)
    numbers = kind in ("integer", "float") and targets.ndim == rank
    return kind == "string" or (numbers and any(map(is_number, labels)))


def _texts(targets: Array) -> Iterator[Array]:
    """Convert targets to strings, block by block, since a large array is a mapped file."""
    for block in _blocks(targets):
        if kind_of(block.dtype) == "float" and (block == np.floor(block)).all():
            block = block.astype(np.int64)
        yield block.astype(str)


def _blocks(targets: Array) -> Iterator[Array]:
    flat = targets.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        yield flat[start : start + _BLOCK]


def some_labels(labels: Sequence[str]) -> str:
    """Format labels for a message."""
    return listed(map(repr, labels), 8, counted=False)


def as_classes(targets: Array, prediction: Sequence[Dimension], axis: int, missing: int | None = None) -> Array:
    """Convert labels to the form of a classification loss: [N, 1] to [N], integral floats, and NaN, to integers."""
    rank, shape = len(prediction), targets.shape
    if targets.ndim == rank and axis < rank and prediction[axis] != 1:
        last = prediction[-1]
        if shape[axis] == 1:
            targets = targets.squeeze(axis)
        elif shape[-1] == 1 and isinstance(last, int) and last != 1:
            targets = targets[..., 0]
    if targets.ndim == rank - 1 and kind_of(targets.dtype) == "float":
        if all(map(_are_whole, _blocks(targets))):
            return GrowingArray.of(targets, np.dtype(np.int64)).finish()
        for before, block in zip(itertools.count(step=_BLOCK), _blocks(targets), strict=False):
            if missing is None and np.isnan(block).any():
                raise _without_label(targets, before + int(np.isnan(block).argmax()), "nan")
        if missing is not None and all(_are_whole(np.nan_to_num(block, posinf=0.5)) for block in _blocks(targets)):
            return GrowingArray.of(
                targets, np.dtype(np.int64), lambda block: np.where(np.isnan(block), missing, block)
            ).finish()
    return targets


def _without_label(targets: Array, element: int, shown: str) -> DataError:
    return DataError(
        f"the targets have no label at example {element // max(1, math.prod(targets.shape[1:]))} ({shown}): leave "
        "such examples out, or give them the label that the loss ignores (ignore_index, -100 by default)."
    )


def count_missing(targets: Array) -> int:
    """Return how many targets are missing: NaN, or empty texts."""
    kind = kind_of(targets.dtype)
    if kind not in ("float", "string"):
        return 0
    return sum(int(np.count_nonzero(np.isnan(block) if kind == "float" else block == "")) for block in _blocks(targets))


def _are_whole(block: Array) -> bool:
    return bool((np.abs(block) < 2.0**63).all() and (block == np.floor(block)).all())  # false for NaN, too


def as_numbers(targets: Array, prediction: Sequence[Dimension]) -> Array:
    """Add or remove a last axis of size 1, if the targets then have the rank of the prediction."""
    rank = len(prediction)
    if kind_of(targets.dtype) == "string" and all(map(are_truth_values, _blocks(targets))):
        targets = GrowingArray.of(targets, np.dtype(bool), to_truth_values).finish()
    if rank and targets.ndim == rank - 1 and prediction[-1] == 1:
        return targets[..., None]
    if targets.ndim == rank + 1 and targets.shape[-1] == 1:
        return targets[..., 0]
    return targets
