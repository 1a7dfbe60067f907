"""Mean average precision: values worked out by hand, and batches."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain.losses import YOLO
from onnxtrain.metrics.base import Detections, MetricInput
from onnxtrain.metrics.choice import metric_for_loss
from onnxtrain.plugins.detection.metrics import MAP, MAP_50
from sentences import raises_sentence

TRUE = np.array(
    [[(0, 0.25, 0.25, 0.5, 0.5), (0, 0.75, 0.75, 0.5, 0.5)], [(1, 0.5, 0.5, 1, 1), (-1, 0, 0, 0, 0)]], np.float32
)
FIRST, SECOND, WHOLE = (0, 0, 0.5, 0.5), (0.5, 0.5, 1, 1), (0, 0, 1, 1)


def measured(name, boxes, scores, overlapping=False, true=TRUE):
    """The metric for predictions [N, K, 4 + 2]."""
    decode = lambda y: Detections(y[..., :4], y[..., 4:], overlapping)  # noqa: E731
    metric = {"map": MAP, "map_50": MAP_50}[name].of(MetricInput("yolo", None, detections=decode))
    predictions = np.concatenate([np.array(boxes, float), np.array(scores, float)], -1)
    whole = metric(true, predictions)
    state = metric.start()
    for row in range(len(true)):
        state = metric.update(state, true[row : row + 1], predictions[row : row + 1])
    np.testing.assert_equal(metric.result(state), whole)
    return whole


def test_all_boxes_found():
    scores = [[(0.9, 0), (0.8, 0)], [(0, 0.7), (0, 0)]]
    assert measured("map", [[FIRST, SECOND], [WHOLE, WHOLE]], scores) == 1


def test_a_missing_box_and_a_wrong_one():
    # Class 0: the best box is wrong, the second right: precision 1/2 up to recall 1/2, 0 beyond: 51 of 101 recalls.
    scores = [[(0.8, 0), (0.9, 0)], [(0, 0.7), (0, 0)]]
    wrong = (0.1, 0.6, 0.3, 0.9)
    found = measured("map_50", [[FIRST, wrong], [WHOLE, WHOLE]], scores)
    assert found == pytest.approx((51 / 101 * 0.5 + 1) / 2)


def test_the_mean_over_thresholds():
    # An IoU of 0.8 counts at 0.5, 0.55, ..., 0.8: seven of ten thresholds.
    narrow = (0, 0, 0.8, 1)
    scores = [[(0.9, 0), (0.8, 0)], [(0, 0.7), (0, 0)]]
    boxes = [[FIRST, SECOND], [narrow, narrow]]
    assert measured("map_50", boxes, scores) == 1
    assert measured("map", boxes, scores) == pytest.approx((1 + 0.7) / 2, abs=0.051)


def test_duplicates_count_as_wrong_unless_they_are_removed():
    near = (0, 0, 0.5, 0.49)
    scores = [[(0.9, 0), (0.8, 0), (0.7, 0)], [(0, 0.7), (0, 0), (0, 0)]]
    boxes = [[FIRST, near, SECOND], [WHOLE, WHOLE, WHOLE]]
    assert measured("map_50", boxes, scores) == pytest.approx(((51 + 50 * 2 / 3) / 101 + 1) / 2)
    assert measured("map_50", boxes, scores, overlapping=True) == 1


def test_without_boxes_or_predictions():
    scores = [[(0, 0)], [(0, 0)]]
    assert measured("map", [[FIRST], [WHOLE]], scores) == 0
    assert np.isnan(measured("map", [[FIRST], [WHOLE]], scores, true=np.full_like(TRUE, -1)))


def test_it_is_for_detectors_alone():
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="mse")
    with raises_sentence("metric_for_boxes", what="map", got="mean_squared_error"):
        trainer.evaluate(np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float32), metrics="map")
    boxes = MetricInput("yolo", None, detections=lambda y: Detections(y, y))
    with raises_sentence("accuracy_of_boxes", what="accuracy", got="yolo"):
        metric_for_loss(boxes, "accuracy")
    with raises_sentence(
        "unknown_metric", what="metrics", got="mAP", metrics="map, map_50", nearest=" The nearest is 'map'."
    ):
        metric_for_loss(boxes, "mAP")


def test_the_boxes_of_a_head_are_decoded():
    logits = np.full((1, 1, 4 * 4 + 1 + 4), -50.0)
    for side, distance in enumerate((1, 0, 2, 3)):
        logits[0, 0, 4 * side + distance] = 50
    logits[0, 0, 16] = 0
    logits[0, 0, 17:] = 0.375, 0.5, 0.25, 0.2
    found = YOLO(reg_max=4).decode(logits)
    np.testing.assert_allclose(found.boxes[0, 0], [0.125, 0.5, 0.875, 1.1])
    np.testing.assert_allclose(found.scores, 0.5)
