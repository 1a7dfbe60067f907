"""Sharded training (ZeRO): every rank keeps a share of the optimizer states, and in stage 2 of the gradients."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.lower import lower_entry
from onnxtrain.lowering.training_info.algorithm import FirstValues
from onnxtrain.lowering.training_info.build import build_update, fill_states
from onnxtrain.lowering.training_info.recipe import StepEntry
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.step import StepSession
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.executors.data_parallel import DataParallelExecutor, SyncBatchNormExecutor
from onnxtrain.training.executors.executor import Arrays
from onnxtrain.training.executors.row_squares import Layout, RowSquares
from onnxtrain.training.objective import Objective

_SEND_BUFFERS = 2
"""Number of send buffers: one bucket is sent while the next one is filled."""


@dataclass(frozen=True)
class _Piece:
    """The part of a parameter that a rank updates."""

    group: int
    elements: slice
    start: int

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return its elements of an array of the parameter's shape."""
        return array.reshape(-1)[self.start : self.start + self.elements.stop - self.elements.start]


class ShardedExecutor(DataParallelExecutor):
    """Run steps on N ranks that keep an N-th of the optimizer's states each (ZeRO, stage 1)."""

    scatters = True

    def __init__(
        self, objective: Objective, config: TrainingConfig, values: Mapping[str, np.ndarray] | None = None
    ) -> None:
        if not all(rule.elementwise for rule in objective.optimizers(config)):
            raise OptionError(
                "shard_states=True cuts weights at any element, but this optimizer's update of one depends on others "
                "of its tensor; leave one of them out."
            )
        if config.clip_norm is not None and config.clip_value is not None:
            raise OptionError("shard_states=True clips by value or by norm; leave clip_value or clip_norm out.")
        if config.ema is not None:
            raise OptionError(
                "shard_states=True keeps no moving average of the weights; leave shard_states or ema out."
            )
        if config.precision.states is not None:
            raise OptionError(
                "shard_states=True cuts states of the weights' type; leave shard_states or Precision(states=...) out."
            )
        if not config.precision.master_weights:
            raise OptionError("shard_states=True cuts weights in float32; leave shard_states or master_weights out.")
        super().__init__(objective, config, values)
        self._parameters = [self.states.make_contiguous(names, parts=self.communicator.size) for names in self._buckets]
        self._pieces = {
            name: piece for index, names in enumerate(self._buckets) for name, piece in self._cut(index, names)
        }
        self._own = self._own_gradients()
        self._squares: RowSquares | None = None
        if config.clip_norm is not None:
            dtypes = [memory.dtype for memory in self._parameters]
            self._squares = RowSquares(
                self._layouts(), self.communicator, dtypes=dtypes, order=list(self.objective.parameters)
            )
        self._update: StepSession | None = None
        if not self._pieces:  # a small model: all elements are in the shares of other ranks
            first = np.asarray(config.optimizer.schema.first_count, np.int64)
            self._share = StateBuffers({objective.names.count: first})
            return
        entry, first_values = build_update(self._step_spec(objective, config))
        self._share = StateBuffers(first_values)
        for name, piece in self._pieces.items():
            self._share.set_buffer(name, self._parameters[piece.group][piece.elements])
            self._share.set_buffer(f"{name}/accumulated", self._own[piece.group][self._within(piece)])
        self._update = self._session_of(entry)

    def change(self, objective: Objective, config: TrainingConfig) -> None:
        """Run another configuration of the same model from the next step on, on the same buffers."""
        super().change(objective, config)
        if self._update is not None:
            self._update = self._session_of(build_update(self._step_spec(objective, config))[0])

    def _own_gradients(self) -> list[np.ndarray]:
        size, rank = self.communicator.size, self.communicator.rank
        return [gradients.reshape(size, -1)[rank] for gradients in self._gradients]

    def _within(self, piece: _Piece) -> slice:
        """Return the elements of a piece in this rank's share of its bucket."""
        first = self.communicator.rank * (self._parameters[piece.group].size // self.communicator.size)
        return slice(piece.elements.start - first, piece.elements.stop - first)

    def _build(self, objective: Objective, config: TrainingConfig) -> tuple[list[StepEntry], FirstValues]:
        entries, values = super()._build(objective, config)
        read = {*entries[0].updates, *(value.name for value in entries[0].model.graph.inputs)}
        entries[0].states = [name for name in values if name in read]
        return entries[:1], FirstValues({name: values.tensors[name] for name in entries[0].states})

    def _cut(self, group: int, names: list[str]) -> list[tuple[str, _Piece]]:
        """Return the pieces of the parameters of a bucket that this rank updates."""
        memory = self._parameters[group]
        share = memory.size // self.communicator.size
        first, last = self.communicator.rank * share, (self.communicator.rank + 1) * share
        found = []
        for name in names:
            array, begin = self.states.current(name), self._begin(group, name)
            start, stop = max(begin, first), min(begin + array.size, last)
            if start < stop:
                found.append((name, _Piece(group, slice(start, stop), start - begin)))
        return found

    def _begin(self, group: int, name: str) -> int:
        array = self.states.current(name)
        return (array.ctypes.data - self._parameters[group].ctypes.data) // array.itemsize

    def _step_spec(self, objective: Objective, config: TrainingConfig) -> Any:
        """Return the specification of this rank's update, with pieces of parameters instead of parameters."""
        spec = objective.step_spec(config)
        initializers = spec.model.graph.initializers
        values = []
        for name, piece in self._pieces.items():
            memory = self._parameters[piece.group][piece.elements]
            values.append(ir.Value(name=name, type=initializers[name].type, shape=ir.Shape(memory.shape)))
            values[-1].const_value = ir.Tensor(memory, name=name)
        imports = dict(spec.model.opset_imports)
        graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports=imports, name="update")
        return replace(
            spec,
            model=infer_shapes(ir.Model(graph, ir_version=spec.model.ir_version)),
            parameters=list(self._pieces),
            statistics={},
            masks={},  # gradients are zero there
            given_squares=None if self._squares is None else self._squares.states,
        )

    def _session_of(self, entry: StepEntry) -> StepSession:
        options = self.config.runtime
        kernels = options.uses_kernels()
        return StepSession(lower_entry(entry, kernels=kernels), self._share, options, kernels=kernels)

    def step_share(self, feeds: Arrays, learning_rate: float) -> float:
        """Train one step on this rank's part of the batch; see :class:`DataParallelExecutor`."""
        names, communicator = self.objective.names, self.communicator
        rate = {names.learning_rate: np.asarray(learning_rate, dtype=np.float32)}
        weight, loss = self._add_up_and_share(feeds, rate)
        squares = {} if self._squares is None else self._squares.add_up(self._own)
        if self._update is None:
            self._share.current(names.count)[...] += 1
        else:
            self._share.current("accumulated_weight")[...] = weight
            for name, rows in squares.items():
                self._share.current(name)[...] = rows
            self._update.run(rate)
        for parameters in self._parameters:
            communicator.all_gather_(parameters.reshape(communicator.size, -1))
        if names.count in self.states:  # dropout masks depend on it
            self.states.current(names.count)[...] = self._share.current(names.count)
        return float(np.float32(loss / (weight or 1)))

    def _layouts(self) -> list[list[Layout]]:
        return [
            [Layout(name, self._begin(group, name), self.states.current(name).shape) for name in names]
            for group, names in enumerate(self._buckets)
        ]

    def checkpoint_states(self) -> dict[str, np.ndarray]:
        """Return whole parameters and states for a checkpoint; all ranks call it together."""
        found = {name: np.array(self.states.current(name)) for name in super().checkpoint_names}
        found |= self._kept_residuals()
        found[self.objective.names.count] = np.array(self._share.current(self.objective.names.count))
        for role in self._roles():
            for group, parameters in enumerate(self._parameters):
                whole = np.zeros((self.communicator.size, parameters.size // self.communicator.size), parameters.dtype)
                own = whole.reshape(-1)
                for name, piece in self._pieces.items():
                    if piece.group == group and f"{name}/{role}" in self._share:
                        own[piece.elements] = self._share.current(f"{name}/{role}")
                self.communicator.all_gather_(whole)
                for name in self._buckets[group]:
                    if self._has(name, role):
                        array, begin = self.states.current(name), self._begin(group, name)
                        found[f"{name}/{role}"] = own[begin : begin + array.size].reshape(array.shape)
        return found

    @property
    def checkpoint_names(self) -> list[str]:
        """Names of the states that a checkpoint needs."""
        states = [
            f"{name}/{role}" for name in self.objective.parameters for role in self._roles() if self._has(name, role)
        ]
        return list(dict.fromkeys([*super().checkpoint_names, self.objective.names.count, *states]))

    def load_states(self, values: Mapping[str, np.ndarray]) -> None:
        """Load this rank's share of the states of a checkpoint."""
        own = {*self.states, *self.residual_names}
        super().load_states({name: value for name, value in values.items() if name in own})
        if self.objective.names.count in values:
            self._share[self.objective.names.count] = values[self.objective.names.count]
        for name, piece in self._pieces.items():
            for role in self._roles():
                if f"{name}/{role}" in values and self._has(name, role):
                    self._share[f"{name}/{role}"] = piece.of(np.asarray(values[f"{name}/{role}"]))

    def _writer(self) -> Callable[[], onnx.ModelProto]:
        write = super()._writer()
        return lambda: fill_states(write(), self.checkpoint_states())

    def _roles(self) -> list[str]:
        return [role.name for role in self.config.optimizer.schema.states]

    def _has(self, name: str, role: str) -> bool:
        rule = self.objective.rules(self.config).get(name)
        optimizer = self.config.optimizer if rule is None else rule.optimizer
        return any(state.name == role for state in optimizer.states)


class ShardedGradientExecutor(ShardedExecutor):
    """Run steps on N ranks that keep an N-th of the states and of the gradients each (ZeRO, stage 2)."""

    frees_gradients = True

    def __init__(
        self, objective: Objective, config: TrainingConfig, values: Mapping[str, np.ndarray] | None = None
    ) -> None:
        if config.accumulate > 1:
            raise OptionError(
                "shard_gradients=True keeps no sums of micro-batches; leave out either shard_gradients or accumulate."
            )
        if config.parallel is not None and config.parallel.compress is not None:
            raise OptionError(
                "shard_gradients=True does not keep all gradients, but compress needs them for residuals; leave out "
                "one of the two."
            )
        if not config.runtime.uses_kernels():
            raise OptionError(
                "shard_gradients=True needs the native kernels, which notify when gradients are ready; leave it out."
            )
        self._send_buffers: list[np.ndarray] = []
        self._free: list[np.ndarray] = []
        self._held: dict[int, np.ndarray] = {}
        self._buffer_is_free = threading.Condition()
        super().__init__(objective, config, values)

    def _build(self, objective: Objective, config: TrainingConfig) -> tuple[list[StepEntry], FirstValues]:
        entries, values = super()._build(objective, config)
        (entry,) = entries
        entry.notified_groups = [[f"{name}/accumulated" for name in bucket] for bucket in self._buckets]
        entry.notified_only = {name: entry.updates.pop(name) for bucket in entry.notified_groups for name in bucket}
        entry.states = [name for name in entry.states if name not in entry.notified_only]
        return entries, FirstValues({name: values.tensors[name] for name in entry.states})

    def _make_gradients_contiguous(self) -> list[np.ndarray]:
        return []

    def _own_gradients(self) -> list[np.ndarray]:
        size = self.communicator.size
        return [np.zeros(parameters.size // size, parameters.dtype) for parameters in self._parameters]

    def _announced(self, bucket: int, addresses: bytes) -> bool:
        """Copy the gradients of a bucket to a send buffer."""
        buffer = self._held[bucket] = self._cleared_buffer(bucket)
        gradients = self._in_buffer(bucket, buffer)
        places = np.frombuffer(addresses, np.uint64).tolist()
        for name, address in zip(self._buckets[bucket], places, strict=True):
            begin, size = self._begin(bucket, name), self.states.current(name).size
            if size:
                ctypes.memmove(gradients[begin:].ctypes.data, address, size * gradients.itemsize)
        return True

    def _reduce(self, bucket: int) -> None:
        if bucket not in self._held:  # this rank has no part of the batch
            self._held[bucket] = self._cleared_buffer(bucket)
        buffer = self._held.pop(bucket)
        rows = self._in_buffer(bucket, buffer).reshape(self.communicator.size, -1)
        self.communicator.reduce_scatter_(rows)
        self._own[bucket][...] = rows[self.communicator.rank]
        with self._buffer_is_free:
            self._free.append(buffer)
            self._buffer_is_free.notify()

    def _cleared_buffer(self, bucket: int) -> np.ndarray:
        """Wait for a free send buffer, and return it with zeros for this bucket."""
        with self._buffer_is_free:
            while not self._free and len(self._send_buffers) >= _SEND_BUFFERS and not self._reduction.is_idle():
                self._buffer_is_free.wait(0.05)  # a failed send does not notify
            if not self._free:
                self._send_buffers.append(np.empty(max(memory.nbytes for memory in self._parameters), np.uint8))
                self._free.append(self._send_buffers[-1])
            buffer = self._free.pop()
        self._in_buffer(bucket, buffer)[...] = 0
        return buffer

    def _in_buffer(self, bucket: int, buffer: np.ndarray) -> np.ndarray:
        memory = self._parameters[bucket]
        return buffer[: memory.nbytes].view(memory.dtype)


class ShardedSyncBatchNormExecutor(SyncBatchNormExecutor, ShardedExecutor):
    """Run steps with synchronized batch normalization and sharded states."""
