"""The loss of language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.value import Dimension
from onnxtrain.losses.base import TargetKind, node_rank
from onnxtrain.losses.cross_entropy import SoftmaxCrossEntropy
from onnxtrain.metrics.reading import Reading
from onnxtrain.spelling import checks_arguments
from onnxtrain.training_info.recipe import LossTerms


@checks_arguments
@dataclass(frozen=True)
class NextToken(SoftmaxCrossEntropy):
    """Language-model loss: softmax cross-entropy of logits [batch, sequence, vocabulary] for the next token.

    Targets are words in the places of the inputs, mostly the inputs themselves: the logits at a place are compared with
    the word behind it, those at the last place with none. Metrics are told so, too.

    Args:
        class_weights: As in :class:`SoftmaxCrossEntropy`; so are those that follow.
        label_smoothing: In [0, 1).
        ignore_index: Words that are not to be predicted: padding, questions whose answers are learned.
        axis: The axis of the words.
        check_targets: Has no meaning here: targets are words.
        chunk: How many rows of logits there are at once, as in :class:`SoftmaxCrossEntropy`.
    """

    name: ClassVar[str] = "next_token"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("indices",)
    text_defaults: ClassVar[Mapping[str, Any]] = {}

    ignore_index: int | None = -100
    axis: int | None = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ignore_index is None:
            raise OptionError(
                "next_token needs an ignore_index, which stands behind the last word; the default is -100."
            )

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss: it is the labels that are moved, since logits are large."""
        assert self.ignore_index is not None
        end = op.Expand(op.scalar(self.ignore_index, target), op.Concat(op.dimension(target, 0), op.ints(1), axis=0))
        later = op.Slice(target, op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(1))
        moved = op.Concat(later, end, axis=1).with_shape(target.shape)
        return super().build(op, prediction, moved, weights)

    def label_weight(self, labels: np.ndarray) -> float:
        """The same for the labels that are compared: all but the first of each row."""
        return super().label_weight(labels[:, 1:])

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """[batch, sequence].

        Raises:
            OptionError: The logits have another rank.
        """
        if node_rank(prediction) != 3 or self.class_axis(prediction) != 2:
            raise OptionError(
                f"next_token needs logits of shape [batch, sequence, words], but {prediction.name!r} has shape "
                f"{prediction.shape}; name the output with them by output=, or use softmax_cross_entropy."
            )
        return super().target_shape(prediction, kind)

    def reading(self, prediction: Value, target: Value) -> Reading:
        """Scores of words, each for the place behind it."""
        return super().reading(prediction, target)._replace(later=1)
