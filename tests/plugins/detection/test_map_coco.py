"""Mean average precision equal to that of pycocotools."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from onnxtrain.metrics.base import Detections, MetricInput
from onnxtrain.plugins.detection.metrics import MAP, MAP_50

COCO = pytest.importorskip("pycocotools.coco")
EVALUATION = pytest.importorskip("pycocotools.cocoeval")

CLASSES = 3


def scene(seed):
    """Return true boxes [N, M, 5], and predictions [N, K, 4 + classes] near some of them."""
    rng = np.random.default_rng(seed)
    true = np.full((8, 5, 5), -1.0)
    predictions = np.zeros((8, 12, 4 + CLASSES))
    for image in range(8):
        for row in range(rng.integers(0, 6)):
            size = rng.uniform(0.1, 0.4, 2)
            true[image, row] = rng.integers(CLASSES), *(size / 2 + rng.random(2) * (1 - size)), *size
        for row in range(12):
            x, y, width, height = true[image, row % 5, 1:] if true[image, row % 5, 0] >= 0 else rng.uniform(0.2, 0.5, 4)
            x, y, width, height = np.array([x, y, width, height]) * rng.uniform(0.85, 1.15, 4)
            predictions[image, row, :4] = x - width / 2, y - height / 2, x + width / 2, y + height / 2
            label = int(true[image, row % 5, 0]) if rng.random() < 0.7 else rng.integers(CLASSES)
            predictions[image, row, 4 + label] = rng.uniform(0.1, 1)
    return true, predictions


def by_coco(true, predictions):
    """Return the mean average precision over ten thresholds, and at 0.5."""
    data = {"images": [], "annotations": [], "categories": [{"id": label + 1} for label in range(CLASSES)]}
    found = []
    for image, (rows, boxes) in enumerate(zip(true, predictions, strict=True)):
        data["images"].append({"id": image})
        for label, x, y, width, height in rows[rows[:, 0] >= 0]:
            data["annotations"].append(
                {"id": len(data["annotations"]) + 1, "image_id": image, "category_id": int(label) + 1, "iscrowd": 0,
                 "bbox": [x - width / 2, y - height / 2, width, height], "area": width * height}
            )  # fmt: skip
        for left, top, right, bottom, *scores in boxes:
            for label in np.flatnonzero(scores):
                box = [left, top, right - left, bottom - top]
                found.append({"image_id": image, "category_id": int(label) + 1, "bbox": box, "score": scores[label]})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO.COCO()
        coco.dataset = data
        coco.createIndex()
        evaluation = EVALUATION.COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[:2]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pycocotools
def test_equal_to_pycocotools(seed):
    true, predictions = scene(seed)
    decode = lambda y: Detections(y[..., :4], y[..., 4:], False)  # noqa: E731
    metric_input = MetricInput("yolo", None, detections=decode)
    found = [metric.of(metric_input)(true, predictions) for metric in (MAP, MAP_50)]
    np.testing.assert_allclose(found, by_coco(true, predictions), rtol=1e-9)
    assert 0.05 < found[0] < found[1] < 0.95
