"""Training with differential privacy: what a model learns hides whether any one example was there."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.data import ArrayDataset, Batch
from onnxtrain.errors import DataError, OptionError
from onnxtrain.trainer import Trainer


@dataclass(frozen=True)
class DP:
    """Differential privacy of the examples, by clipped gradients and noise (DP-SGD).

    A step draws every example with the same probability q. With B = q * (number of examples), the batch size that is
    expected, the gradient of the step is::

        g = (sum over the examples drawn of g_i * min(1, clip / ||g_i||) + Normal(0, (noise * clip)^2)) / B

    Args:
        noise: The noise's standard deviation in units of ``clip``.
        clip: Bound on the norm of an example's gradient, over all parameters together.
        delta: The probability with which the guarantee may fail; less than one over the number of examples.
        seed: Seed of the draws and of the noise, for tests. Privacy needs ``None``: numbers that nobody can foretell.

    Raises:
        OptionError: A number is outside its range.

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
        """The epsilon of (epsilon, delta)-differential privacy after some steps, by Rényi differential privacy.

        Args:
            steps: How many steps were taken on the data, over all rounds.
            sampling: The probability q with which a step draws an example.

        Returns:
            Epsilon for examples that are added or removed; infinity without noise.

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
                "pip install 'onnxtrain[flower]'."
            ) from None
        accountant = rdp.RdpAccountant()
        event = dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(self.noise))
        accountant.compose(event, steps)
        return float(accountant.get_epsilon(self.delta))


@dataclass(frozen=True)
class PrivateSteps:
    """Steps that were taken with differential privacy.

    Attributes:
        steps: How many.
        sampling: The probability with which each drew an example.
        loss: The mean loss of the examples drawn, before the updates. It is not private: it stays where the data is.
    """

    steps: int
    sampling: float
    loss: float


def fit_privately(
    trainer: Trainer, data: Any, dp: DP, *, target: str | None = None, epochs: int = 1, batch_size: int = 32
) -> PrivateSteps:
    """Train for as many steps as some epochs have, each on examples that are drawn independently.

    The gradient of one example after the other is clipped: a step takes as long as one on each of them alone.

    Args:
        trainer: What is trained, with at least two micro-batches (``accumulate=2``): gradients are summed apart.
        data: Training data in arrays.
        dp: How much noise, and the bound on gradients.
        target: Name of the target in a file with several arrays left.
        epochs: How often an example is drawn in the mean.
        batch_size: Examples per step in the mean.

    Raises:
        OptionError: The statistics of batch normalization would be taken from the data without noise.
        DataError: The data are not in arrays, or fewer than a batch.
    """
    dataset = _checked(trainer, trainer._open(data, target=target), batch_size)
    generator = np.random.default_rng(dp.seed)
    sampling = batch_size / dataset.size
    steps = epochs * max(1, round(dataset.size / batch_size))
    total, drawn = 0.0, 0
    step = _Step(trainer, dp, generator)
    for index in range(steps):
        chosen = np.flatnonzero(generator.random(dataset.size) < sampling)
        loss = step.take(dataset, chosen, batch_size)
        trainer._executor.check_loss(loss / max(len(chosen), 1), index, trainer.learning_rate)
        total, drawn = total + loss, drawn + len(chosen)
    return PrivateSteps(steps, sampling, total / max(drawn, 1))


def _checked(trainer: Trainer, dataset: Any, batch_size: int) -> ArrayDataset:
    if trainer._objective.statistics:
        raise OptionError(
            "batch_norm='train' takes statistics of the data without noise, which differential privacy does not "
            "allow; leave batch_norm='frozen'."
        )
    if not isinstance(dataset, ArrayDataset):
        raise DataError("Differential privacy draws single examples; give the data as arrays or a file of arrays.")
    if not 1 <= batch_size <= dataset.size:
        raise DataError(f"batch_size is {batch_size}, but there are {dataset.size} examples to draw from.")
    return dataset


class _Step:
    """Steps whose gradient is a sum of clipped gradients, with noise."""

    def __init__(self, trainer: Trainer, dp: DP, generator: np.random.Generator) -> None:
        self._trainer, self._dp, self._generator = trainer, dp, generator
        self._names = [f"{name}/accumulated" for name in trainer.parameters]

    def take(self, dataset: ArrayDataset, chosen: np.ndarray, batch_size: int) -> float:
        """One step on the examples chosen; returns the sum of their losses before it."""
        trainer, names = self._trainer, self._names
        sums = {name: np.zeros(trainer._states[name].shape) for name in names}
        loss = 0.0
        self._clear()
        for batch in dataset.take(chosen).batches(1) if len(chosen) else ():
            loss += self._add(sums, batch)
        states = trainer._states
        spread = self._dp.noise * self._dp.clip
        for name, total in sums.items():
            states[name] = (total + self._generator.normal(0.0, spread, total.shape)).astype(states[name].dtype)
        states["accumulated_weight"] = np.asarray(float(batch_size))
        states["accumulated_loss"] = np.asarray(loss)
        rate = np.asarray(trainer.learning_rate, np.float32)
        trainer._session.step({trainer._objective.names.learning_rate: rate}, entry=1)
        return loss

    def _clear(self) -> None:
        """Make the sums of gradients, weights and losses zero."""
        for name in (*self._names, "accumulated_weight", "accumulated_loss"):
            self._trainer._states[name][...] = 0

    def _add(self, sums: dict[str, np.ndarray], batch: Batch) -> float:
        """Add the clipped gradient of one example; returns its loss."""
        trainer, states = self._trainer, self._trainer._states
        objective = trainer._objective
        found = trainer._session.step(objective.inputs_of(batch) | objective.targets_of(batch), entry=0)
        weight = float(states["accumulated_weight"]) or 1.0
        gradients = {name: states[name].astype(np.float64) / weight for name in self._names}
        norm = math.sqrt(sum(float(np.vdot(gradient, gradient)) for gradient in gradients.values()))
        factor = self._dp.clip / max(norm, self._dp.clip)
        for name, gradient in gradients.items():
            sums[name] += gradient * factor
        self._clear()
        return float(found[trainer._objective.names.loss])


def in_micro_batches(trainer: Trainer) -> Trainer:
    """A trainer of the same weights whose gradients are summed apart from their update."""
    config = dataclasses.replace(trainer.config, accumulate=max(2, trainer.config.accumulate))
    return Trainer._of(config, trainer._objective, dict(trainer._trained))
