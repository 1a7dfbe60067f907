"""Losses of object detectors, which assign the boxes of an image to the model's predictions in the graph itself.

Targets are [N, M, 5] for both: rows of (class, x, y, width, height) with x and y the centre, in fractions of the image,
as in YOLO's label files. Images with fewer boxes are padded with rows of class -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.data.conversion import Array
from onnxtrain.data.target_checks import BoxCheck, TargetCheck
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, dimensions, is_float
from onnxtrain.losses.base import ReducedLoss, TargetForm, TargetKind, check_above_zero, softplus
from onnxtrain.losses.probabilities import class_logits
from onnxtrain.lowering.training_info.recipe import LossTerms, free_names
from onnxtrain.metrics.base import Detections, MetricInput
from onnxtrain.plugins.detection.boxes import Boxes, assign, complete_iou, generalized_iou

_END = int(np.iinfo(np.int64).max)
_GRID = 4
"""Columns of the cell that a prediction belongs to: its centre and its size."""


class DetectionLoss(ReducedLoss):
    """Base of losses on boxes: they read several values of the model, as one prediction [N, predictions, columns]."""

    gathers: ClassVar[bool] = True
    own_metrics: ClassVar[tuple[str, ...]] = ("map", "map_50")
    shape_hint: ClassVar[str] = (  # type: ignore[misc]
        " Give rows of (class, x, y, width, height) per image, [N, M, 5], padded with rows of class -1."
    )

    def classes(self, prediction: Value) -> int | None:
        """Return the number of classes of objects."""
        columns = (prediction.shape or (None,))[-1]
        return columns - self._other_columns if isinstance(columns, int) else None

    @property
    def _other_columns(self) -> int:
        """Columns of a prediction that are no class of objects."""
        raise NotImplementedError

    def decode(self, prediction: Array) -> Detections:
        """Return the boxes and scores of a prediction."""
        raise NotImplementedError

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N, M, 5] for any M."""
        return ((prediction.shape or (None,))[0], None, 5)

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the form so far, where there is a row for each image."""
        if len(shape) == 3 and shape[1] == 0:
            raise DataError(f"{self.name} needs at least one row of targets per image; pad with a row of class -1.")
        return now

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that boxes are inside of the image and have a class and a size."""
        return BoxCheck(self.name, self.classes(prediction))

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return boxes, which only the mean average precision reads."""
        return MetricInput(self.name, None, detections=self.decode)


@dataclass(frozen=True)
class _Targets:
    """The boxes of a batch, the centres and sizes in fractions of the image."""

    real: Value
    label: Value
    sides: tuple[Value, Value, Value, Value]

    @classmethod
    def of(cls, op: Builder, target: Value) -> _Targets:
        kind = _column(op, target, 0)
        real = op.binary("GreaterOrEqual", kind, 0)
        zero = op.scalar(0.0, target)
        label = op.cast(op.Where(real, kind, zero), ir.DataType.INT64)
        x, y, width, height = (op.Where(real, _column(op, target, index), zero) for index in range(1, 5))
        return cls(real, label, (x, y, width, height))


def _column(op: Builder, value: Value, index: int) -> Value:
    """Emit one entry of the last axis."""
    shape = value.shape
    return op.Gather(value, op.constant(index), axis=-1).with_shape(None if shape is None else shape[:-1])


def _picked(op: Builder, values: Value, index: Value) -> Value:
    """Emit the values [N, M] at indices [N, K]."""
    return op.GatherElements(values, index, axis=1)


def _scores_of_boxes(op: Builder, scores: Value, label: Value) -> Value:
    """Emit the scores [N, M, K] of predictions [N, K, C] for the classes of boxes [N, M]."""
    by_class = op.Transpose(scores, perm=[0, 2, 1])
    shape = op.Concat(op.Shape(label), op.Shape(scores, start=1, end=2), axis=0)
    return op.GatherElements(by_class, op.Expand(op.Unsqueeze(label, op.ints(2)), shape), axis=1)


def _weighted_sum(op: Builder, terms: Value, weights: Value | None) -> Value:
    """Emit the sum of terms [N, ...], multiplied by the weights of examples."""
    if weights is not None:
        terms = terms * op.reshape(weights, [-1] + [1] * ((terms.rank or 1) - 1))
    return op.ReduceSum(terms, keepdims=0).with_shape(())


@checks_arguments
@dataclass(frozen=True)
class YOLO(DetectionLoss):
    """Loss of YOLOv8-like detectors with task-aligned assignment: (7.5 L_box + 0.5 L_cls + 1.5 L_dfl) / W.

    ::

        L_cls = sum over anchors a and classes c of binary cross-entropy(z_ac, t_ac)
        L_box = sum over anchors of w_a (1 - CIoU(b_a, g_a))
        L_dfl = sum over anchors of w_a times the mean over four sides of -(1 - r) log p(k) - r log p(k + 1)
        W     = max(1, sum of w_a)

    An anchor, a cell of one of the head's grids, predicts logits z of the classes, and a distribution p over 0 to
    ``reg_max`` - 1 cells for the distance of its centre to each side of the box; b is the box of its means. k + r is
    the true distance, k an integer.

    Assignment, without gradient: the alignment of an anchor with a box that its centre is in is
    sigmoid(z)^alpha CIoU^beta, and each box takes the ``topk`` anchors of highest alignment. An anchor that several
    boxes take goes to the one with the highest CIoU. The target t at the box's class is w: the alignment, scaled so
    that the maximum of a box is its highest CIoU; other targets are 0. Boxes with no anchor's centre in them are not
    learned.

    The loss reads the raw head, wherever it is in the model: outputs [N, 4 reg_max + classes, H, W], one per grid,
    boxes and classes together or as outputs of their own, or the nodes that flatten and concatenate them in front of
    the decoder of an exported model, whose outputs stay what they are.

    As ultralytics' ``v8DetectionLoss``, whose loss is multiplied by the number of images.

    Args:
        box_gain: Factor of L_box.
        class_gain: Factor of L_cls.
        dfl_gain: Factor of L_dfl.
        topk: Anchors per box, 1 or more.
        alpha: Exponent of the score.
        beta: Exponent of the CIoU.
        reg_max: Numbers of the distribution over distances, 2 or more.

    Source:
        C. Feng et al., "TOOD: Task-aligned One-stage Object Detection", ICCV 2021; X. Li et al., "Generalized Focal
        Loss", NeurIPS 2020.
    """

    name: ClassVar[str] = "yolo"

    box_gain: float = 7.5
    class_gain: float = 0.5
    dfl_gain: float = 1.5
    topk: int = 10
    alpha: float = 0.5
    beta: float = 6.0
    reg_max: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        gains = {"box_gain": self.box_gain, "class_gain": self.class_gain, "dfl_gain": self.dfl_gain}
        check_above_zero(self, **gains, alpha=self.alpha, beta=self.beta)
        for name, least in (("topk", 1), ("reg_max", 2)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} is {getattr(self, name)}; yolo needs {least} or more.")

    @property
    def _other_columns(self) -> int:
        return 4 * self.reg_max + _GRID

    def gather(self, model: ir.Model, output: ir.Value) -> ir.Value:
        """Emit the raw head with the grid [N, anchors, 4 reg_max + classes + 4].

        Raises:
            OptionError: The model has no such head.
        """
        parts = _raw_head(model, output, 4 * self.reg_max)
        op = Builder(model.graph, model.opset_imports[""])
        grids = [_grid(op, op.wrap(level)) for level in parts[0]]
        batch = op.dimension(op.wrap(parts[0][0]), 0)
        grid = op.Unsqueeze(op.Concat(*grids, axis=0), op.ints(0))
        columns = [_anchors_first(op, [op.wrap(level) for level in part]) for part in parts]
        dtype = columns[0].dtype
        every = op.Expand(op.cast(grid, dtype), op.Concat(batch, op.ints(1, 1), axis=0))
        shapes = [dimensions(level) or (None,) * 4 for level in parts[0]]
        areas = [
            height * width if isinstance(height, int) and isinstance(width, int) else None
            for *_, height, width in shapes
        ]
        anchors = None if None in areas else sum(area for area in areas if area is not None)
        width = sum(_channels(part[0]) for part in parts) + _GRID
        found = op.Concat(*columns, every, axis=2).with_shape((shapes[0][0], anchors, width))
        return _named(op, found)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on the raw head with the grid."""
        anchors = _Anchors.of(op, prediction, self.reg_max)
        truth = _Targets.of(op, target)
        label, boxes = truth.label, anchors.in_cells(op, truth)
        box, w = self._assigned(op, anchors, truth, boxes)
        total = op.Max(op.ReduceSum(w, keepdims=0), op.scalar(1.0, w)).with_shape(())
        own = Boxes(*(_picked(op, edge, box) for edge in boxes))
        at_class = op.Squeeze(
            op.GatherElements(anchors.logits, op.Unsqueeze(_picked(op, label, box), op.ints(2)), axis=2), op.ints(2)
        )
        cls = op.ReduceSum(softplus(op, anchors.logits), op.ints(2), keepdims=0) - w * at_class
        ciou = w * (1.0 - complete_iou(op, anchors.boxes, own))
        terms = ciou * self.box_gain + cls * self.class_gain + w * self._distribution(op, anchors, own) * self.dfl_gain
        summed = _weighted_sum(op, terms.with_shape((None, None)), weights)
        return LossTerms((summed / total).with_shape(()), total)

    def _assigned(self, op: Builder, anchors: _Anchors, truth: _Targets, boxes: Boxes) -> tuple[Value, Value]:
        """Emit the box [N, A] of each anchor, and the weight w [N, A], 0 for anchors without one."""
        logits = stopped(op, anchors.logits)
        found = Boxes(*(stopped(op, edge) for edge in anchors.boxes)).along(op, 1)  # [N, 1, A]
        given = boxes.along(op, 2)  # [N, M, 1]
        x, y = (op.Unsqueeze(centre, op.ints(1)) for centre in anchors.centre)
        margins = [x - given.left, y - given.top, given.right - x, given.bottom - y]
        inside = op.binary("Greater", op.Min(*margins), 1e-9)
        inside = op.cast(op.And(inside, op.Unsqueeze(truth.real, op.ints(2))), logits.dtype)
        iou = op.Relu(complete_iou(op, given, found)) * inside
        score = _scores_of_boxes(op, op.Sigmoid(logits), truth.label)
        aligned = op.Pow(score, op.scalar(self.alpha, score)) * op.Pow(iou, op.scalar(self.beta, iou))
        count = op.Min(op.ints(self.topk), op.Shape(aligned, start=2))
        best, places = op.several("TopK", aligned, count, outputs=2, axis=2)
        ones = op.cast(op.binary("Greater", best, 0), aligned.dtype)
        chosen = op.ScatterElements(op.zeros_like(aligned), places, ones, axis=2)
        several = op.binary("Greater", op.ReduceSum(chosen, op.ints(1), keepdims=1), 1)
        numbers = op.Range(op.constant(0), op.reshape(op.Shape(iou, start=1, end=2), []), op.constant(1))
        nearest = op.Equal(op.Unsqueeze(numbers, op.ints(0, 2)), op.ArgMax(iou, axis=1, keepdims=1))
        chosen = op.Where(several, op.cast(nearest, chosen.dtype), chosen)
        aligned = aligned * chosen
        highest = op.ReduceMax(iou * chosen, op.ints(2), keepdims=1)
        scale = highest / (op.ReduceMax(aligned, op.ints(2), keepdims=1) + 1e-9)
        weight = op.ReduceMax(aligned * scale, op.ints(1), keepdims=0)
        return op.ArgMax(chosen, axis=1, keepdims=0), weight.with_shape((None, None))

    def _distribution(self, op: Builder, anchors: _Anchors, own: Boxes) -> Value:
        """Emit the distribution focal loss [N, A]: cross-entropy with the two integers around the true distance."""
        (x, y), (wide, high) = anchors.centre, anchors.size
        sides = [(x - own.left) / wide, (y - own.top) / high, (own.right - x) / wide, (own.bottom - y) / high]
        distance = op.Concat(*(op.Unsqueeze(side, op.ints(2)) for side in sides), axis=2)  # [N, A, 4]
        distance = op.Min(op.Relu(distance), op.scalar(self.reg_max - 1.01, distance))
        low = op.Floor(distance)
        rest = distance - low
        at = op.Unsqueeze(op.cast(low, ir.DataType.INT64), op.ints(3))
        log_p = op.LogSoftmax(anchors.distances, axis=3)
        both = op.GatherElements(log_p, op.Concat(at, at + 1, axis=3), axis=3)
        shares = op.Concat(op.Unsqueeze(1.0 - rest, op.ints(3)), op.Unsqueeze(rest, op.ints(3)), axis=3)
        return op.ReduceSum(both * shares, op.ints(2, 3), keepdims=0) * -0.25

    def decode(self, prediction: Array) -> Detections:
        """Return the boxes [N, A, 4] by edges in fractions of the image, and the scores [N, A, classes]."""
        size = 4 * self.reg_max
        wide = prediction.astype(np.float64)
        distances = wide[..., :size].reshape(*wide.shape[:-1], 4, self.reg_max)
        p = np.exp(distances - distances.max(-1, keepdims=True))
        distance = (p / p.sum(-1, keepdims=True)) @ np.arange(self.reg_max)
        centre, cell = wide[..., -4:-2], wide[..., -2:]
        boxes = np.concatenate([centre - distance[..., :2] * cell, centre + distance[..., 2:] * cell], -1)
        scores = 0.5 * (1 + np.tanh(0.5 * wide[..., size:-_GRID]))
        return Detections(boxes, scores, overlapping=True)


