"""Losses that rank documents: by embeddings with in-batch negatives, or by scores (rerankers)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onnxtrain.data.target_checks import LabelCheck, RelevanceCheck, TargetCheck
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.formatting import plural
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import TargetForm, TargetKind, check_above_zero, node_rank, softplus
from onnxtrain.losses.groups import GroupLoss, Rows
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.plugins.text.preference_losses import mean_of_examples, named, scores

_FAR = 1e9


@checks_arguments
@dataclass(frozen=True)
class MultipleNegatives(GroupLoss):
    """InfoNCE with in-batch negatives: the mean over queries i of -log softmax_j(scale cos(q_i, d_j)) at j = i.

    An example is a query, its document and perhaps further documents that do not answer it: inputs [N, k, ...] with the
    query first. Every query is compared with the k - 1 documents of all examples of the (micro-)batch. Targets are
    labels [N]: documents of another example with an equal label are left out, since they may answer the query, too.

    Args:
        scale: Factor of the cosine similarity, 1 / temperature, above 0.
        pooling: For outputs by token [rows, tokens, features]: ``"mean"`` of the tokens that the model's
            ``attention_mask`` counts, the first (``"cls"``) or the ``"last"`` of them. Outputs [rows, features] are
            taken as they are.

    Source:
        M. Henderson et al., "Efficient Natural Language Response Suggestion for Smart Reply", arXiv 1705.00652; the
        defaults are sentence-transformers' ``MultipleNegativesRankingLoss``.
    """

    name: ClassVar[str] = "multiple_negatives"
    rows: ClassVar[str] = "rows"
    texts: ClassVar[str] = "embeddings"
    compares_examples: ClassVar[bool] = True
    equal_labels: ClassVar[bool] = True
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)

    scale: float = 20.0
    pooling: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, scale=self.scale)
        if self.pooling not in ("mean", "cls", "last"):
            raise OptionError(f"pooling is {self.pooling!r}; {self.name} takes 'mean', 'cls' or 'last'.")

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N]."""
        return (prediction.shape or (None,))[:1]

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the form so far, where a query has a document.

        Raises:
            DataError: It has none.
        """
        if sizes.get(self.rows, 2) < 2:
            raise DataError(f"{self.name} needs a query and at least one document per example, but there is one row.")
        return now

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that labels are at least 0."""
        return LabelCheck(None)

    def read(self, rows: Rows) -> Value:
        """Emit the embeddings [N, k, D], of length 1."""
        op, output = rows.op, rows.output
        rank, shape = node_rank(output), output.shape or ()
        if rank not in (2, 3):
            raise OptionError(
                f"{self.name} needs embeddings [rows, features], or [rows, tokens, features] to pool, but "
                f"{output.name!r} has shape {output.shape}."
            )
        found = output if rank == 2 else self._pooled(rows).with_shape((shape[0], shape[2]))
        square = op.ReduceSum(found * found, op.ints(1), keepdims=1)
        unit = found / op.Sqrt(op.Max(square, op.scalar(np.finfo(found.dtype.numpy()).tiny, found)))
        return named(rows, rows.group(unit.with_shape(found.shape)), "embeddings")

    def _pooled(self, rows: Rows) -> Value:
        op, output = rows.op, rows.output
        if self.pooling == "cls":
            return op.Gather(output, op.constant(0), axis=1)
        mask = rows.mask()
        if mask is None:
            raise OptionError(
                f"{self.name}: pooling={self.pooling!r} needs a model with an attention_mask [rows, tokens], but its "
                f"inputs are {', '.join(rows.inputs)}."
            )
        counted = op.cast(mask, output.dtype)
        if self.pooling == "last":
            positions = op.Range(op.constant(0), op.reshape(op.dimension(mask, 1), []), op.constant(1))
            after = op.ReduceMax(op.cast(positions, output.dtype) * counted, op.ints(1), keepdims=1)
            counted = op.cast(op.Equal(op.cast(positions, output.dtype), after), output.dtype)
        total = op.ReduceSum(output * op.Unsqueeze(counted, op.ints(2)), op.ints(1), keepdims=0)
        return total / op.Max(op.ReduceSum(counted, op.ints(1), keepdims=1), 1.0)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss on embeddings [N, k, D] of length 1."""
        shape = prediction.shape or (None, None, None)
        query = op.Gather(prediction, op.constant(0), axis=1).with_shape((shape[0], shape[2]))
        documents = op.Slice(prediction, op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(1))
        # The answers of all queries come first, so that the answer of query i is column i.
        stacked = op.Transpose(documents, perm=[1, 0, 2])
        flat = op.Reshape(stacked, op.Concat(op.ints(-1), op.Shape(prediction, start=2), axis=0))
        similarity = op.MatMul(query, op.Transpose(flat, perm=[1, 0])) * self.scale
        equal = op.Equal(op.Unsqueeze(target, op.ints(1)), op.Unsqueeze(target, op.ints(0)))
        positions = op.Range(op.constant(0), op.reshape(op.dimension(target, 0), []), op.constant(1))
        own = op.Equal(op.Unsqueeze(positions, op.ints(1)), op.Unsqueeze(positions, op.ints(0)))
        others = op.cast(op.And(equal, op.Not(own)), similarity.dtype)  # [N, N]
        times = op.Concat(op.ints(1), op.Shape(documents, start=1, end=2), axis=0)
        masked = similarity - op.Tile(others, times) * _FAR
        log_p = op.LogSoftmax(masked, axis=1)
        picked = op.GatherElements(log_p, op.Unsqueeze(positions, op.ints(1)), axis=1)
        return mean_of_examples(op, -op.reshape(picked, [-1], known=shape[:1]), weights)


class RankingLoss(GroupLoss):
    """Base of losses on the scores of the documents of a query [N, k] with relevances [N, k], -1 for no document."""

    rows: ClassVar[str] = "documents"
    texts: ClassVar[str] = "ranking"

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the form so far, where there is a relevance for each document."""
        count = sizes.get(self.rows)
        if count is not None and len(shape) == 2 and shape[1] != count:
            raise DataError(
                f"{self.name} needs a relevance for each document, but an example has {count} documents and "
                f"{plural(shape[1], 'target')}."
            )
        return now

    def target_check(self, prediction: Value, kind: TargetKind) -> TargetCheck | None:
        """Check that relevances are at least 0, or -1."""
        return RelevanceCheck(self.name)

    def read(self, rows: Rows) -> Value:
        """Emit the scores [N, k]."""
        return scores(rows, self.name, "scores")


