"""Losses of object detectors in NumPy, box by box, without onnxtrain: assignment, overlap, and the terms."""

from __future__ import annotations

import itertools
import math

import numpy as np

Array = np.ndarray
Box = Array
"""Edges: left, top, right, bottom."""


def softmax(z: Array) -> Array:
    """Softmax along the last axis."""
    e = np.exp(z - z.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def edges(x: float, y: float, width: float, height: float) -> Box:
    """Box of a centre and a size."""
    return np.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2])


def area(box: Box) -> float:
    """Area of a box; 0 where it is turned inside out."""
    return float(max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]))


def around(a: Box, b: Box) -> Box:
    """Smallest box around two."""
    return np.concatenate([np.minimum(a[:2], b[:2]), np.maximum(a[2:], b[2:])])


def iou(a: Box, b: Box) -> float:
    """Intersection over union."""
    both = area(np.concatenate([np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])]))
    union = area(a) + area(b) - both
    return both / union if union else 0.0


def giou(a: Box, b: Box) -> float:
    """IoU less the part of the box around both that neither covers."""
    whole, ratio = area(around(a, b)), iou(a, b)
    union = (area(a) + area(b)) / (1 + ratio)
    return ratio - (whole - union) / whole


def _aspect(a: Box, b: Box) -> float:
    angles = [math.atan((box[2] - box[0]) / max(box[3] - box[1], 1e-7)) for box in (a, b)]
    return 4 / math.pi**2 * (angles[0] - angles[1]) ** 2


def ciou(a: Box, b: Box, fixed: Box | None = None) -> float:
    """IoU less the squared distance of the centres by the squared diagonal around both, less a term of the aspects.

    ``fixed`` is ``a`` for the factor of that term, which has no gradient.
    """
    whole = around(a, b)
    centres = (a[:2] + a[2:] - b[:2] - b[2:]) / 2
    at = a if fixed is None else fixed
    v, fixed_v = _aspect(a, b), _aspect(at, b)
    factor = fixed_v / (fixed_v - iou(at, b) + 1 + 1e-7)
    return iou(a, b) - float(centres @ centres) / float(np.sum((whole[2:] - whole[:2]) ** 2)) - v * factor


def decoded(row: Array, reg_max: int, unit: Array) -> tuple[Box, Array, Array, Array]:
    """Box, logits, centre and cell size of an anchor, in cells of the first anchor."""
    centre, cell = row[-4:-2] / unit, row[-2:] / unit
    means = softmax(row[: 4 * reg_max].reshape(4, reg_max)) @ np.arange(reg_max)
    return np.concatenate([centre - means[:2] * cell, centre + means[2:] * cell]), row[4 * reg_max : -4], centre, cell


def aligned(
    rows: list[tuple[Box, Array, Array, Array]],
    true: list[tuple[int, Box]],
    topk: int,
    alpha: float,
    beta: float,
) -> dict[int, tuple[int, float]]:
    """Box and weight of the anchors of an image: task-aligned assignment."""
    overlaps = np.zeros((len(true), len(rows)))
    alignment = np.zeros_like(overlaps)
    for j, (label, box) in enumerate(true):
        for a, (found, logits, centre, _) in enumerate(rows):
            if min(*(centre - box[:2]), *(box[2:] - centre)) > 1e-9:
                overlaps[j, a] = max(0.0, ciou(box, found))
                alignment[j, a] = (1 / (1 + math.exp(-logits[label]))) ** alpha * overlaps[j, a] ** beta
    taken: dict[int, list[int]] = {}
    for j in range(len(true)):
        for a in np.argsort(-alignment[j], kind="stable")[:topk]:
            if alignment[j, a] > 0:
                taken.setdefault(int(a), []).append(j)
    owner = {a: js[0] if len(js) == 1 else int(np.argmax(overlaps[:, a])) for a, js in taken.items()}
    found = {}
    for a, j in owner.items():
        own = [b for b, other in owner.items() if other == j]
        highest = max(overlaps[j, b] for b in own)
        found[a] = j, alignment[j, a] * highest / (max(alignment[j, b] for b in own) + 1e-9)
    return found


