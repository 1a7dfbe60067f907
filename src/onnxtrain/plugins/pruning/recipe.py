"""Choose the stages of a pruning, its batches and its update rule from the data and the sparsity."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from onnxtrain.operators import SSGD, Adam, Optimizer

_GENTLE: Final = 15.0
"""Compression up to which one stage suffices."""

_STEP: Final = 3.0
"""Most that a further stage multiplies the compression by."""

_EXAMPLES: Final = 60_000
"""Number of examples for which the numbers of epochs below were found (MNIST); fewer take more epochs."""

_EPOCHS: Final = {"dense": (12, 0), "first": (6, 3), "between": (5, 3), "last": (8, 6)}
"""Epochs with a cut after each, and epochs of fine-tuning, of the stages; of a dense training before several stages."""

_MANY: Final = 10_000
"""Number of examples from which a batch has 64 of them instead of 32."""

_WARMED: Final = 20
"""Number of steps from which a training begins with a warm-up."""

DEFAULT_OPTIMIZER: Final = SSGD(learning_rate=0.025, alpha=0.9, max_scale=5.0, regularization=1e-4)
"""Update rule of :func:`prune` without ``optimizer=``, found on MNIST: momentum, steps scaled by at most 5."""


@dataclass(frozen=True)
class Stage:
    """A part of a pruning: training with cuts, then fine-tuning under the last mask."""

    sparsity: float | None
    epochs: int
    rounds: int
    fine_tune_epochs: int


def choose_stages(
    sparsity: float | None,
    *,
    zeros: float,
    examples: int | None,
    epochs: int | None,
    rounds: int | None,
    fine_tune_epochs: int | None,
) -> list[Stage]:
    """Return the stages: one if its epochs or cuts are given, or a search finds the sparsity.

    Otherwise each stage multiplies the compression by at most three, since accuracy is lost in the last cuts, and
    training and fine-tuning between them recover it.

    Example:
        >>> chosen = dict(zeros=0.0, examples=60_000, epochs=None, rounds=None, fine_tune_epochs=None)
        >>> [(round(1 / (1 - stage.sparsity)), stage.epochs) for stage in choose_stages(1 - 1 / 68, **chosen)]
        [(15, 6), (32, 5), (68, 8)]
        >>> choose_stages(0.9, **chosen)
        [Stage(sparsity=0.9, epochs=8, rounds=8, fine_tune_epochs=6)]
    """
    scaled = _epochs(examples)
    if sparsity is None or not (epochs is None and rounds is None and fine_tune_epochs is None):
        training, tuning = scaled["last"]
        chosen = max(training, rounds or 1) if epochs is None else epochs
        if epochs is not None:
            tuning = round(0.75 * epochs)
        cuts = rounds if rounds is not None else 1 if sparsity is None else max(chosen, 1)
        return [Stage(sparsity, chosen, cuts, tuning if fine_tune_epochs is None else fine_tune_epochs)]
    compression = 1 / (1 - sparsity)
    more = max(0, math.ceil(math.log(compression / _GENTLE) / math.log(_STEP) - 1e-9))
    wanted = [_GENTLE * (compression / _GENTLE) ** (part / more) for part in range(more)] if more else []
    before = [1 - 1 / c for c in wanted if 1 - 1 / c > zeros]
    kinds = ["first" if index == 0 else "between" for index in range(len(before))]
    stages = []
    for kind, target in zip([*kinds, "last"], [*before, sparsity], strict=True):
        training, tuning = scaled[kind]
        stages.append(Stage(target, training, training, tuning))
    return stages


def _epochs(examples: int | None) -> dict[str, tuple[int, ...]]:
    factor = 1.0 if examples is None else min(3.0, max(0.5, math.sqrt(_EXAMPLES / max(examples, 1))))
    return {name: tuple(max(1, round(factor * count)) for count in counts) for name, counts in _EPOCHS.items()}


def dense_epochs(examples: int | None) -> int:
    """Return the epochs of the dense training of a model that has learned nothing, before it is cut in stages."""
    return _epochs(examples)["dense"][0]


def choose_fine_tuning(sparsity: float | None, rule: Optimizer) -> Optimizer:
    """Return the update rule of the fine-tuning: Adam where so few weights remain that they are cut in stages."""
    few = isinstance(sparsity, (int, float)) and 0 <= sparsity < 1 and 1 / (1 - sparsity) > _GENTLE
    return Adam(3e-3) if few else rule.plain()


def choose_batch_size(examples: int | None) -> int:
    """Return the number of examples of a step."""
    return 64 if examples is not None and examples >= _MANY else 32


def choose_schedule(steps: int | None, *, falling: bool) -> str:
    """Return the learning-rate schedule of a training: after a warm-up a constant rate, or a cosine to zero."""
    shape = "cosine" if falling else "constant"
    return f"warmup(0.05)+{shape}" if steps is not None and steps >= _WARMED else shape


def choose_optimizer(sparsity: float | None) -> SSGD:
    """Return the update rule for a sparsity: more regularization where few weights remain.

    Example:
        >>> choose_optimizer(0.9) == DEFAULT_OPTIMIZER
        True
        >>> round(choose_optimizer(1 - 1 / 280).regularization, 5)
        0.00028
    """
    valid = isinstance(sparsity, (int, float)) and 0 <= sparsity < 1  # prune refuses others
    strength = min(3.0, max(1.0, 0.01 / (1 - sparsity))) if valid and sparsity is not None else 1.0
    return replace(DEFAULT_OPTIMIZER, regularization=strength * DEFAULT_OPTIMIZER.regularization)
