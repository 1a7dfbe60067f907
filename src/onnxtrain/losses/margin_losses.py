"""Losses with an angular margin: embeddings of one class gather around its centre, as in face recognition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.data.target_checks import LabelCheck, TargetCheck
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension, behind
from onnxtrain.losses.base import ReducedLoss, TargetKind, node_rank
from onnxtrain.losses.cross_entropy import SoftmaxCrossEntropy
from onnxtrain.losses.groups import check_above_zero
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput

_KEEPING = ("Identity", "Cast", "Transpose", "Clip")

_OF_LENGTHS = (
    *("Abs", "Add", "Cast", "Clip", "Expand", "Identity", "Max", "Mul", "Pow", "Reciprocal", "Reshape", "Sqrt"),
    "Unsqueeze",
)
"""Operators between a sum of squares and the division by the length."""


class MarginLoss(ReducedLoss):
    """Base of cross-entropies of cosines [N, C] whose label's cosine is made smaller by a margin."""

    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)
    predicts = "classes"
    scale: float

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N], one label per example."""
        if node_rank(prediction) != 2 or not _may_be_cosines(prediction.ir):
            raise OptionError(
                f"{self.name} needs the cosines [batch, classes] between embeddings and the centres of classes, but "
                f"{prediction.name!r} has shape {prediction.shape} and is not computed from vectors of length 1; "
                "append the centres to the model: onnxtrain.append(model, onnxtrain.layers.Cosine(classes))."
            ).about(prediction.name, got=prediction.shape)
        return (prediction.shape or (None,))[:1]

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Return int64."""
        return ir.DataType.INT64

    def classes(self, prediction: Value) -> int | None:
        """Return the number of centres, where it is known."""
        size = None if prediction.shape is None else prediction.shape[1]
        return size if isinstance(size, int) else None

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that each label has a centre."""
        return LabelCheck(self.classes(prediction))

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return scores over the classes."""
        return MetricInput(self.name, "classes", 1)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on cosines [N, C]."""
        labels = op.Unsqueeze(target, op.ints(1))
        lowered = self.margined(op, op.GatherElements(prediction, labels, axis=1))  # [N, 1]
        logits = op.ScatterElements(prediction, labels, lowered, axis=1) * self.scale
        return SoftmaxCrossEntropy(axis=1).build(op, logits.with_shape(prediction.shape), target, weights)

    def margined(self, op: Builder, cosine: Value) -> Value:
        """Emit the cosine of the label with its margin."""
        raise OptionError(f"{type(self).__name__} does not define margined().")


def _may_be_cosines(value: ir.Value) -> bool:
    """Return whether a value may be a matmul of vectors of length 1; True where its origin is not known."""
    producer = _producer_behind(value)
    if producer is None or producer.op_type == "Div":  # by the product of lengths
        return True
    if producer.op_type == "MatMul" or (producer.op_type == "Gemm" and len(producer.inputs) == 2):
        sources = [_producer_behind(operand) for operand in producer.inputs]
        return any(source is not None and _divides_by_length(source) for source in sources)
    return False


def _producer_behind(value: ir.Value | None) -> ir.Node | None:
    found = behind(value, _KEEPING)
    return None if found is None else found.producer()


def _divides_by_length(node: ir.Node) -> bool:
    """Return whether a node divides vectors by a length, which comes from a sum; not a Mul of SiLU or GELU."""
    if node.op_type == "LpNormalization":
        return True
    return node.op_type in ("Div", "Mul") and any(_is_length(operand) for operand in node.inputs)


def _is_length(value: ir.Value | None) -> bool:
    waiting = [value]
    while waiting:
        producer = None if (one := waiting.pop()) is None else one.producer()
        if producer is not None and producer.op_type.startswith("Reduce"):
            return True
        if producer is not None and producer.op_type in _OF_LENGTHS:
            waiting += producer.inputs[: 1 if producer.op_type in ("Expand", "Clip", "Unsqueeze", "Reshape") else 2]
    return False


@checks_arguments
@dataclass(frozen=True)
class ArcFace(MarginLoss):
    """Additive angular margin: the cross-entropy of s cos θ_j, with s cos(θ_t + m) for the label t.

    θ_j is the angle between an embedding and the centre of class j; the prediction is cos θ [N, C], as
    :class:`onnxtrain.layers.Cosine` computes it. Where θ_t + m is above π, at which its cosine would grow again, the
    label has s (cos θ_t - m sin m) instead, as in the authors' code. Where the sine of θ_t rounds to 0, its gradient
    is 0.

    Args:
        scale: s, above 0.
        margin: m in radians, from 0 to π / 2.

    Source:
        J. Deng, J. Guo, N. Xue, S. Zafeiriou, "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", CVPR
        2019.
    """

    name: ClassVar[str] = "arcface"

    scale: float = 64.0
    margin: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, scale=self.scale)
        if not 0 <= self.margin <= math.pi / 2:
            raise OptionError(f"margin is {self.margin!r}; arcface needs an angle from 0 to pi / 2, in radians.")

    def margined(self, op: Builder, cosine: Value) -> Value:
        """cos(θ + m) = cos θ cos m - sin θ sin m."""
        square = 1.0 - cosine * cosine
        there = op.binary("Greater", square, float(np.finfo(cosine.dtype.numpy()).eps))
        sine = op.Where(there, op.Sqrt(op.Where(there, square, op.scalar(1, square))), op.scalar(0, square))
        turned = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        below = op.binary("Greater", cosine, -math.cos(self.margin))  # θ + m < π
        return op.Where(below, turned, cosine - self.margin * math.sin(self.margin))


@checks_arguments
@dataclass(frozen=True)
class CosFace(MarginLoss):
    """Additive cosine margin: the cross-entropy of s cos θ_j, with s (cos θ_t - m) for the label t.

    The prediction is cos θ [N, C], as for :class:`ArcFace`.

    Args:
        scale: s, above 0.
        margin: m, from 0 to 2, the difference between the largest and the smallest cosine.

    Source:
        H. Wang et al., "CosFace: Large Margin Cosine Loss for Deep Face Recognition", CVPR 2018.
    """

    name: ClassVar[str] = "cosface"

    scale: float = 64.0
    margin: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, scale=self.scale)
        if not 0 <= self.margin <= 2:
            raise OptionError(f"margin is {self.margin!r}; cosface needs a number from 0 to 2.")

    def margined(self, op: Builder, cosine: Value) -> Value:
        """Cos θ - m."""
        return cosine - self.margin
