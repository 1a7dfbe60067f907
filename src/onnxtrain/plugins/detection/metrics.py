"""Mean average precision of detectors, as COCO defines it."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import numpy as np

from onnxtrain.data.conversion import Array
from onnxtrain.errors import OptionError
from onnxtrain.metrics.base import Detections, LossMetric, MetricInput, NamedMetric

THRESHOLDS: Final = np.linspace(0.5, 0.95, 10)
"""Least IoU of a box with a true one to count as found."""

_RECALLS: Final = np.linspace(0, 1, 101)
_MOST_BOXES: Final = 100
"""Boxes of an image that count: those of highest scores."""
_MOST_CANDIDATES: Final = 1000
_LEAST_SCORE: Final = 1e-3
_DUPLICATE: Final = 0.7
"""IoU above which the box of lower score is removed."""


class _Found(NamedTuple):
    """Predicted boxes of some images, and the number of true ones."""

    labels: Array
    scores: Array
    right: Array
    true: Array


def detection_metric(metric_input: MetricInput, name: str, count: int) -> NamedMetric:
    """Return a mean average precision over the first thresholds for the predictions of a loss."""
    decode = metric_input.detections
    if decode is None:
        raise OptionError(
            f"The metric {name} is for boxes, but the loss {metric_input.loss} predicts none; it goes with yolo and "
            "detr."
        ).about(name, got=metric_input.loss)
    return NamedMetric(
        name, lambda y_true, y_pred: _measured(y_true, decode(y_pred)), _joined, lambda found: _mean(found, count)
    )


MAP: Final = LossMetric(functools.partial(detection_metric, name="map", count=len(THRESHOLDS)))
MAP_50: Final = LossMetric(functools.partial(detection_metric, name="map_50", count=1))


def _measured(y_true: Array, predicted: Detections) -> _Found:
    classes = predicted.scores.shape[-1]
    labels, scores, right = [], [], []
    true = np.zeros(classes, np.int64)
    for image, rows in enumerate(y_true):
        kinds = rows[:, 0].astype(np.int64)
        centre, half = rows[:, 1:3].astype(np.float64), rows[:, 3:].astype(np.float64) / 2
        edges = np.concatenate([centre - half, centre + half], 1)
        boxes, own, kind = _kept(predicted.boxes[image], predicted.scores[image], predicted.overlapping)
        true += np.bincount(kinds[kinds >= 0], minlength=classes)
        for label in np.unique(kind):
            chosen = kind == label
            labels.append(kind[chosen])
            scores.append(own[chosen])
            right.append(_matches(boxes[chosen], edges[kinds == label]))
    return _Found(
        np.concatenate([np.zeros(0, np.int64), *labels]),
        np.concatenate([np.zeros(0), *scores]),
        np.concatenate([np.zeros((0, len(THRESHOLDS)), bool), *right]),
        true,
    )


def _kept(boxes: Array, scores: Array, overlapping: bool) -> tuple[Array, Array, Array]:
    """Return the boxes of an image that count, their scores and classes, highest scores first."""
    places = np.flatnonzero(scores.reshape(-1) >= _LEAST_SCORE)
    values = scores.reshape(-1)[places]
    order = np.argsort(-values, kind="stable")[:_MOST_CANDIDATES]
    rows, kinds = np.divmod(places[order], scores.shape[-1])
    found, values = boxes[rows], values[order]
    if overlapping:
        ious = box_iou(found, found) * (kinds[:, None] == kinds)
        keep = np.ones(len(found), bool)
        for index in range(len(found)):
            if keep[index]:
                keep[index + 1 :] &= ious[index, index + 1 :] <= _DUPLICATE
        found, values, kinds = found[keep], values[keep], kinds[keep]
    return found[:_MOST_BOXES], values[:_MOST_BOXES], kinds[:_MOST_BOXES]


def box_iou(one: Array, other: Array) -> Array:
    """Return the IoU [K, L] of boxes by their edges [K, 4] and [L, 4]; 0 without area.

    >>> box_iou(np.array([[0, 0, 2, 2]]), np.array([[1, 0, 3, 2], [5, 5, 6, 6]]))
    array([[0.33333333, 0.        ]])
    """
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    both = np.prod(np.maximum(high - low, 0), -1)
    areas = [np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), -1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1] - both
    found: Array = np.divide(both, union, out=np.zeros(both.shape), where=union > 0)
    return found


def _matches(boxes: Array, true: Array) -> Array:
    """Return whether each box finds a true one that no box of a higher score has found, [K, thresholds]."""
    ious = box_iou(boxes, true)
    right = np.zeros((len(boxes), len(THRESHOLDS)), bool)
    for column, threshold in enumerate(THRESHOLDS):
        free = np.ones(len(true), bool)
        for row in range(len(boxes) if len(true) else 0):
            best = int(np.argmax(np.where(free, ious[row], -1)))
            if free[best] and ious[row, best] >= threshold:
                free[best] = False
                right[row, column] = True
    return right


def _joined(one: _Found, other: _Found) -> _Found:
    labels, scores, right = (np.concatenate(pair) for pair in zip(one[:3], other[:3], strict=True))
    return _Found(labels, scores, right, one.true + other.true)


def _mean(found: _Found, count: int) -> float:
    """Return the mean over classes with true boxes, and over thresholds, of the average precision."""
    values = []
    for label in np.flatnonzero(found.true):
        own = found.labels == label
        order = np.argsort(-found.scores[own], kind="stable")
        for right in found.right[own][order, :count].T:
            hits = np.cumsum(right)
            precision = hits / np.arange(1, len(hits) + 1)
            best = np.maximum.accumulate(precision[::-1])[::-1]  # the highest at this recall or above
            at = np.searchsorted(hits / found.true[label], _RECALLS)
            values.append(float(np.append(best, 0.0)[np.minimum(at, len(best))].mean()))
    return float(np.mean(values)) if values else float("nan")
