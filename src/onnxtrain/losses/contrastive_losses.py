"""Contrastive losses on embeddings: pull examples of one label together, push others apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.data.target_checks import LabelCheck, TargetCheck
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import ReducedLoss, TargetKind, node_rank
from onnxtrain.lowering.training_info.recipe import LossTerms

_FAR = 1e9


class EmbeddingLoss(ReducedLoss):
    """Base of losses on embeddings [N, D] with labels [N] that compare the examples of a batch with each other.

    Examples are compared within a micro-batch only.
    """

    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N], one label per example."""
        if node_rank(prediction) != 2:
            raise OptionError(
                f"{self.name} needs embeddings of shape [batch, features], but {prediction.name!r} has shape "
                f"{prediction.shape}."
            )
        return (prediction.shape or (None,))[:1]

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Return int64."""
        return ir.DataType.INT64

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are at least 0."""
        return LabelCheck(None)


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
        if not (np.isfinite(self.margin) and self.margin > 0):
            raise OptionError(f"margin is {self.margin}; triplet needs a finite number above 0.")
        if self.mining not in ("hard", "all"):
            raise OptionError(f"mining is {self.mining!r}; triplet takes 'hard' or 'all'.")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on embeddings [N, D]."""
        if weights is not None:
            raise _no_weights(self.name)
        positive, negative = _pairs(op, target, prediction)
        distance = _distances(op, prediction)
        if self.mining == "hard":
            farthest = op.ReduceMax(distance * positive, op.ints(1), keepdims=0)
            nearest = op.ReduceMin(distance + (1.0 - negative) * _FAR, op.ints(1), keepdims=0)
            counted = op.ReduceMax(positive, op.ints(1), keepdims=0) * op.ReduceMax(negative, op.ints(1), keepdims=0)
            terms = farthest - nearest + self.margin
        else:
            counted = op.Unsqueeze(positive, op.ints(2)) * op.Unsqueeze(negative, op.ints(1))  # [a, p, n]
            terms = op.Unsqueeze(distance, op.ints(2)) - op.Unsqueeze(distance, op.ints(1)) + self.margin
        total = op.ReduceSum(op.Relu(terms) * counted, keepdims=0)
        count = op.ReduceSum(counted, keepdims=0).with_shape(())
        return LossTerms((total / op.Max(count, 1.0)).with_shape(()), count)


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
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            raise OptionError(f"temperature is {self.temperature}; info_nce needs a finite number above 0.")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on embeddings [N, D]."""
        if weights is not None:
            raise _no_weights(self.name)
        z = prediction
        positive, negative = _pairs(op, target, z)
        square = op.ReduceSum(z * z, op.ints(1), keepdims=1)
        unit = z / op.Sqrt(op.Max(square, op.scalar(np.finfo(z.dtype.numpy()).tiny, z)))
        similarity = op.MatMul(unit, op.Transpose(unit, perm=[1, 0])) / self.temperature
        others = positive + negative
        log_p = op.LogSoftmax(similarity - (1.0 - others) * _FAR, axis=1)
        partners = op.ReduceSum(positive, op.ints(1), keepdims=0)
        terms = -op.ReduceSum(log_p * positive, op.ints(1), keepdims=0) / op.Max(partners, 1.0)
        count = op.ReduceSum(op.Min(partners, 1.0), keepdims=0).with_shape(())
        total = op.ReduceSum(terms, keepdims=0)
        return LossTerms((total / op.Max(count, 1.0)).with_shape(()), count)


def _no_weights(name: str) -> OptionError:
    return OptionError(f"sample_weight is given, but the loss {name} compares examples with each other; leave it out.")
