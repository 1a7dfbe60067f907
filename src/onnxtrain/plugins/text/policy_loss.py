"""The loss of group relative policy optimization: sampled answers of a language model with their advantages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import TargetKind, check_above_zero
from onnxtrain.losses.chunks import check_chunk
from onnxtrain.losses.groups import GroupLoss, Rows
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.plugins.text.preference_losses import mean_of_examples, named


@checks_arguments
@dataclass(frozen=True)
class GRPO(GroupLoss):
    """Group relative policy optimization: a clipped policy gradient with the rewards of a group as its baseline.

    ::

        term = -min(r a, clip(r, 1 - epsilon, 1 + epsilon) a) + beta (exp(d) - d - 1)
        r = exp(log p - log p_old),  d = log q - log p

    for each token of a sampled answer, with p the model, p_old the one that sampled, q the reference as in
    :class:`DPO`, and a the advantage of the answer: its reward less the mean of its group, over their deviation.
    :func:`onnxtrain.text.grpo` samples, rewards and trains.

    Predictions are the log-probabilities of the tokens [N, T]. Targets are [N, 4, T]: 1 for the tokens of the answer,
    else 0; the advantage; log p_old, where a value above 0 stands for the log p of the step itself; log q. Inputs of
    the model have the shape [N, 1, T], and so has the input ``labels``: the token ids of the answers, -100 elsewhere. A
    target at t is about the token at t + 1, which the model predicts there.

    Args:
        beta: Strength of the tie to the reference, 0 or more.
        epsilon: Bound of the change of a token's probability in the updates from one sample, above 0.
        temperature: What logits are divided by, before samples and here, above 0.
        loss_type: ``"dapo"``: the mean over all tokens; ``"grpo"``: the mean over answers of the mean over tokens.
        chunk: Tokens whose logits are computed at once, to save memory; ``None`` for all. The gradient computes them
            again.

    Source:
        Z. Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        arXiv 2402.03300; names and defaults: TRL's ``GRPOConfig``.
    """

    name: ClassVar[str] = "grpo"
    rows: ClassVar[int | str] = 1
    texts: ClassVar[str] = "prompts"

    beta: float = 0.0
    epsilon: float = 0.2
    temperature: float = 1.0
    loss_type: str = "dapo"
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk)
        check_above_zero(self, epsilon=self.epsilon, temperature=self.temperature)
        if not (isinstance(self.beta, int | float) and np.isfinite(self.beta) and self.beta >= 0):
            raise OptionError(f"beta is {self.beta!r}; grpo needs a finite number of at least 0.")
        if self.loss_type not in ("dapo", "grpo"):
            raise OptionError(f"loss_type is {self.loss_type!r}; it is 'dapo' or 'grpo'.")

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N, 4, T]."""
        size, tokens = prediction.shape or (None, None)
        return size, 4, tokens

    def read(self, rows: Rows) -> Value:
        """Emit the log-probabilities of the tokens [N, T]."""
        labels = rows.add_input("labels", ir.DataType.INT64, (1, rows.tokens()))
        if self.temperature != 1:
            rows = replace(rows, output=(rows.output / self.temperature).with_shape(rows.output.shape))
        found = rows.log_probabilities(labels, self.name, self.chunk)
        size, _, tokens = labels.shape or (None, None, None)
        return named(rows, rows.op.Squeeze(found, rows.op.ints(1)).with_shape((size, tokens)), "log_probabilities")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        parts = [op.Gather(target, op.constant(index), axis=1).with_shape(prediction.shape) for index in range(4)]
        answer, advantage, old, reference = parts
        is_current = op.Greater(old, op.scalar(0.0, old))
        old = op.Where(is_current, stopped(op, prediction), old).with_shape(prediction.shape)
        ratio = op.Exp(prediction - old)
        clipped = op.Clip(ratio, op.scalar(1 - self.epsilon, ratio), op.scalar(1 + self.epsilon, ratio))
        terms = -op.Min(ratio * advantage, clipped * advantage)
        if self.beta:
            difference = reference - prediction
            terms = terms + (op.Exp(difference) - difference - 1.0) * self.beta
        one = op.scalar(1.0, terms)
        of_answers = op.ReduceSum(terms * answer, op.ints(1), keepdims=0).with_shape((prediction.shape or (None,))[:1])
        if self.loss_type == "grpo":
            tokens = op.ReduceSum(answer, op.ints(1), keepdims=0).with_shape(of_answers.shape)
            return mean_of_examples(op, of_answers / op.Max(tokens, one), weights)
        count = op.Max(op.ReduceSum(answer, keepdims=0), one).with_shape(())
        total = op.ReduceSum(of_answers if weights is None else of_answers * weights, keepdims=0).with_shape(())
        return LossTerms((total / count).with_shape(()), count)