def yolo(
    z: Array,
    t: Array,
    reg_max: int,
    fixed: Array | None = None,
    factors: tuple[float, float, float] = (7.5, 0.5, 1.5),
    topk: int = 10,
    alpha: float = 0.5,
    beta: float = 6.0,
    weights: Array | None = None,
) -> float:
    """Sum of boxes, classes and distributions by the sum of weights; ``fixed``: the prediction that assigns."""
    total = weight = 0.0
    at = z if fixed is None else fixed
    z = np.concatenate([z[..., :-4], at[..., -4:]], -1)  # the grid is no prediction
    for image, truth in enumerate(t):
        unit = at[image, 0, -2:]
        rows = [decoded(row, reg_max, unit) for row in z[image]]
        held = [decoded(row, reg_max, unit) for row in at[image]]
        true = [(int(box[0]), edges(*box[1:]) / np.tile(unit, 2)) for box in truth if box[0] >= 0]
        owners = aligned(held, true, topk, alpha, beta)
        own = 0.0
        for a, (found, logits, centre, cell) in enumerate(rows):
            own += factors[1] * float(np.sum(np.logaddexp(0, logits)))
            if a not in owners:
                continue
            j, w = owners[a]
            label, box = true[j]
            own -= factors[1] * w * logits[label]
            own += factors[0] * w * (1 - ciou(found, box, held[a][0]))
            sides = np.concatenate([centre - box[:2], box[2:] - centre]) / np.tile(cell, 2)
            log_p = np.log(softmax(z[image, a, : 4 * reg_max].reshape(4, reg_max)))
            for side, p in zip(np.clip(sides, 0, reg_max - 1.01), log_p, strict=True):
                low = int(side)
                own -= factors[2] * w / 4 * ((low + 1 - side) * p[low] + (side - low) * p[low + 1])
            weight += w
        total += own * (1.0 if weights is None else float(weights[image]))
    return float(total / max(1.0, weight))


def matched(cost: Array) -> dict[int, int]:
    """Box of each slot for costs [boxes, slots]: the best of all assignments, tried one by one."""
    boxes, slots = cost.shape
    if boxes <= slots:
        ways = [list(zip(range(boxes), slot, strict=True)) for slot in itertools.permutations(range(slots), boxes)]
    else:
        ways = [list(zip(box, range(slots), strict=True)) for box in itertools.permutations(range(boxes), slots)]
    best = min(ways, key=lambda way: sum(cost[pair] for pair in way))
    return {slot: box for box, slot in best}


def detr(
    z: Array,
    t: Array,
    fixed: Array | None = None,
    factors: tuple[float, float, float] = (1.0, 5.0, 2.0),
    no_object: float = 0.1,
    weights: Array | None = None,
) -> float:
    """Weighted cross-entropy of the slots, L1 and GIoU of matched boxes; ``fixed``: the prediction that is matched."""
    cls, l1, g = factors
    entropy = classes = boxes = 0.0
    number = 0
    for image, truth in enumerate(t):
        true = [(int(box[0]), box[1:]) for box in truth if box[0] >= 0]
        number += len(true)
        at = (z if fixed is None else fixed)[image]
        cost = np.array(
            [
                [
                    l1 * np.abs(row[-4:] - box).sum()
                    - cls * softmax(row[:-4])[label]
                    - g * giou(edges(*row[-4:]), edges(*box))
                    for row in at
                ]
                for label, box in true
            ]
        ).reshape(len(true), len(at))
        slots = matched(cost) if true else {}
        scale = 1.0 if weights is None else float(weights[image])
        for slot, row in enumerate(z[image]):
            log_p = np.log(softmax(row[:-4]))
            w = 1.0 if slot in slots else no_object
            label, box = true[slots[slot]] if slot in slots else (len(log_p) - 1, row[-4:])
            entropy -= scale * w * float(log_p[label])
            classes += w
            if slot in slots:
                near = giou(edges(*row[-4:]), edges(*box))
                boxes += scale * (l1 * float(np.abs(row[-4:] - box).sum()) + g * (1 - near))
    return cls * entropy / classes + boxes / max(1, number)
