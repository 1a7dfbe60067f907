"""Gradients of the losses of detectors by PyTorch's autograd, with the assignments of NumPy and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

import onnxtrain
from conformance import detection
from onnxtrain.losses import YOLO
from plugins.detection.detectors import BOXES, CROWD, HEAD, LOGITS, SLOTS, R, X, model, prediction

torch = pytest.importorskip("torch")


def corners(sides):
    return torch.cat([sides[..., :2] - sides[..., 2:] / 2, sides[..., :2] + sides[..., 2:] / 2], -1)


def overlaps(a, b):
    """IoU, union, and the box around both."""
    both = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - both
    around = torch.cat([torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])], -1)
    return both / union, union, around


def giou(a, b):
    iou, union, around = overlaps(a, b)
    area = (around[..., 2:] - around[..., :2]).prod(-1)
    return iou - (area - union) / area


def ciou(a, b):
    iou, _, around = overlaps(a, b)
    apart = ((a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2).square().sum(-1)
    aspect = [torch.atan((box[..., 2] - box[..., 0]) / (box[..., 3] - box[..., 1])) for box in (a, b)]
    v = 4 / math.pi**2 * (aspect[0] - aspect[1]) ** 2
    return iou - apart / (around[..., 2:] - around[..., :2]).square().sum(-1) - v * (v / (v - iou + 1)).detach()


def yolo(levels):
    found = torch.cat([level.flatten(2) for level in levels], 2).transpose(1, 2)
    fixed = prediction(HEAD)
    total, weight = 0.0, 0.0
    for image, truth in enumerate(BOXES):
        unit = fixed[image, 0, -2:]
        true = [(int(box[0]), detection.edges(*box[1:]) / np.tile(unit, 2)) for box in truth if box[0] >= 0]
        rows = [detection.decoded(row, R, unit) for row in fixed[image]]
        owners = detection.aligned(rows, true, 10, 0.5, 1.0)
        z = found[image, :, 4 * R :]
        target = torch.zeros_like(z)
        for a, (j, w) in owners.items():
            label, box = true[j]
            target[a, label] = w
            weight += w
            distances = found[image, a, : 4 * R].reshape(4, R)
            means = distances.softmax(-1) @ torch.arange(R, dtype=z.dtype)
            centre, cell = (torch.tensor(part) for part in rows[a][2:])
            own = torch.cat([centre - means[:2] * cell, centre + means[2:] * cell])
            total = total + 7.5 * w * (1 - ciou(own, torch.tensor(box)))
            sides = np.concatenate([rows[a][2] - box[:2], box[2:] - rows[a][2]]) / np.tile(rows[a][3], 2)
            sides = torch.tensor(np.clip(sides, 0, R - 1.01))
            low = sides.long()
            entropies = [torch.nn.functional.cross_entropy(distances, low + i, reduction="none") for i in (0, 1)]
            total = total + 1.5 * w * (entropies[0] * (low + 1 - sides) + entropies[1] * (sides - low)).mean()
        total = total + 0.5 * torch.nn.functional.binary_cross_entropy_with_logits(z, target, reduction="sum")
    return total / max(1.0, weight)


def detr(values, boxes):
    optimize = pytest.importorskip("scipy.optimize")
    logits, sides = values
    classes = logits.shape[-1] - 1
    kinds = torch.full(logits.shape[:2], classes)
    total, number = 0.0, int((boxes[..., 0] >= 0).sum())
    for image, truth in enumerate(boxes):
        real = torch.tensor(truth[truth[:, 0] >= 0], dtype=torch.float64)
        if not len(real):
            continue
        label = real[:, 0].long()
        cost = 5 * torch.cdist(sides[image], real[:, 1:], p=1) - logits[image].softmax(-1)[:, label]
        cost = cost - 2 * giou(corners(sides[image])[:, None], corners(real[:, 1:])[None])
        slot, box = optimize.linear_sum_assignment(cost.detach().numpy())
        kinds[image, slot] = label[box]
        own, true = sides[image, slot], real[box, 1:]
        total = total + 5 * (own - true).abs().sum() + 2 * (1 - giou(corners(own), corners(true))).sum()
    factors = torch.ones(classes + 1, dtype=logits.dtype)
    factors[-1] = 0.1
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), kinds, factors) + total / number


@pytest.mark.parametrize(
    ("loss", "values", "boxes", "other"),
    [
        (YOLO(reg_max=R, beta=1.0), HEAD, BOXES, yolo),
        ("detr", [LOGITS, SLOTS], BOXES, lambda values: detr(values, BOXES)),
        ("detr", [LOGITS, SLOTS], CROWD, lambda values: detr(values, CROWD)),
    ],
    ids=["yolo", "detr", "more boxes than slots"],
)
def test_gradients_are_those_of_torch(loss, values, boxes, other):
    leaves = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
    expected = other(leaves)
    expected.backward()
    trainer = onnxtrain.Trainer(model(values), loss=loss, optimizer="sgd(lr=1.0)", train=["*_weight"])
    assert trainer.train_step(X, boxes) == pytest.approx(expected.item(), rel=1e-5)
    for index, (value, leaf) in enumerate(zip(values, leaves, strict=True)):
        np.testing.assert_allclose(value - trainer.parameters[f"y{index}_weight"], leaf.grad, atol=2e-6, rtol=1e-4)