@dataclass(frozen=True)
class _Anchors:
    """The predictions of anchors, in units of the first anchor's cells."""

    distances: Value
    logits: Value
    centre: tuple[Value, Value]
    size: tuple[Value, Value]
    boxes: Boxes
    unit: tuple[Value, Value]

    @classmethod
    def of(cls, op: Builder, prediction: Value, reg_max: int) -> _Anchors:
        rows = (prediction.shape or (None, None))[:2]
        sides = op.Slice(prediction, op.ints(0), op.ints(4 * reg_max), op.ints(2))
        logits = op.Slice(prediction, op.ints(4 * reg_max), op.ints(-_GRID), op.ints(2))
        columns = (prediction.shape or (None,))[-1]
        classes = columns - 4 * reg_max - _GRID if isinstance(columns, int) else None
        grid = stopped(op, op.Slice(prediction, op.ints(-_GRID), op.ints(_END), op.ints(2)).with_shape((*rows, _GRID)))
        x, y, wide, high = (_column(op, grid, index) for index in range(_GRID))
        unit = tuple(op.Slice(size, op.ints(0), op.ints(1), op.ints(1)) for size in (wide, high))
        x, y, wide, high = x / unit[0], y / unit[1], wide / unit[0], high / unit[1]
        distances = op.Reshape(sides, op.ints(0, 0, 4, reg_max)).with_shape((*rows, 4, reg_max))
        steps = op.constant(np.arange(reg_max).reshape(reg_max, 1), prediction.dtype)
        mean = op.Squeeze(op.MatMul(op.Softmax(distances, axis=3), steps), op.ints(3)).with_shape((*rows, 4))
        left, top, right, bottom = (_column(op, mean, index) for index in range(4))
        boxes = Boxes(x - left * wide, y - top * high, x + right * wide, y + bottom * high)
        return cls(distances, logits.with_shape((*rows, classes)), (x, y), (wide, high), boxes, (unit[0], unit[1]))

    def in_cells(self, op: Builder, truth: _Targets) -> Boxes:
        """Return the true boxes [N, M] in the unit of the anchors."""
        x, y, width, height = truth.sides
        return Boxes.around(x / self.unit[0], y / self.unit[1], width / self.unit[0], height / self.unit[1])


