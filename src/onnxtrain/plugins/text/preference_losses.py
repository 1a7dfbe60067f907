"""Losses and metrics of preferences between answers: of language models, and of reward models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import Dimension
from onnxtrain.losses.base import TargetKind, check_above_zero, examples, node_rank, softplus
from onnxtrain.losses.chunks import check_chunk
from onnxtrain.losses.groups import GroupLoss, Rows
from onnxtrain.lowering.training_info.recipe import LossTerms, free_names
from onnxtrain.metrics.base import LossMetric, MetricInput, NamedMetric

Rewards = tuple[np.ndarray, np.ndarray]
"""Rewards of chosen and of rejected answers."""


class PreferenceLoss(GroupLoss):
    """Base of losses that prefer some answers to others; metrics are the rewards of these."""

    own_metrics: ClassVar[tuple[str, ...]] = ("rewards/accuracies", "rewards/margins")

    def rewards(self, target: np.ndarray, prediction: np.ndarray) -> Rewards:
        """Return the rewards of chosen and rejected answers, as TRL defines them."""
        raise OptionError(f"{type(self).__name__} does not define rewards().")

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return the meaning of predictions: rewards."""
        return MetricInput(self.name, None, rewards=self.rewards, pairs=self.texts != "judged")


def column(op: Builder, value: Value, index: int) -> Value:
    """Emit one column [N] of a value [N, k]."""
    return op.Gather(value, op.constant(index), axis=1).with_shape((value.shape or (None,))[:1])


def mean_of_examples(op: Builder, terms: Value, weights: Value | None) -> LossTerms:
    """Emit the mean of one term per example [N]."""
    count = examples(op, terms)
    total = op.ReduceSum(terms if weights is None else terms * weights, keepdims=0).with_shape(())
    return LossTerms((total / count).with_shape(()), count)


