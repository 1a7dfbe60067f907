"""Targets as people have them: texts, whole numbers as floats, one axis too many or too few."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from onnxtrain.errors import DataError, ModelError
from onnxtrain.graph.value import Dimension
from onnxtrain.model.file import ModelFile
from onnxtrain.model.small_files import parse_json, read_text
from onnxtrain.training.data.cells import is_number
from onnxtrain.training.data.conversion import Array, kind_of
from onnxtrain.training.data.growing import GrowingArray

LABELS = "onnxtrain.labels"
"""The key of labels in a model's metadata."""

_BLOCK = 2**18
"""How many targets are looked at at a time."""


def learn_labels(targets: Array, classes: int | None) -> tuple[str, ...]:
    """The texts among targets in alphabetical order: the first is class 0.

    Raises:
        DataError: There is only one, or there are more than classes.
    """
    labels = tuple(sorted({str(label) for block in _texts(targets) for label in np.unique(block)}))
    if len(labels) < 2:
        raise DataError(f"the targets hold one text only ({_some(labels)}), so there is nothing to tell apart.")
    if classes is not None and len(labels) > classes:
        raise DataError(
            f"the targets hold {len(labels)} different texts ({_some(labels)}), but the model has {classes} classes."
        )
    return labels


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
                f"the target {str(texts[wrong][0])!r} is none of the labels of this model: {_some(labels)}."
            )
        found.append(order[places])
    return found.finish().reshape(targets.shape)


def are_labels(targets: Array, labels: Sequence[str], rank: int) -> bool:
    """Whether targets stand for classes by their labels: texts, or numbers where a label is the text of a number.

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


def _some(labels: Sequence[str]) -> str:
    return ", ".join(map(repr, labels[:8])) + (", ..." if len(labels) > 8 else "")


def labels_file(model: Path) -> Path:
    """Where the labels of a model are kept: ``tuned.labels.json`` beside ``tuned.onnx``."""
    return model.with_suffix(".labels.json")


def labels_text(labels: Sequence[str]) -> str:
    """Labels as they are written: a JSON list."""
    return json.dumps(list(labels), ensure_ascii=False, indent=1)


def read_labels(model: ModelFile) -> tuple[str, ...] | None:
    """The labels beside a model, else those in its metadata; ``None`` where there are none.

    Raises:
        ModelError: The file or the entry does not hold a list of texts.
    """
    path = None if model.path is None else labels_file(model.path)
    try:
        if path is not None and os.path.lexists(path):
            where, text = repr(str(path)), read_text(path)
        else:
            texts = [entry.value for entry in model.proto.metadata_props if entry.key == LABELS]
            if not texts:
                return None
            where, text = f"The model's metadata entry {LABELS!r}", texts[0]
        found = parse_json(text)
    except (ValueError, OSError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ModelError(f"The labels in {str(path)!r} cannot be read: {reason}.") from error
    if not isinstance(found, list) or not found or not all(isinstance(label, str) for label in found):
        raise ModelError(f"{where} needs a JSON list of texts, the labels of the classes in order.")
    return tuple(found)


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
    """Numbers in the shape of the prediction, where only a last axis of size 1 is missing, or is too many."""
    rank = len(prediction)
    if rank and targets.ndim == rank - 1 and prediction[-1] == 1:
        return targets[..., None]
    if targets.ndim == rank + 1 and targets.shape[-1] == 1:
        return targets[..., 0]
    return targets
