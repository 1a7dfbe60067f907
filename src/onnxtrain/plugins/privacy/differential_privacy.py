"""Differentially private training (DP-SGD)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.data import ArrayDataset, Batch
from onnxtrain.errors import DataError, OptionError
from onnxtrain.training.trainer import Trainer


@dataclass(frozen=True)
class DP:
    """Differential privacy of examples by clipped gradients and noise (DP-SGD).

    A step samples every example independently with probability q. With the expected batch size B = q * (number of
    examples), the gradient of the step is::

        g = (sum over the sampled examples of g_i * min(1, clip / ||g_i||) + Normal(0, (noise * clip)^2)) / B

    Args:
        noise: Standard deviation of the noise in units of ``clip``.
        clip: Bound on the norm of an example's gradient, over all parameters together.
        delta: Probability that the guarantee fails; choose less than 1 / (number of examples).
        seed: Seed of sampling and noise, for tests only; privacy needs unpredictable noise (``None``).

    Raises:
        OptionError: A value is out of range.

    Source: Abadi et al., Deep Learning with Differential Privacy, https://arxiv.org/abs/1607.00133, algorithm 1.
    """

    noise: float = 1.0
    clip: float = 1.0
    delta: float = 1e-5
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("noise", "at least 0"), ("clip", "above 0")):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 or (name == "noise" and value == 0))):
                raise OptionError(f"{name} is {value}; differential privacy needs a finite number {low}.")
        if not 0 < self.delta < 1:
            raise OptionError(f"delta is {self.delta}; it is a probability above 0 and below 1.")

    def epsilon(self, steps: int, sampling: float) -> float:
        """Return the epsilon of (epsilon, delta)-differential privacy after some steps, by Rényi accounting.

        Args:
            steps: Number of steps on the data, over all rounds.
            sampling: Probability q that a step samples an example.

        Returns:
            Epsilon for adding or removing an example; infinity without noise.

        Raises:
            OptionError: The package dp-accounting is not installed.
        """
        if not self.noise:
            return math.inf
        try:
            import dp_accounting
            from dp_accounting import rdp
        except ImportError:
            raise OptionError(
                "Differential privacy counts its epsilon with dp-accounting, which is not installed; install it with "
                "pip install dp-accounting."
            ) from None
        accountant = rdp.RdpAccountant()
        event = dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(self.noise))
        accountant.compose(event, steps)
        return float(accountant.get_epsilon(self.delta))


@dataclass(frozen=True)
class PrivateSteps:
    """Result of differentially private steps."""

    steps: int
    sampling: float
    loss: float


def fit_privately(
    trainer: Trainer, data: Any, dp: DP, *, target: str | None = None, epochs: int = 1, batch_size: int = 32
) -> PrivateSteps:
    """Train for a number of epochs, with examples sampled independently for each step."""
    with trainer.executor.states.training("fit_privately"):
        return _fit(
            trainer, _checked(trainer, trainer.open_data(data, target=target), batch_size), dp, epochs, batch_size
        )


def _fit(trainer: Trainer, dataset: ArrayDataset, dp: DP, epochs: int, batch_size: int) -> PrivateSteps:
    generator = np.random.default_rng(dp.seed)
    sampling = batch_size / dataset.size
    steps = epochs * max(1, round(dataset.size / batch_size))
    total, drawn = 0.0, 0
    step = _Step(trainer, dp, generator)
    for index in range(steps):
        chosen = np.flatnonzero(generator.random(dataset.size) < sampling)
        with trainer.executor.states.writing():
            loss = step.take(dataset, chosen, batch_size)
        trainer.executor.check_loss(loss / max(len(chosen), 1), index, trainer.learning_rate)
        total, drawn = total + loss, drawn + len(chosen)
    return PrivateSteps(steps, sampling, total / max(drawn, 1))


def _checked(trainer: Trainer, dataset: Any, batch_size: int) -> ArrayDataset:
    if trainer.objective.statistics:
        raise OptionError(
            "batch_norm='train' computes statistics of the data without noise, which differential privacy does not "
            "allow; leave batch_norm='frozen'."
        )
    if not isinstance(dataset, ArrayDataset):
        raise DataError("Differential privacy samples single examples; give the data as arrays or a file of arrays.")
    if not 1 <= batch_size <= dataset.size:
        raise DataError(f"batch_size is {batch_size}, but there are {dataset.size} examples to sample from.")
    return dataset


class _Step:
    """Steps on a sum of clipped gradients with noise."""

    def __init__(self, trainer: Trainer, dp: DP, generator: np.random.Generator) -> None:
        self._trainer, self._dp, self._generator = trainer, dp, generator
        self._names = [f"{name}/accumulated" for name in trainer.parameters]

    def take(self, dataset: ArrayDataset, chosen: np.ndarray, batch_size: int) -> float:
        """Train one step on the chosen examples; return the sum of their losses before the update."""
        trainer, names = self._trainer, self._names
        sums = {name: np.zeros(trainer.executor.states[name].shape) for name in names}
        loss = 0.0
        self._clear()
        for batch in dataset.take(chosen).batches(1) if len(chosen) else ():
            loss += self._add(sums, batch)
        states = trainer.executor.states
        spread = self._dp.noise * self._dp.clip
        for name, total in sums.items():
            states[name] = (total + self._generator.normal(0.0, spread, total.shape)).astype(states[name].dtype)
        states["accumulated_weight"] = np.asarray(float(batch_size))
        states["accumulated_loss"] = np.asarray(loss)
        rate = np.asarray(trainer.learning_rate, np.float32)
        trainer.executor.session.step({trainer.objective.names.learning_rate: rate}, entry=1)
        return loss

    def _clear(self) -> None:
        """Set the sums of gradients, weights and losses to zero."""
        for name in (*self._names, "accumulated_weight", "accumulated_loss"):
            self._trainer.executor.states[name][...] = 0

    def _add(self, sums: dict[str, np.ndarray], batch: Batch) -> float:
        """Add the clipped gradient of one example to the sums; return its loss."""
        trainer, states = self._trainer, self._trainer.executor.states
        objective = trainer.objective
        found = trainer.executor.session.step(objective.feeds(batch), entry=0)
        weight = float(states["accumulated_weight"]) or 1.0
        gradients = {name: states[name].astype(np.float64) / weight for name in self._names}
        norm = math.sqrt(sum(float(np.vdot(gradient, gradient)) for gradient in gradients.values()))
        factor = self._dp.clip / max(norm, self._dp.clip)
        for name, gradient in gradients.items():
            sums[name] += gradient * factor
        self._clear()
        return float(found[trainer.objective.names.loss])


def in_micro_batches(trainer: Trainer) -> Trainer:
    """Return a trainer of the same weights that sums gradients apart from the update."""
    return trainer.rebuilt(accumulate=max(2, trainer.config.accumulate))
