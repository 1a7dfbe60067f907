"""Losses on embeddings with labels: contrastive losses of a batch, and angular margins around centres of classes."""

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
from onnxtrain.losses.base import ReducedLoss, TargetKind, check_above_zero, known_size, node_rank
from onnxtrain.losses.cross_entropy import SoftmaxCrossEntropy
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput

_FAR = 1e9
"""Distance, and negative similarity, of pairs that do not count."""

_KEEPING = ("Identity", "Cast", "Transpose", "Clip")

_OF_LENGTHS = (
    *("Abs", "Add", "Cast", "Clip", "Expand", "Identity", "Max", "Mul", "Pow", "Reciprocal", "Reshape", "Sqrt"),
    "Unsqueeze",
)
"""Operators between a sum of squares and the division by the length."""


class EmbeddingLoss(ReducedLoss):
    """Base of losses on embeddings [N, D] with labels [N] that compare the examples of a batch with each other.

    Examples are compared within a micro-batch only.
    """

    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)
    equal_labels: ClassVar[bool] = True

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N], one label per example."""
        if node_rank(prediction) != 2:
            raise OptionError(
                f"{self.name} needs embeddings of shape [batch, features], but {prediction.name!r} has shape "
                f"{prediction.shape}."
            )
        return (prediction.shape or (None,))[:1]

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are at least 0."""
        return LabelCheck(None)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on embeddings [N, D]; 0 for a batch without anything to compare."""
        if weights is not None:
            raise OptionError(
                f"sample_weight is given, but the loss {self.name} compares examples with each other; leave it out."
            )
        total, count = self.compared(op, prediction, *_pairs(op, target, prediction))
        count = count.with_shape(())
        return LossTerms((total / op.Max(count, 1.0)).with_shape(()), count)

    def compared(self, op: Builder, z: Value, positive: Value, negative: Value) -> tuple[Value, Value]:
        """Emit the sum of the terms of all pairs or triplets of embeddings, and the number of terms."""
        raise OptionError(f"{type(self).__name__} does not define compared().")


def _pairs(op: Builder, labels: Value, like: Value) -> tuple[Value, Value]:
    """Emit 0/1 masks [N, N] of pairs of different examples with equal labels, and of pairs with different labels."""
    same = op.Equal(op.Unsqueeze(labels, op.ints(1)), op.Unsqueeze(labels, op.ints(0)))
    positions = op.Range(op.constant(0), op.reshape(op.dimension(labels, 0), []), op.constant(1))
    itself = op.Equal(op.Unsqueeze(positions, op.ints(1)), op.Unsqueeze(positions, op.ints(0)))
    positive = op.cast(op.And(same, op.Not(itself)), like.dtype)
    return positive, op.cast(op.Not(same), like.dtype)


@checks_arguments
@dataclass(frozen=True)
class Triplet(EmbeddingLoss):
    """Triplet loss: the mean of max(0, d(a, p) - d(a, n) + margin), d the Euclidean distance of embeddings.

    Triplets are mined in the batch: p has the label of a, n another. ``"hard"`` takes, for every a with both, the
    farthest p and the nearest n; ``"all"`` takes every triplet, as ``torch.nn.TripletMarginLoss`` on all of them. A
    batch without a triplet has loss 0; give batches with several examples per label.

    Args:
        margin: Required difference of the distances to n and to p, above 0.
        mining: ``"hard"`` or ``"all"``.

    Source:
        A. Hermans, L. Beyer, B. Leibe, "In Defense of the Triplet Loss for Person Re-Identification", arXiv 1703.07737.
    """

    name: ClassVar[str] = "triplet"

    margin: float = 1.0
    mining: str = "hard"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, margin=self.margin)
        if self.mining not in ("hard", "all"):
            raise OptionError(f"mining is {self.mining!r}; triplet takes 'hard' or 'all'.")

    def compared(self, op: Builder, z: Value, positive: Value, negative: Value) -> tuple[Value, Value]:
        """Emit the sum over triplets, and their number."""
        distance = _distances(op, z)
        if self.mining == "hard":
            farthest = op.ReduceMax(distance * positive, op.ints(1), keepdims=0)
            nearest = op.ReduceMin(distance + (1.0 - negative) * _FAR, op.ints(1), keepdims=0)
            counted = op.ReduceMax(positive, op.ints(1), keepdims=0) * op.ReduceMax(negative, op.ints(1), keepdims=0)
            terms = farthest - nearest + self.margin
        else:
            counted = op.Unsqueeze(positive, op.ints(2)) * op.Unsqueeze(negative, op.ints(1))  # [a, p, n]
            terms = op.Unsqueeze(distance, op.ints(2)) - op.Unsqueeze(distance, op.ints(1)) + self.margin
        return op.ReduceSum(op.Relu(terms) * counted, keepdims=0), op.ReduceSum(counted, keepdims=0)


def _distances(op: Builder, z: Value) -> Value:
    """Emit the distances [N, N] of rows; equal rows have distance 0 and gradient 0, as in PyTorch."""
    difference = op.Unsqueeze(z, op.ints(1)) - op.Unsqueeze(z, op.ints(0))
    square = op.ReduceSum(difference * difference, op.ints(2), keepdims=0)
    apart = op.binary("Greater", square, 0)
    return op.Where(apart, op.Sqrt(op.Where(apart, square, op.scalar(1.0, square))), op.scalar(0.0, square))


@checks_arguments
@dataclass(frozen=True)
class InfoNCE(EmbeddingLoss):
    """Contrastive loss of similarities s_ij = cos(z_i, z_j) / temperature, in a batch of embeddings.

    The mean over the examples i that have a partner p of the same label of::

        -1 / |P(i)| sum over p in P(i) of log(exp(s_ip) / sum over j != i of exp(s_ij))

    With two examples per label, such as two views of each image, it is the InfoNCE of SimCLR (NT-Xent); with
    more, the supervised contrastive loss. A batch without such a pair has loss 0.

    Args:
        temperature: Above 0.

    Source:
        P. Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020; T. Chen et al., "A Simple Framework for
        Contrastive Learning of Visual Representations", ICML 2020.
    """

    name: ClassVar[str] = "info_nce"

    temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, temperature=self.temperature)

    def compared(self, op: Builder, z: Value, positive: Value, negative: Value) -> tuple[Value, Value]:
        """Emit the sum over examples with a partner, and their number."""
        square = op.ReduceSum(z * z, op.ints(1), keepdims=1)
        unit = z / op.Sqrt(op.Max(square, op.scalar(np.finfo(z.dtype.numpy()).tiny, z)))
        similarity = op.MatMul(unit, op.Transpose(unit, perm=[1, 0])) / self.temperature
        others = positive + negative
        log_p = op.LogSoftmax(similarity - (1.0 - others) * _FAR, axis=1)
        partners = op.ReduceSum(positive, op.ints(1), keepdims=0)
        terms = -op.ReduceSum(log_p * positive, op.ints(1), keepdims=0) / op.Max(partners, 1.0)
        count = op.ReduceSum(op.Min(partners, 1.0), keepdims=0)
        return op.ReduceSum(terms, keepdims=0), count


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

    def classes(self, prediction: Value) -> int | None:
        """Return the number of centres, where it is known."""
        return known_size(prediction, 1)

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