class AnswerLoss(PreferenceLoss):
    """Base of losses on the log-probabilities of answers, with a factor ``beta`` above 0."""

    beta: float
    chunk: int | None
    of_tokens: ClassVar[bool] = False
    """Predictions are means over the tokens of an answer, not sums."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk)
        check_above_zero(self, beta=self.beta)

    def read(self, rows: Rows) -> Value:
        """Emit the log-probability of the answer of each row [N, k]."""
        op = rows.op
        labels = rows.add_input("labels", ir.DataType.INT64, (rows.size, rows.tokens()))
        found = rows.log_probabilities(labels, self.name, self.chunk)
        summed = op.ReduceSum(found, op.ints(2), keepdims=0).with_shape((labels.shape or ())[:2])
        if self.of_tokens:
            later = op.Slice(labels, op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(2))
            counted = op.cast(op.Not(op.Equal(later, op.scalar(-100, later))), summed.dtype)
            count = op.ReduceSum(counted, op.ints(2), keepdims=0).with_shape(summed.shape)
            summed = (summed / op.Max(count, op.scalar(1, count))).with_shape(summed.shape)
        return named(rows, summed, "log_probabilities")


@checks_arguments
@dataclass(frozen=True)
class DPO(AnswerLoss):
    """Direct preference optimization: the mean over pairs of -log sigmoid(beta d).

    ::

        d = (log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected))

    with p the model, q the reference, and log-probabilities summed over the tokens of the answer. Predictions are the
    log-probabilities of p, [N, 2], chosen first; targets are those of q. The reference is the model before this
    training, without new adapters; from texts its log-probabilities are computed once, before the first step.

    Inputs of the model have the shape [N, 2, tokens], and so has the input ``labels``: the token ids of the answers,
    -100 elsewhere.

    Args:
        beta: Strength of the tie to the reference, above 0.
        chunk: Tokens whose logits are computed at once, to save memory; ``None`` for all. The gradient computes them
            again.

    Source:
        R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        arXiv 2305.18290.
    """

    name: ClassVar[str] = "dpo"
    has_reference: ClassVar[bool] = True

    beta: float = 0.1
    chunk: int | None = None

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        ratio = prediction - target
        difference = column(op, ratio, 0) - column(op, ratio, 1)
        return mean_of_examples(op, softplus(op, -difference * self.beta), weights)

    def rewards(self, target: np.ndarray, prediction: np.ndarray) -> Rewards:
        """Return beta (log p - log q)."""
        found = self.beta * (prediction.astype(np.float64) - target)
        return found[:, 0], found[:, 1]


@checks_arguments
@dataclass(frozen=True)
class IPO(AnswerLoss):
    """Identity preference optimization: the mean over pairs of (d - 1 / (2 beta))^2.

    ::

        d = (log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected))

    with p the model, q the reference as in :class:`DPO`, and log-probabilities that are means over the tokens of an
    answer, as in TRL. Predictions are those of p, [N, 2], chosen first; targets are those of q. Inputs are those of
    :class:`DPO`.

    Args:
        beta: Strength of the tie to the reference, the paper's tau, above 0.
        chunk: Tokens whose logits are computed at once, to save memory; ``None`` for all. The gradient computes them
            again.

    Source:
        M. G. Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences",
        arXiv 2310.12036, equation 17.
    """

    name: ClassVar[str] = "ipo"
    of_tokens: ClassVar[bool] = True
    has_reference: ClassVar[bool] = True

    beta: float = 0.1
    chunk: int | None = None

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        ratio = prediction - target
        rest = column(op, ratio, 0) - column(op, ratio, 1) - 1 / (2 * self.beta)
        return mean_of_examples(op, rest * rest, weights)

    def rewards(self, target: np.ndarray, prediction: np.ndarray) -> Rewards:
        """Return beta (log p - log q)."""
        found = self.beta * (prediction.astype(np.float64) - target)
        return found[:, 0], found[:, 1]


@checks_arguments
@dataclass(frozen=True)
class SimPO(AnswerLoss):
    """Simple preference optimization: the mean over pairs of -log sigmoid(beta (a - b) - gamma).

    a and b are the mean log-probabilities of the tokens of the chosen and the rejected answer. There is no reference.

    Predictions are the log-probabilities of the answers, [N, 2], chosen first; targets are their numbers of tokens.
    Inputs are those of :class:`DPO`.

    Args:
        beta: Factor of the mean log-probabilities, above 0. The paper takes 2 to 2.5; TRL's default is 0.1.
        gamma: Margin of the rewards, 0 or more. The paper takes 0.3 to 1.6; TRL's default is 0.5.
        chunk: Tokens whose logits are computed at once, to save memory; ``None`` for all. The gradient computes them
            again.

    Source:
        Y. Meng, M. Xia, D. Chen, "SimPO: Simple Preference Optimization with a Reference-Free Reward",
        arXiv 2405.14734.
    """

    name: ClassVar[str] = "simpo"

    beta: float = 2.0
    gamma: float = 1.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_factor(self, gamma=self.gamma)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        mean = prediction / target
        difference = (column(op, mean, 0) - column(op, mean, 1)) * self.beta - self.gamma
        return mean_of_examples(op, softplus(op, -difference), weights)

    def rewards(self, target: np.ndarray, prediction: np.ndarray) -> Rewards:
        """Return beta times the mean log-probability of a token."""
        found = self.beta * prediction.astype(np.float64) / target
        return found[:, 0], found[:, 1]


@checks_arguments
@dataclass(frozen=True)
class CPO(AnswerLoss):
    """Contrastive preference optimization: the mean over pairs of -log sigmoid(beta (a - b)), plus alpha n.

    a and b are the log-probabilities of the chosen and the rejected answer, and n is the mean negative log-likelihood
    of the tokens of all chosen answers of a (micro-)batch. There is no reference.

    Predictions are the log-probabilities of the answers, [N, 2], chosen first; targets are their numbers of tokens.
    Inputs are those of :class:`DPO`.

    Args:
        beta: Factor of the difference, above 0.
        alpha: Factor of the likelihood, 0 or more.
        chunk: Tokens whose logits are computed at once, to save memory; ``None`` for all. The gradient computes them
            again.

    Source:
        H. Xu et al., "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine
        Translation", arXiv 2401.08417.
    """

    name: ClassVar[str] = "cpo"
    compares_examples: ClassVar[bool] = True

    beta: float = 0.1
    alpha: float = 1.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_factor(self, alpha=self.alpha)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss; weights multiply the terms of both parts."""
        chosen = column(op, prediction, 0)
        found = mean_of_examples(op, softplus(op, (column(op, prediction, 1) - chosen) * self.beta), weights)
        likelihood = -chosen if weights is None else -chosen * weights
        tokens = op.ReduceSum(column(op, target, 0), keepdims=0)
        nll = op.ReduceSum(likelihood, keepdims=0) / tokens
        return found._replace(loss=(found.loss + nll * self.alpha).with_shape(()))

    def rewards(self, target: np.ndarray, prediction: np.ndarray) -> Rewards:
        """Return beta times the log-probabilities."""
        found = self.beta * prediction.astype(np.float64)
        return found[:, 0], found[:, 1]