def _raw_head(model: ir.Model, output: ir.Value, sides: int) -> list[list[ir.Value]]:
    """Find the raw head [N, channels, H, W] per grid: sides and classes together, or apart, the sides first."""
    outputs = [value for value in model.graph.outputs if is_float(value) and len(dimensions(value) or ()) == 4]
    parts = list(_by_channels(outputs).values()) or _concatenated(output)
    channels = [_channels(part[0]) for part in parts]
    grids = [[(dimensions(level) or ())[2:] for level in part] for part in parts]
    if len(parts) == 2 and channels[1] == sides and (channels[0] != sides or _is_activated(parts[0][0])):
        parts, channels = parts[::-1], channels[::-1]
    if grids and all(grid == grids[0] for grid in grids):
        if len(parts) == 1 and channels[0] > sides:
            return parts
        if len(parts) == 2 and channels[0] == sides:
            return parts
    shown = ", ".join(str(dimensions(value)) for value in outputs) or f"{output.name!r} of shape {dimensions(output)}"
    raise OptionError(
        f"yolo needs the raw head of the detector: values [N, {sides} + classes, H, W] per grid, as outputs or "
        f"flattened and concatenated in front of the decoder, but the model has {shown}; give reg_max= where it is "
        f"not {sides // 4}, or export the model without its decoder."
    )


