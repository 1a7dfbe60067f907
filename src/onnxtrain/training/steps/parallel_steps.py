"""Steps of several processes on one model: gradients of the parts of a batch, their sum, the same update everywhere."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.callbacks.stopping import Stopping
from onnxtrain.config import TrainingConfig
from onnxtrain.data import Dataset
from onnxtrain.data.shares import shared
from onnxtrain.errors import ParallelError
from onnxtrain.parallel.reduction import Reduction, Take
from onnxtrain.passes.notify_gradients import LISTENER
from onnxtrain.runtime.native import kernels_available
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training.checkpoints.fingerprint import differences
from onnxtrain.training.description import describe_model, describe_settings, describe_weights
from onnxtrain.training.objective import Objective
from onnxtrain.training.steps.buckets import buckets
from onnxtrain.training.steps.steps import Arrays, Steps
from onnxtrain.training_info.algorithm import FirstValues
from onnxtrain.training_info.entry import Entry
from onnxtrain.version import __version__


class ParallelSteps(Steps):
    """Steps of which every process takes a part of the batch; all of them have the same parameters and states.

    A batch is divided by rows: with N processes each takes ceil(rows / N) of them, the last ones what is left. Each
    computes weight * gradient of its part, and weight * loss; the sums over the processes, in the order of the ranks,
    are what one process would have added up of N micro-batches, bit for bit. Then every process takes the same update.

    Running statistics of batch normalization become their means over the processes that had a part.

    Attributes:
        scatters: Whether each process needs the sums of its share of the gradients alone.

    Args:
        objective: What is minimised.
        config: What the objective was made for, with a communicator of several processes.
        states: Buffers of an earlier config to go on with; by default new ones, with the values of rank 0.
        values: What new buffers have, where that is not what the model has.

    Raises:
        ParallelError: A process has another version, another model or other settings, or does not answer.
    """

    scatters = False

    def __init__(
        self,
        objective: Objective,
        config: TrainingConfig,
        *,
        states: StateBuffers | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        assert config.parallel is not None
        self.communicator = config.parallel
        super().__init__(objective, config, states=states, values=values)
        self._signal = self._signal_of_any = 0
        self._losses = [0.0] * self.communicator.size
        self._table = np.zeros((self.communicator.size, 4 + len(self._part_names)))
        if states is None:
            agree(self.communicator, self._description())
            for name in self.states:
                if name not in self.transient:
                    self.communicator.broadcast_(self.states.current(name))
            self.check()
        self._gradients = self._join_gradients()
        compressed = self.communicator.compress is not None
        self._residuals = [np.zeros_like(gradients) for gradients in self._gradients] if compressed else []
        groups = [functools.partial(self._reduce, bucket) for bucket in range(len(self._buckets))]
        self._reduction = Reduction(self.communicator, groups, take=self._taker(), overlap=self.overlaps)
        self._listener = {LISTENER: np.asarray(self._reduction.address)}

    @property
    def overlaps(self) -> bool:
        """Whether gradients are added up in another thread while the backward pass goes on."""
        return self.communicator.overlap

    def _taker(self) -> Take | None:
        """What takes gradients over that are not kept; see :class:`~onnxtrain.parallel.reduction.Reduction`."""
        return None

    def _join_gradients(self) -> list[np.ndarray]:
        """The gradients of each bucket in one memory."""
        size = self.communicator.size
        return [self.states.join([f"{name}/accumulated" for name in bucket], parts=size) for bucket in self._buckets]

    @functools.cached_property
    def _buckets(self) -> list[list[str]]:
        """The parameters in the order in which their gradients come, in groups that are added up together."""
        return buckets(self.objective, self.communicator.size)

    def _build(self, objective: Objective) -> tuple[list[Entry], FirstValues]:
        entries, values = super()._build(objective)
        if self.overlaps and len(self._buckets) > 1:
            entries[0].announced = [[f"{name}/accumulated" for name in bucket] for bucket in self._buckets]
        return entries, values

    def _reduce(self, bucket: int) -> None:
        """Add the gradients of a bucket up, or those of this process's share."""
        communicator, gradients = self.communicator, self._gradients[bucket]
        if communicator.compress is not None:
            communicator.compress.reduce_(communicator, gradients, self._residuals[bucket], scatter=self.scatters)
        elif self.scatters:
            communicator.reduce_scatter_(gradients.reshape(communicator.size, -1))
        else:
            communicator.all_reduce_(gradients)

    def _description(self) -> dict[str, Any]:
        """What has to be the same in all processes."""
        import onnxruntime

        config = self.config
        trained = [*self.objective.parameters, *self.objective.statistics, *(c.name for c in self.objective.copies)]
        return {
            "onnxtrain": __version__,
            "onnxruntime": onnxruntime.__version__,
            "numpy": np.__version__,
            "processes": self.communicator.size,
            "kernels": kernels_available(),
            "shared": [config.shard_states, config.shard_gradients],
            "compression": repr(self.communicator.compress),
            "model": describe_model(config.model)["model"],
            "frozen weights": describe_weights(config.model, without=trained),
            **describe_settings(config, self.objective),
        }

    def rows_of(self, rows: int) -> slice:
        """The rows of a batch of so many that this process takes."""
        each = -(-rows // self.communicator.size) if self.fixed is None else self.fixed.size * self.accumulate
        start = min(self.communicator.rank * each, rows)
        return slice(start, min(start + each, rows))

    def share(self, dataset: Dataset) -> Dataset:
        """What this process takes of every batch of a dataset."""
        return shared(dataset, lambda number, rows: self.rows_of(rows))

    @property
    def most_rows(self) -> int | None:
        """How many examples a step takes at most; ``None`` for any number."""
        return None if self.fixed is None else self.fixed.size * self.accumulate * self.communicator.size

    def step(self, feeds: Arrays, learning_rate: float) -> float:
        """One step on a whole batch, which every process has; see :meth:`step_share`."""
        if self.fixed is not None:
            self._check_rows(feeds)
        rows = self.rows_of(self._rows(feeds))
        return self.step_share(
            {key: value[rows] if value.ndim else value for key, value in feeds.items()}, learning_rate
        )

    def step_share(self, feeds: Arrays, learning_rate: float) -> float:
        """One step of all processes, each on its part of the batch, which may be empty; returns the loss of all.

        Raises:
            ParallelError: Another process has ended, or does not answer.
            StepError: onnxruntime failed.
        """
        names, states = self.objective.names, self.states
        rate = {names.learning_rate: np.asarray(learning_rate, dtype=np.float32)}
        weight, loss = self._add_up_and_share(feeds, rate)
        states.current("accumulated_weight")[...], states.current("accumulated_loss")[...] = weight, loss
        return float(self.session.step(rate, entry=1)[names.loss])

    def _add_up_and_share(self, feeds: Arrays, rate: Arrays) -> tuple[float, float]:
        """Add up gradients of all processes; returns the weight and the loss of all parts."""
        states, table = self.states, self._table
        weight, loss = states.current("accumulated_weight"), states.current("accumulated_loss")
        rows = self._rows(feeds)
        if not rows or self.accumulate > 1:
            for sums in (*self._gradients, weight, loss):
                sums[...] = 0
        with self._reduction.beside(self._micro_batches(rows)):
            parts = self._add_up(feeds, rate | self._listener) if rows else {}
        of_parts = [parts.get(name, 0.0) for name in self._part_names]
        table[self.communicator.rank] = [float(weight), float(loss), rows, self._signal, *of_parts]
        self.communicator.all_gather_(table)
        weights, self._losses, counts, signals, *all_parts = table.T.tolist()
        self._signal_of_any = int(max(signals))
        if self.objective.statistics:
            self._mean_statistics(table[:, 2] > 0)
        if all_parts:
            scales = np.ones(len(counts)) if self._sums else table[:, 2] / sum(counts)
            self.parts = {
                name: float(scales @ column) for name, column in zip(self._part_names, all_parts, strict=True)
            }
        return sum(weights), sum(self._losses)

    @property
    def residual_names(self) -> list[str]:
        """What a checkpoint has beside :attr:`kept_names` of gradients that were not sent, [processes, ...] each."""
        return [f"{name}/residual" for name in self.objective.parameters] if self._residuals else []

    def kept_states(self) -> dict[str, np.ndarray]:
        """What a checkpoint has; all processes have to ask for it."""
        return super().kept_states() | self._kept_residuals()

    def _kept_residuals(self) -> dict[str, np.ndarray]:
        found = {}
        for name, own in self._residuals_of().items():
            whole = np.zeros((self.communicator.size, *own.shape), own.dtype)
            whole[self.communicator.rank] = own
            self.communicator.all_gather_(whole)
            found[f"{name}/residual"] = whole
        return found

    def take_states(self, values: Mapping[str, np.ndarray]) -> None:
        """Take over what a checkpoint has; of what another number of processes has not sent, each takes a part."""
        size, rank = self.communicator.size, self.communicator.rank
        for name, own in self._residuals_of().items():
            given = values.get(f"{name}/residual")
            if given is not None:
                own[...] = given[rank] if len(given) == size else given.sum(axis=0) / size
        residuals = set(self.residual_names)
        super().take_states({name: value for name, value in values.items() if name not in residuals})

    def go_on_from(self, before: Steps) -> None:
        """Take over what the steps of an earlier config have not sent."""
        super().go_on_from(before)
        if isinstance(before, ParallelSteps):
            others = before._residuals_of()
            for name, own in self._residuals_of().items():
                if name in others:
                    own[...] = others[name]

    def _residuals_of(self) -> dict[str, np.ndarray]:
        """What this process has not sent, by parameter."""
        found = {}
        for bucket, gradients, residual in zip(self._buckets, self._gradients, self._residuals, strict=False):
            for name in bucket:
                array = self.states.current(f"{name}/accumulated")
                start = (array.ctypes.data - gradients.ctypes.data) // array.itemsize
                found[name] = residual[start : start + array.size].reshape(array.shape)
        return found

    def tell(self, stopping: Stopping) -> None:
        """Let the other processes know, in the next step, that this one has been asked to stop."""
        self._signal = stopping.signal or 0

    def asked(self, stopping: Stopping) -> bool:
        """Whether a process has been asked to stop, as all of them know since the last step."""
        if self._signal_of_any and stopping.signal is None:
            stopping.signal = self._signal_of_any
        return self._signal_of_any != 0

    def agree(self, identity: Mapping[str, Any]) -> None:
        """Find out that all processes are about to do the same.

        Raises:
            ParallelError: One is not.
        """
        agree(self.communicator, {key: value for key, value in identity.items() if key != "weights"})

    def check(self) -> None:
        """Find out that all processes have the same weights.

        Raises:
            ParallelError: One has others.
        """
        trained = [*self.objective.parameters, *self.objective.statistics]
        check_weights(self.communicator, {name: self.states.current(name) for name in trained})

    def _mean_statistics(self, present: np.ndarray) -> None:
        """Give all processes the means of the running statistics of those that had a part."""
        statistics = [self.states.current(name) for name in self.objective.statistics]
        together = np.concatenate([array.reshape(-1) for array in statistics])
        if not present[self.communicator.rank]:
            together[...] = 0
        self.communicator.all_reduce_(together)
        together /= np.count_nonzero(present)
        for array in statistics:
            array[...] = together[: array.size].reshape(array.shape)
            together = together[array.size :]

    @property
    def origin(self) -> str:
        """Where a loss that is no number comes from, in words."""
        ranks = [str(rank) for rank in np.flatnonzero(~np.isfinite(self._losses))]
        return "" if not ranks else f"It comes from rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}."


def agree(communicator: Any, description: Mapping[str, Any]) -> None:
    """Find out that all processes are about to do the same.

    Raises:
        ParallelError: One is not; the message names it and what differs.
    """
    records = communicator.gather_objects(dict(description))
    for rank, record in enumerate(records):
        different = differences(record, records[0])
        if different:
            words = ", ".join(words.replace(" here", " of rank 0") for words in different.values())
            words = words.replace(" there", f" of rank {rank}")
            raise ParallelError(f"Rank {rank} does not train what rank 0 trains: {words}; start all with the same.")


def check_weights(communicator: Any, values: Mapping[str, np.ndarray]) -> None:
    """Find out that all processes have the same values.

    Raises:
        ParallelError: One has others.
    """
    found = {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in values.items()}
    records = communicator.gather_objects(found)
    for rank, record in enumerate(records):
        other = [name for name, checksum in record.items() if checksum != records[0][name]]
        if other:
            raise ParallelError(
                f"Rank {rank} has other values of {', '.join(other[:5])} than rank 0: something changed them in one "
                "process alone, such as a callback or a script that asks for its rank."
            )
