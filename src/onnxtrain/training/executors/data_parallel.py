"""Data-parallel training: each rank computes gradients of its part of a batch; all apply their sum."""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain import __version__
from onnxtrain.data import Batch, Dataset
from onnxtrain.data.hashing import checksum
from onnxtrain.distributed.communicator import SAME_CALLS, Communicator, check_same
from onnxtrain.distributed.reduction import Reduction
from onnxtrain.errors import ParallelError
from onnxtrain.graph.clone import all_nodes
from onnxtrain.lowering.notify_gradients import LISTENER
from onnxtrain.lowering.training_info.algorithm import FirstValues
from onnxtrain.lowering.training_info.recipe import StepEntry
from onnxtrain.runtime.native import all_reducing, kernels_available
from onnxtrain.training.callbacks.stopping import Stopping
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.description import describe_model, describe_settings, describe_weights, differences
from onnxtrain.training.executors.executor import Arrays, Executor
from onnxtrain.training.objective import Objective

BUCKET_BYTES = 4 << 20
"""Bytes of a gradient bucket for few ranks: smaller buckets cost latency, larger ones are ready late."""

FEW = 64
"""Number of ranks that split a bucket of :data:`BUCKET_BYTES` into messages of 64 KiB. Latency dominates the cost of
smaller messages: 15 us each, and 0.37 ns per byte, on the machine of benchmarks/pages/machines.md (measured by
`benchmarks/cost_model.py`)."""


def bucket_bytes(processes: int) -> int:
    """Return the size of a bucket for this number of ranks.

    Each rank sends every other rank its share of a bucket. Buckets grow with the number of ranks above :data:`FEW`,
    so that messages do not become smaller.

    >>> [bucket_bytes(processes) >> 20 for processes in (2, 64, 128, 1024)]
    [4, 4, 8, 64]
    """
    return BUCKET_BYTES * max(processes, FEW) // FEW


def buckets(objective: Objective, processes: int) -> list[list[str]]:
    """Group parameters into buckets of one type, in reverse order of their first readers: so gradients are ready."""
    enough = bucket_bytes(processes)
    graph = objective.model.graph
    first: dict[str, int] = {}
    for position, node in enumerate(all_nodes(graph)):
        for value in node.inputs:
            if value is not None and value.name is not None:
                first.setdefault(value.name, position)
    names = sorted(objective.parameters, key=lambda name: first.get(name, 0), reverse=True)
    found: list[list[str]] = []
    open_bytes: dict[object, tuple[list[str], int]] = {}
    for name in names:
        value = graph.initializers[name]
        assert value.const_value is not None
        bucket, size = open_bytes.get(value.dtype, ([], 0))
        if not bucket:
            found.append(bucket)
        bucket.append(name)
        size += value.const_value.nbytes
        open_bytes[value.dtype] = (bucket, size) if size < enough else ([], 0)
    return found