def _by_channels(values: Sequence[ir.Value]) -> dict[int, list[ir.Value]]:
    found: dict[int, list[ir.Value]] = {}
    for value in values:
        found.setdefault(_channels(value), []).append(value)
    return found


def _channels(value: ir.Value) -> int:
    """Return the number of channels of a level of the head; 0 where it is not known."""
    channels = (dimensions(value) or (None, None))[1]
    return channels if isinstance(channels, int) else 0


def _concatenated(output: ir.Value) -> list[list[ir.Value]]:
    """Find the levels [N, channels, H, W] that are flattened and concatenated on the way to an output."""
    found: list[list[ir.Value]] = []
    waiting, seen = [output], set()
    while waiting:
        node = waiting.pop(0).producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        levels = [_before_flattening(value) for value in node.inputs] if node.op_type == "Concat" else []
        known = [level for level in levels if level is not None]
        if known and len(known) == len(levels):
            found.append(known)
        else:
            waiting += [value for value in node.inputs if value is not None]
    return found


def _before_flattening(value: ir.Value | None) -> ir.Value | None:
    """Return the image-like value that a value flattens; ``None`` where it does something else."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type not in ("Reshape", "Flatten"):
        return None
    source = node.inputs[0]
    if source is None or len(dimensions(source) or ()) != 4 or len(dimensions(value) or ()) != 3:
        return None
    return source if _channels(source) == _channels(value) > 0 else None


def _is_activated(level: ir.Value) -> bool:
    """Return whether the concatenation of a level is read by a Sigmoid: it holds the classes."""
    for flat in level.consumers():
        for joined in flat.outputs[0].consumers():
            if any(node.op_type == "Sigmoid" for node in joined.outputs[0].consumers()):
                return True
    return False


def _anchors_first(op: Builder, levels: Sequence[Value]) -> Value:
    """Emit levels [N, channels, H, W] as [N, anchors, channels]."""
    flat = []
    for level in levels:
        shape = level.shape or (None,) * 4
        flat.append(op.Reshape(level, op.ints(0, 0, -1)).with_shape((*shape[:2], None)))
    joined = flat[0] if len(flat) == 1 else op.Concat(*flat, axis=2)
    return op.Transpose(joined, perm=[0, 2, 1])


def _grid(op: Builder, level: Value) -> Value:
    """Emit the centre and size [H W, 4] of the cells of a level, row by row, in fractions of the image."""
    float32 = ir.DataType.FLOAT
    rows, columns = (op.dimension(level, axis) for axis in (2, 3))
    count = op.Range(op.constant(0), op.reshape(rows * columns, []), op.constant(1))
    wide, high = (1.0 / op.cast(size, float32) for size in (columns, rows))
    x = (op.cast(op.Mod(count, columns), float32) + 0.5) * wide
    y = (op.cast(count / columns, float32) + 0.5) * high
    parts = [x, y, op.zeros_like(x) + wide, op.zeros_like(x) + high]
    return op.Concat(*(op.Unsqueeze(part, op.ints(1)) for part in parts), axis=1)


def _named(op: Builder, value: Value) -> ir.Value:
    """Name what a loss reads."""
    (value.ir.name,) = free_names(op.graph, ["detections"])
    return value.ir


@checks_arguments
@dataclass(frozen=True)
class DETR(DetectionLoss):
    """Loss of DETR-like detectors, whose slots are matched with the boxes: L_cls + 5 L_l1 + 2 L_giou.

    ::

        L_cls  = weighted mean over slots of -log p(class of the slot's box)
        L_l1   = sum over boxes of |b - g| / B
        L_giou = sum over boxes of (1 - GIoU(b, g)) / B

    A slot (query) without a box has the class "no object", the last one, of weight ``no_object``. b is the box of a
    slot as (x, y, width, height), g the true one, and B the number of true boxes, at least 1.

    The matching is the assignment of least total cost, without gradient, where a box in a slot costs
    5 |b - g| - p(class) - 2 GIoU(b, g), with p the probability itself. The graph computes it by the Hungarian
    method, so that exported step graphs contain it, too. Of more boxes than slots, as many as there are slots are
    matched.

    The model has the outputs logits [N, slots, classes + 1] and boxes [N, slots, 4], centre and size in fractions of
    the image. Micro-batches (``accumulate``) are not quite the step of the whole batch, since the two means are over
    different numbers.

    As ``SetCriterion`` and ``HungarianMatcher`` of facebookresearch/detr, without losses of inner decoder layers.

    Args:
        class_gain: Factor of the classes, in the loss and in the cost.
        l1_gain: Factor of the distance of boxes, in both.
        giou_gain: Factor of the overlap, in both.
        no_object: Weight of slots without a box, above 0.
        boxes: Name of the output with the boxes; by default the one whose last axis is 4, or whose name contains "box".

    Source:
        N. Carion et al., "End-to-End Object Detection with Transformers", ECCV 2020.
    """

    name: ClassVar[str] = "detr"

    class_gain: float = 1.0
    l1_gain: float = 5.0
    giou_gain: float = 2.0
    no_object: float = 0.1
    boxes: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        gains = {"class_gain": self.class_gain, "l1_gain": self.l1_gain, "giou_gain": self.giou_gain}
        check_above_zero(self, **gains, no_object=self.no_object)

    @property
    def _other_columns(self) -> int:
        return 5

    def gather(self, model: ir.Model, output: ir.Value) -> ir.Value:
        """Emit logits and boxes side by side [N, slots, classes + 1 + 4].

        Raises:
            OptionError: The model has no such outputs.
        """
        logits, boxes = self._outputs(model, output)
        op = Builder(model.graph, model.opset_imports[""])
        scores = class_logits(op, logits, 2, model.functions)
        shape = scores.shape or (None, None, None)
        size = shape[2]
        found = op.Concat(scores, op.cast(op.wrap(boxes), scores.dtype), axis=2)
        return _named(op, found.with_shape((*shape[:2], size + 4 if isinstance(size, int) else None)))

    def _outputs(self, model: ir.Model, output: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the outputs with the logits and with the boxes."""
        floating = [value for value in model.graph.outputs if is_float(value) and len(dimensions(value) or ()) == 3]
        boxes = [value for value in floating if (dimensions(value) or ())[-1] in (4, None)]
        if self.boxes is not None:
            boxes = [value for value in floating if value.name == self.boxes]
        elif len(boxes) > 1:
            boxes = [value for value in boxes if "box" in str(value.name).lower()]
        others = [value for value in floating if value not in boxes]
        logits = [value for value in others if value is output] or others
        if len(boxes) != 1 or not logits:
            shown = ", ".join(f"{value.name!r} {dimensions(value)}" for value in model.graph.outputs)
            wanted = f" of the name {self.boxes!r}" if self.boxes is not None else ""
            raise OptionError(
                f"detr needs outputs of logits [N, slots, classes + 1] and of boxes [N, slots, 4]{wanted}, but the "
                f"model has {shown}; name the boxes by boxes= and the logits by output=."
            )
        return logits[0], boxes[0]

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on logits and boxes."""
        rows = (prediction.shape or (None, None))[:2]
        logits = op.Slice(prediction, op.ints(0), op.ints(-4), op.ints(2)).with_shape((*rows, None))
        sides = op.Slice(prediction, op.ints(-4), op.ints(_END), op.ints(2)).with_shape((*rows, 4))
        truth = _Targets.of(op, target)
        found = self._matched(op, logits, sides, truth)  # [N, Q]
        matched = op.binary("GreaterOrEqual", found, 0)
        present = op.cast(matched, prediction.dtype)
        at = op.Max(found, op.scalar(0, found))
        nothing = op.Shape(logits, start=2) - 1
        label = op.Where(matched, _picked(op, truth.label, at), nothing)
        log_p = op.GatherElements(op.LogSoftmax(logits, axis=2), op.Unsqueeze(label, op.ints(2)), axis=2)
        w = present * (1 - self.no_object) + self.no_object
        cls = -(_weighted_sum(op, (w * op.Squeeze(log_p, op.ints(2))).with_shape(rows), weights))
        cls = cls / op.ReduceSum(w, keepdims=0)
        own = [_column(op, sides, index) for index in range(4)]
        true = [_picked(op, side, at) for side in truth.sides]
        l1 = op.sum_of([op.Abs(a - b).with_shape(rows) for a, b in zip(own, true, strict=True)])
        giou = 1.0 - generalized_iou(op, Boxes.around(*own), Boxes.around(*true))
        count = op.ReduceSum(op.cast(truth.real, prediction.dtype), keepdims=0)
        count = op.Max(count, op.scalar(1.0, count))
        boxes = (
            _weighted_sum(op, (present * (l1 * self.l1_gain + giou * self.giou_gain)).with_shape(rows), weights) / count
        )
        images = op.cast(op.reshape(op.dimension(target, 0), []), prediction.dtype).with_shape(())
        return LossTerms((cls * self.class_gain + boxes).with_shape(()), images)

    def _matched(self, op: Builder, logits: Value, sides: Value, truth: _Targets) -> Value:
        """Emit the box [N, Q] of each slot, -1 for none."""
        score = _scores_of_boxes(op, op.Softmax(stopped(op, logits), axis=2), truth.label)
        stop = stopped(op, sides)
        own = [op.Unsqueeze(_column(op, stop, index), op.ints(1)) for index in range(4)]
        true = [op.Unsqueeze(side, op.ints(2)) for side in truth.sides]
        l1 = op.sum_of([op.Abs(a - b).with_shape((None, None, None)) for a, b in zip(own, true, strict=True)])
        giou = generalized_iou(op, Boxes.around(*own), Boxes.around(*true))
        cost = l1 * self.l1_gain - score * self.class_gain - giou * self.giou_gain
        return assign(op, cost.with_shape((None, None, None)), truth.real)

    def decode(self, prediction: Array) -> Detections:
        """Return the boxes [N, Q, 4] by edges, and the scores [N, Q, classes]."""
        wide = prediction.astype(np.float64)
        logits, centre, half = wide[..., :-4], wide[..., -4:-2], wide[..., -2:] / 2
        p = np.exp(logits - logits.max(-1, keepdims=True))
        boxes = np.concatenate([centre - half, centre + half], -1)
        return Detections(boxes, (p / p.sum(-1, keepdims=True))[..., :-1])