def _present(op: Builder, target: Value) -> Value:
    """Emit 1 for documents that exist, else 0."""
    return op.cast(op.binary("GreaterOrEqual", target, 0), target.dtype).with_shape(target.shape)


@checks_arguments
@dataclass(frozen=True)
class ListNet(RankingLoss):
    """Listwise loss of rerankers: the mean over queries of -sum_d softmax(t)_d log softmax(s)_d over their documents.

    The model scores each row, a query with a document; an example is the k documents of a query: inputs [N, k, ...].
    Targets [N, k] are the relevances t, higher for better documents, and -1 where a query has fewer than k.

    Source:
        Z. Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach", ICML 2007.
    """

    name: ClassVar[str] = "listnet"

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        absent = (1.0 - _present(op, target)) * _FAR
        wanted = op.Softmax(target - absent, axis=1)
        log_p = op.LogSoftmax(prediction - absent, axis=1)
        terms = -op.ReduceSum(wanted * log_p, op.ints(1), keepdims=0)
        return mean_of_examples(op, terms.with_shape((prediction.shape or (None,))[:1]), weights)


@checks_arguments
@dataclass(frozen=True)
class RankNet(RankingLoss):
    """Pairwise loss of rerankers: the mean of log(1 + exp(s_b - s_a)) over pairs of documents with t_a > t_b.

    Rows, examples and targets are those of :class:`ListNet`. Queries without such a pair do not count.

    Source:
        C. Burges et al., "Learning to Rank using Gradient Descent", ICML 2005.
    """

    name: ClassVar[str] = "ranknet"

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        present = _present(op, target)
        both = op.Unsqueeze(present, op.ints(2)) * op.Unsqueeze(present, op.ints(1))
        better = op.Greater(op.Unsqueeze(target, op.ints(2)), op.Unsqueeze(target, op.ints(1)))
        pairs = op.cast(better, prediction.dtype) * both  # [N, a, b]
        apart = op.Unsqueeze(prediction, op.ints(1)) - op.Unsqueeze(prediction, op.ints(2))  # s_b - s_a
        terms = softplus(op, apart) * pairs
        if weights is not None:
            terms = terms * op.reshape(weights, [-1, 1, 1])
        count = op.ReduceSum(pairs, keepdims=0).with_shape(())
        total = op.ReduceSum(terms, keepdims=0)
        return LossTerms((total / op.Max(count, 1.0)).with_shape(()), count)