def _check_factor(loss: PreferenceLoss, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (np.isfinite(value) and value >= 0):
            raise OptionError(f"{name} is {value!r}; {loss.name} needs a finite number of at least 0.")


def named(rows: Rows, value: Value, name: str) -> Value:
    """Name what a loss reads, for predictions and messages."""
    (value.ir.name,) = free_names(rows.op.graph, [name])
    return value


@checks_arguments
@dataclass(frozen=True)
class ORPO(AnswerLoss):
    """Odds ratio preference optimization: n - beta times the mean over pairs of log sigmoid(log odds ratio).

    ::

        log odds ratio = (a - b) - (log(1 - exp a) - log(1 - exp b))

    with a and b the mean log-probabilities of the tokens of the chosen and the rejected answer, and n the mean negative
    log-likelihood of the tokens of all chosen rows of a (micro-)batch, prompts included, as in TRL. There is no
    reference.

    Predictions are log-probabilities [N, 3]: of the chosen answer, of the rejected one, and of the chosen row with its
    prompt. Targets are their numbers of tokens. Inputs of the model have the shape [N, 2, tokens], and so has the input
    ``labels``: the token ids of the answers, -100 elsewhere; ``chosen_labels`` [N, tokens] has all of the chosen rows.

    Args:
        beta: Factor of the odds ratio, above 0.
        chunk: Tokens whose logits are computed at once, to save memory; ``None`` for all. The gradient computes them
            again.

    Source:
        J. Hong, N. Lee, J. Thorne, "ORPO: Monolithic Preference Optimization without Reference Model",
        arXiv 2403.07691.
    """

    name: ClassVar[str] = "orpo"
    compares_examples: ClassVar[bool] = True

    beta: float = 0.1
    chunk: int | None = None

    def read(self, rows: Rows) -> Value:
        """Emit the log-probabilities [N, 3]."""
        op, tokens = rows.op, rows.tokens()
        labels = rows.add_input("labels", ir.DataType.INT64, (rows.size, tokens))
        whole = rows.add_input("chosen_labels", ir.DataType.INT64, (tokens,))
        # The chosen row counts all of its tokens: answers are picked from the same log-probabilities.
        rejected = op.Gather(labels, op.ints(1), axis=1)
        joined = op.Concat(op.Unsqueeze(whole, op.ints(1)), rejected, axis=1).with_shape(labels.shape)
        found = rows.log_probabilities(joined, self.name, self.chunk)
        chosen = _row(op, found, 0)
        later = op.Slice(_row(op, labels, 0), op.ints(1), op.ints(np.iinfo(np.int64).max), op.ints(1))
        answers = op.cast(op.Not(op.Equal(later, op.scalar(-100, later))), chosen.dtype)
        before = op.Slice(chosen, op.ints(0), op.ints(-1), op.ints(1))
        sums = [
            op.ReduceSum(before * answers, op.ints(1), keepdims=1),
            op.ReduceSum(_row(op, found, 1), op.ints(1), keepdims=1),
            op.ReduceSum(chosen, op.ints(1), keepdims=1),
        ]
        made = op.Concat(*sums, axis=1).with_shape(((labels.shape or (None,))[0], 3))
        return named(rows, made, "log_probabilities")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss; weights multiply the terms of both parts."""
        mean = prediction / target
        a, b = column(op, mean, 0), column(op, mean, 1)
        ratio = (a - b) - (_log_rest(op, a) - _log_rest(op, b))
        odds = mean_of_examples(op, softplus(op, -ratio), weights)
        likelihood, tokens = -column(op, prediction, 2), column(op, target, 2)
        if weights is not None:
            likelihood = likelihood * weights
        nll = op.ReduceSum(likelihood, keepdims=0) / op.ReduceSum(tokens, keepdims=0)
        return odds._replace(loss=(nll + odds.loss * self.beta).with_shape(()))

    def rewards(self, target: np.ndarray, prediction: np.ndarray) -> Rewards:
        """Return beta times the mean log-probability of a token."""
        found = self.beta * prediction[:, :2].astype(np.float64) / target[:, :2]
        return found[:, 0], found[:, 1]


def _row(op: Builder, value: Value, index: int) -> Value:
    """Emit one row [N, T] of each example [N, k, T]."""
    shape = value.shape
    return op.Gather(value, op.constant(index), axis=1).with_shape(None if shape is None else (shape[0], *shape[2:]))


def _log_rest(op: Builder, x: Value) -> Value:
    """Emit log(1 - exp x) for x < 0; the bound keeps it finite for an answer of probability 1."""
    rest = 1.0 - op.Exp(x)
    return op.Log(op.Max(rest, op.scalar(np.finfo(x.dtype.numpy()).eps / 2, x)))


@checks_arguments
@dataclass(frozen=True)
class KTO(AnswerLoss):
    """Kahneman-Tversky optimization on single answers: the mean of w (1 - sigmoid(s beta (r - z))).

    ::

        r = log p(answer) - log q(answer),  s = 1 for a desirable answer, -1 for another
        z = max(0, mean over the (micro-)batch of log p(other) - log q(other))

    with p the model, q the reference as in :class:`DPO`, and "other" the answer of another example behind this prompt.
    z has no gradient. w is ``desirable_weight`` or ``undesirable_weight``.

    Predictions are the log-probabilities [N, 2] of the answer and of the other one. Targets [N, 3] are those of the
    reference, and 1 for a desirable answer, 0 for another. From texts the other answer is that of the row before, of
    the last row for the first, among as many consecutive rows of the data as a (micro-)batch has, as in TRL; with
    batches of one row among all.

    Args:
        beta: Strength of the tie to the reference, above 0.
        desirable_weight: Weight of desirable answers, above 0.
        undesirable_weight: Weight of the others, above 0.
        chunk: Tokens whose logits are computed at once, to save memory; ``None`` for all. The gradient computes them
            again.

    Source:
        K. Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv 2402.01306.
    """

    name: ClassVar[str] = "kto"
    texts: ClassVar[str] = "judged"
    has_reference: ClassVar[bool] = True
    compares_examples: ClassVar[bool] = True
    own_metrics: ClassVar[tuple[str, ...]] = ("rewards/chosen", "rewards/rejected", "rewards/margins")

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above_zero(self, desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight)

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N, 3]."""
        return ((prediction.shape or (None,))[0], 3)

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        ratio = [column(op, prediction, index) - column(op, target, index) for index in range(2)]
        mean = (op.ReduceSum(ratio[1], keepdims=0) / examples(op, ratio[1])).with_shape(())
        divergence = op.Relu(stopped(op, mean))
        desirable = column(op, target, 2)
        sign = desirable * 2.0 - 1.0
        value = op.Sigmoid((ratio[0] - divergence) * self.beta * sign)
        factor = desirable * self.desirable_weight + (1.0 - desirable) * self.undesirable_weight
        return mean_of_examples(op, (1.0 - value) * factor, weights)

    def rewards(self, target: np.ndarray, prediction: np.ndarray) -> Rewards:
        """Return beta (log p - log q) of desirable answers and of the others."""
        found = self.beta * (prediction[:, 0].astype(np.float64) - target[:, 0])
        return found[target[:, 2] > 0.5], found[target[:, 2] <= 0.5]


@checks_arguments
@dataclass(frozen=True)
class Reward(PreferenceLoss):
    """Loss of reward models (Bradley-Terry): mean over pairs of -log sigmoid(c - r - m) + center (c + r)^2.

    c and r are the model's scores of the chosen and the rejected row, m a margin: the target, 0 by default for texts.

    The model returns one score per row, [rows] or [rows, 1], or one per token, [rows, tokens, 1], of which the one at
    the last token counts; then the input ``last`` [N, 2] has the positions of these tokens. Inputs of the model have
    the shape [N, 2, ...]. A language model gets such a head from ``onnxtrain.replace_head(model, 1)``.

    Args:
        center: Factor that keeps rewards near 0, 0 or more.

    Source:
        L. Ouyang et al., "Training language models to follow instructions with human feedback", arXiv 2203.02155;
        center: J. Eisenstein et al., "Helping or Herding?", arXiv 2312.09244.
    """

    name: ClassVar[str] = "reward"
    texts: ClassVar[str] = "rewards"

    center: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        center = self.center
        if not (isinstance(center, int | float) and np.isfinite(center) and center >= 0):
            raise OptionError(f"center is {center!r}; reward needs a finite number of at least 0.")

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return [N]."""
        return (prediction.shape or (None,))[:1]

    def read(self, rows: Rows) -> Value:
        """Emit the scores [N, 2]."""
        return scores(rows, self.name, "rewards")

    def build(self, op: Builder, prediction: Value, target: Value, weights: Value | None = None) -> LossTerms:
        """Emit the loss."""
        chosen, rejected = column(op, prediction, 0), column(op, prediction, 1)
        terms = softplus(op, rejected - chosen + target)
        if self.center:
            both = chosen + rejected
            terms = terms + both * both * self.center
        return mean_of_examples(op, terms, weights)

    def rewards(self, target: np.ndarray, prediction: np.ndarray) -> Rewards:
        """Return the scores."""
        return prediction[:, 0].astype(np.float64), prediction[:, 1].astype(np.float64)


def scores(rows: Rows, loss: str, name: str) -> Value:
    """Emit one score of each row [N, k]; of scores by token the one at the row's last token."""
    op, output = rows.op, rows.output
    rank, shape = node_rank(output), output.shape or ()
    if rank > 1 and shape[-1] != 1:
        raise OptionError(
            f"The loss {loss} needs one score per row, but {output.name!r} has shape {output.shape}; give the model a "
            "head of one output: onnxtrain.replace_head(model, 1), or --new-head 1."
        )
    if rank > 3:
        raise OptionError(f"The loss {loss} needs one score per row, but {output.name!r} has shape {output.shape}.")
    if rank == 3:
        by_token = rows.group(op.Squeeze(output, op.ints(2)).with_shape(shape[:2]))
        last = rows.add_input("last", ir.DataType.INT64, (rows.size,))
        picked = op.GatherElements(by_token, op.Unsqueeze(last, op.ints(2)), axis=2)
        found = op.Squeeze(picked, op.ints(2)).with_shape(last.shape)
    else:
        flat = op.reshape(output, [-1], known=shape[:1]) if rank == 2 else output
        found = rows.group(flat)
    return named(rows, found, name)


_State = tuple[float, float, float, float, float]
"""Sums of the chosen and the rejected rewards, their counts, and the number of pairs in the right order."""


def reward_metric(metric_input: MetricInput, name: str) -> NamedMetric:
    """Return a metric of rewards for a loss."""
    rewards = metric_input.rewards
    if rewards is None:
        raise OptionError(
            f"The metric {name} is for preferences, but the loss {metric_input.loss} has no rewards; it goes with dpo, "
            "ipo, simpo, cpo, orpo, kto and reward."
        )
    if name == "rewards/accuracies" and not metric_input.pairs:
        raise OptionError(
            f"The metric {name} compares the answers of a pair, but the loss {metric_input.loss} has single ones; "
            "measure rewards/margins."
        )
    return NamedMetric(name, lambda y_true, y_pred: _measured(*rewards(y_true, y_pred)), _added, _VALUES[name])


def _measured(chosen: np.ndarray, rejected: np.ndarray) -> _State:
    right = float(np.count_nonzero(chosen > rejected)) if len(chosen) == len(rejected) else 0.0
    return float(chosen.sum()), float(rejected.sum()), float(len(chosen)), float(len(rejected)), right


def _added(one: _State, other: _State) -> _State:
    first, second, third, fourth, fifth = (a + b for a, b in zip(one, other, strict=True))
    return first, second, third, fourth, fifth


def _mean(total: float, count: float) -> float:
    return total / count if count else float("nan")


_VALUES: Final[dict[str, Callable[[_State], float]]] = {
    "rewards/chosen": lambda state: _mean(state[0], state[2]),
    "rewards/rejected": lambda state: _mean(state[1], state[3]),
    "rewards/margins": lambda state: _mean(state[0], state[2]) - _mean(state[1], state[3]),
    "rewards/accuracies": lambda state: _mean(state[4], state[2]),
}

CHOSEN, REJECTED, MARGINS, ACCURACIES = (LossMetric(functools.partial(reward_metric, name=name)) for name in _VALUES)
"""Mean reward of chosen and of rejected answers, their difference, and the share of pairs in which the chosen one has
the higher reward."""