class DataParallelExecutor(Executor):
    """Run steps in which every rank takes a part of the batch; all ranks have the same parameters and states."""

    scatters = frees_gradients = False

    def __init__(
        self, objective: Objective, config: TrainingConfig, values: Mapping[str, np.ndarray] | None = None
    ) -> None:
        assert config.parallel is not None
        self.communicator = config.parallel
        super().__init__(objective, config, values)
        self._signal = self._signal_of_any = 0
        self._losses = [0.0] * self.communicator.size
        self._table = np.zeros((self.communicator.size, 6 + len(self._part_names)))
        self._steps, self._whole = 0, (0, 0)  # rows and checksum of the whole batch
        agree(self.communicator, self._description())
        for name in self.states:
            if name not in self.transient:
                self.communicator.broadcast_(self.states.current(name))
        self.check_equal_weights()
        self._gradients = self._make_gradients_contiguous()
        compressed = self.communicator.compress is not None
        self._residuals = [np.zeros_like(gradients) for gradients in self._gradients] if compressed else []
        groups = [functools.partial(self._reduce, bucket) for bucket in range(len(self._buckets))]
        self._reduction = Reduction(
            self.communicator, groups, self._announced, overlap=self.overlaps, at_once=self.frees_gradients
        )
        self._listener = {LISTENER: np.asarray(self._reduction.address)}

    @property
    def overlaps(self) -> bool:
        """True where another thread adds up gradients during the backward pass."""
        return self.communicator.overlap

    def _announced(self, bucket: int, addresses: bytes) -> bool:
        """Return whether the finished gradients of a bucket lie in the memory that is reduced."""
        return addresses == self._addresses[bucket]

    @functools.cached_property
    def _addresses(self) -> list[bytes]:
        places = [[self.states.current(f"{name}/accumulated").ctypes.data for name in names] for names in self._buckets]
        return [np.asarray(of_bucket, np.uint64).tobytes() for of_bucket in places]

    def _make_gradients_contiguous(self) -> list[np.ndarray]:
        """Move the gradients of each bucket into one array."""
        size = self.communicator.size
        return [
            self.states.make_contiguous([f"{name}/accumulated" for name in bucket], parts=size)
            for bucket in self._buckets
        ]

    @functools.cached_property
    def _buckets(self) -> list[list[str]]:
        """Parameters in the order in which their gradients are ready, in groups that are reduced together."""
        return buckets(self.objective, self.communicator.size)

    def _build(self, objective: Objective, config: TrainingConfig) -> tuple[list[StepEntry], FirstValues]:
        entries, values = super()._build(objective, config)
        if self.overlaps and len(self._buckets) > 1:
            entries[0].notified_groups = [[f"{name}/accumulated" for name in bucket] for bucket in self._buckets]
        return entries, values

    def _reduce(self, bucket: int) -> None:
        """Sum the gradients of a bucket, or of this rank's share of it, over the ranks."""
        communicator, gradients = self.communicator, self._gradients[bucket]
        if communicator.compress is not None:
            communicator.compress.reduce_(communicator, gradients, self._residuals[bucket], scatter=self.scatters)
        elif self.scatters:
            communicator.reduce_scatter_(gradients.reshape(communicator.size, -1))
        else:
            communicator.all_reduce_(gradients)

    def _description(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""
        import onnxruntime

        config = self.config
        trained = [*self.objective.parameters, *self.objective.statistics, *(c.name for c in self.objective.copies)]
        return {
            "onnxtrain": __version__,
            "onnxruntime": onnxruntime.__version__,
            "numpy": np.__version__,
            "processes": self.communicator.size,
            "kernels": kernels_available(),
            "shared": [config.distributed.shard_states, config.distributed.shard_gradients],
            "compression": repr(self.communicator.compress),
            "model": describe_model(config.model)["model"],
            "frozen weights": describe_weights(config.model, without=trained),
            **describe_settings(config, self.objective),
        }

    def rows_of(self, rows: int) -> slice:
        """Return this rank's slice of a batch of this number of rows."""
        each = -(-rows // self.communicator.size) if self.fixed is None else self.fixed.size * self.config.accumulate
        start = min(self.communicator.rank * each, rows)
        return slice(start, min(start + each, rows))

    def share(self, dataset: Dataset) -> Dataset:
        """Return this rank's share of every batch of a dataset."""
        return dataset.shared(lambda number, rows: self.rows_of(rows))

    @property
    def most_rows(self) -> int | None:
        """Largest number of examples in a step; ``None`` for any number."""
        return None if self.fixed is None else self.fixed.size * self.config.accumulate * self.communicator.size

    def step(self, feeds: Arrays, learning_rate: float) -> float:
        """Train one step on a whole batch that every rank holds; see :meth:`step_share`."""
        if self.fixed is not None:
            self._check_rows(feeds)
        self._whole = self._rows(feeds), checksum(feeds.values())
        rows = self.rows_of(self._rows(feeds))
        return self.step_share(self._stepped.some_rows(feeds, rows), learning_rate)

    def step_batch(self, batch: Batch, learning_rate: float) -> float:
        """Train one step on this rank's part of a batch of a dataset; see :meth:`step_share`."""
        self._whole = batch.total, batch.content
        return super().step_batch(batch, learning_rate)

    def step_share(self, feeds: Arrays, learning_rate: float) -> float:
        """Train one step on this rank's part of the batch, possibly empty; return the loss over all ranks."""
        names, states = self.objective.names, self.states
        rate = {names.learning_rate: np.asarray(learning_rate, dtype=np.float32)}
        weight, loss = self._add_up_and_share(feeds, rate)
        states.current("accumulated_weight")[...], states.current("accumulated_loss")[...] = weight, loss
        return float(self.session.step(rate, entry=1)[names.loss])

    def _add_up_and_share(self, feeds: Arrays, rate: Arrays) -> tuple[float, float]:
        """Add up the gradients of all ranks; return the total weight and loss."""
        table, totals = self._table, ("accumulated_weight", "accumulated_loss")
        rows = self._rows(feeds)
        if not rows or self.config.accumulate > 1:
            for total in (*self._gradients, *map(self.states.current, totals)):
                total[...] = 0
        label_scales = self._scaled.scale_feeds(self._label_weights(feeds))
        with self._reduction.overlapping(self._micro_batches(rows)):
            parts = self._add_up(feeds, rate | label_scales | self._listener) if rows else {}
        of_parts = [parts.get(name, 0.0) for name in self._part_names]
        weight, loss = (float(self.states.current(name)) for name in totals)
        table[self.communicator.rank] = [weight, loss, rows, self._signal, *self._whole, *of_parts]
        self.communicator.all_gather_(table)
        weights, self._losses, counts, signals, wholes, contents, *all_parts = table.T.tolist()
        self._signal_of_any = int(max(signals))
        self._steps += 1
        check_same(f"In step {self._steps}", wholes, contents)
        if self.objective.statistics:
            self._mean_statistics(table[:, 2] > 0)
        if all_parts:
            sums = any(head.loss.reduction == "sum" for head in self.objective.heads)
            scales = np.ones(len(counts)) if sums else table[:, 2] / sum(counts)
            self.parts = {
                name: float(scales @ column) for name, column in zip(self._part_names, all_parts, strict=True)
            }
        return sum(weights), sum(self._losses)

    def _label_weights(self, feeds: Arrays) -> list[float]:
        own = super()._label_weights(feeds)
        if len(own) == 1:
            return own
        columns = self.communicator.gather(np.asarray(own, np.float64)).T.tolist()
        return [functools.reduce(operator.add, column) for column in columns]

    @property
    def residual_names(self) -> list[str]:
        """Names of the residuals of compressed gradients [ranks, ...], which a checkpoint may lack."""
        return [f"{name}/residual" for name in self.objective.parameters] if self._residuals else []

    def checkpoint_states(self) -> dict[str, np.ndarray]:
        """Return the states for a checkpoint; all ranks call it together."""
        return super().checkpoint_states() | self._kept_residuals()

    def _kept_residuals(self) -> dict[str, np.ndarray]:
        return {f"{name}/residual": self.communicator.gather(own) for name, own in self._residuals_of().items()}

    def load_states(self, values: Mapping[str, np.ndarray]) -> None:
        """Load the states of a checkpoint; residuals of another number of ranks are divided equally."""
        size, rank = self.communicator.size, self.communicator.rank
        for name, own in self._residuals_of().items():
            given = values.get(f"{name}/residual")
            if given is not None:
                own[...] = given[rank] if len(given) == size else given.sum(axis=0) / size
        residuals = set(self.residual_names)
        super().load_states({name: value for name, value in values.items() if name not in residuals})

    def _residuals_of(self) -> dict[str, np.ndarray]:
        found = {}
        for bucket, gradients, residual in zip(self._buckets, self._gradients, self._residuals, strict=False):
            for name in bucket:
                array = self.states.current(f"{name}/accumulated")
                start = (array.ctypes.data - gradients.ctypes.data) // array.itemsize
                found[name] = residual[start : start + array.size].reshape(array.shape)
        return found

    def send_signal(self, stopping: Stopping) -> None:
        """Share a signal that this rank received with the other ranks, in the next step."""
        self._signal = stopping.signal or 0

    def received_signal(self, stopping: Stopping) -> bool:
        """Return whether any rank has received a signal to stop; all ranks agree after each step."""
        if self._signal_of_any and stopping.signal is None:
            stopping.signal = self._signal_of_any
        return self._signal_of_any != 0

    def check_agreement(self, identity: Mapping[str, Any], data: Mapping[str, Dataset | None]) -> None:
        """Check that all ranks train by the same settings on the same data."""
        agree(self.communicator, {key: value for key, value in identity.items() if key != "weights"}, data)

    def check_equal_weights(self) -> None:
        """Check that all ranks have the same weights."""
        names = [*self.objective.parameters, *self.objective.statistics]
        own = {name: zlib.crc32(np.ascontiguousarray(self.states.current(name)).data) for name in names}
        records = self.communicator.gather_objects(own)
        for rank, record in enumerate(records):
            other = [name for name, checksum in record.items() if checksum != records[0][name]]
            if other:
                raise ParallelError(
                    f"Rank {rank} has other values of {', '.join(other[:5])} than rank 0: something changed them in "
                    "one process alone, such as a callback or a script that asks for its rank."
                )

    def _mean_statistics(self, present: np.ndarray) -> None:
        """Replace running statistics by their means over the ranks that had a part of the batch."""
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
    def nan_origin(self) -> str:
        """Sentence of an error message that names the ranks with a loss that is not finite."""
        ranks = [str(rank) for rank in np.flatnonzero(~np.isfinite(self._losses))]
        return "" if not ranks else f"It comes from rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}."


class SyncBatchNormExecutor(DataParallelExecutor):
    """Run steps with synchronized batch normalization: every rank runs as many micro-batches, some of zeros."""

    overlaps = False  # the ranks already communicate during the backward pass
    _silent = False

    def step_share(self, feeds: Arrays, learning_rate: float) -> float:
        """Train one step on all ranks; see :class:`DataParallelExecutor`."""
        own = self._micro_batches(self._rows(feeds))
        counts = self.communicator.gather(np.asarray(own))
        names = self.objective.names
        self._silent = True  # zeros count neither in the statistics nor in the gradients, which are cleared afterwards
        try:
            for _ in range(int(counts.max()) - own):
                self._run(self._zeros(feeds), {names.learning_rate: np.asarray(learning_rate, np.float32)})
        finally:
            self._silent = False
        return super().step_share(feeds, learning_rate)

    def _zeros(self, feeds: Arrays) -> Arrays:
        rows = 1 if self.fixed is None else self.fixed.size
        return {
            name: array if name in self._stepped.common else np.zeros((rows, *array.shape[1:]), array.dtype)
            for name, array in feeds.items()
        }

    def _run(self, feeds: Arrays, rate: Arrays) -> Arrays:
        with all_reducing(self._all_reduce):
            return super()._run(feeds, rate)

    def _all_reduce(self, array: np.ndarray) -> None:
        if self._silent:
            array[...] = 0
        self.communicator.all_reduce_(array)

    def _mean_statistics(self, present: np.ndarray) -> None:
        """Leave running statistics as they are: all ranks computed the same values."""


_HASHED = {"model": "the graph of its model", "frozen weights": "the values of weights that are not trained"}
"""Names of settings that are compared by hashes, which say nothing to a reader."""

_MOST_ROWS = 100_000
"""Rows whose values are compared to find the first that differs."""


def agree(
    communicator: Communicator, description: Mapping[str, Any], data: Mapping[str, Dataset | None] | None = None
) -> None:
    """Check that all ranks have equal descriptions."""
    records = communicator.gather_objects(dict(description))
    for rank, record in enumerate(records):
        different = differences(record, records[0])
        if not different:
            continue
        if "call" in different:
            calls = [found.get("call", "Trainer()") for found in (record, records[0])]
            raise ParallelError(f"Rank {rank} has called {calls[0]} and rank 0 {calls[1]}; {SAME_CALLS}.")
        data = {key: dataset for key, dataset in (data or {}).items() if key in different}
        contents: Sequence[Mapping[str, Any]] = [{}] * communicator.size
        if data:
            own = {key: {} if dataset is None else dataset.contents(_MOST_ROWS) for key, dataset in data.items()}
            contents = communicator.gather_objects(own)
        words = []
        for key, sentence in different.items():
            if key in _HASHED:
                words.append(_HASHED[key])
            elif key == "batches":
                words.append(f"it has {record[key]} batches of data and rank 0 has {records[0][key]}")
            elif key in data:
                words.append(_in_words(key, rank, contents, (record[key], records[0][key])))
            else:
                words.append(sentence.replace(" here", " on rank 0").replace(" there", f" on rank {rank}"))
        raise ParallelError(
            f"Rank {rank} differs from rank 0: {', '.join(words)}; start all ranks with the same model, data and "
            "settings."
        )


def _in_words(key: str, rank: int, contents: Sequence[Mapping[str, Any]], records: Sequence[Any]) -> str:
    """Describe the first difference between the data of a rank and that of rank 0."""
    own, other = contents[rank].get(key, {}), contents[0].get(key, {})
    for name in [*own, *(name for name in other if name not in own)]:
        if name not in own or name not in other:
            return f"{key} has {name} on rank {rank if name in own else 0} only"
        (kind, rows), (other_kind, other_rows) = own[name], other[name]
        if kind != other_kind:
            return f"{name} of {key} is {kind} on rank {rank} and {other_kind} on rank 0"
        odd = np.flatnonzero(rows != other_rows)
        if odd.size:
            return f"{name} of {key}, {kind}, has other values in {odd.size} of {rows.size} rows, first in row {odd[0]}"
    counts = [None if record is None else record["examples"] for record in records]
    if None in records or counts[0] != counts[1]:
        said = ["no" if record is None else count for record, count in zip(records, counts, strict=True)]
        return f"{key} has {said[0]} examples on rank {rank} and {said[1]} on rank 0"
    return f"{key} has other values"
