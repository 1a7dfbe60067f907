"""Steps of several processes, each of which keeps a share of the gradients, too, and never all of them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from onnxtrain.config import TrainingConfig
from onnxtrain.errors import OptionError
from onnxtrain.parallel.reduction import Take
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training.objective import Objective
from onnxtrain.training.steps.sharded_steps import ShardedSteps
from onnxtrain.training_info.algorithm import FirstValues
from onnxtrain.training_info.entry import Entry

_ROOMS = 2
"""Buckets that are held at a time: one that is sent, one that comes."""


class ShardedGradientSteps(ShardedSteps):
    """Steps of N processes that keep an N-th of the states and of the gradients each (ZeRO, stage 2).

    The backward pass lets the gradients of a bucket go as soon as they have been copied to where they are sent from,
    and each process keeps its share of their sums. Where two buckets wait to be sent, it waits for the first. Sums and
    weights have the bits that :class:`~onnxtrain.training.steps.sharded_steps.ShardedSteps` gives them.

    Args:
        objective: What is minimised.
        config: What the objective was made for.
        states: Buffers of an earlier config to go on with.
        values: What new buffers have, where that is not what the model has.
    """

    def __init__(
        self,
        objective: Objective,
        config: TrainingConfig,
        *,
        states: StateBuffers | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        if config.accumulate > 1:
            raise OptionError("shard_gradients=True keeps no sums of micro-batches; leave it or accumulate out.")
        if config.parallel is not None and config.parallel.compress is not None:
            raise OptionError(
                "shard_gradients=True keeps no whole gradients, but compress keeps what was not sent of each; leave "
                "one of them out."
            )
        if not config.options.uses_kernels():
            raise OptionError("shard_gradients=True needs the native kernels, which announce gradients; leave it out.")
        self._rooms: list[np.ndarray] = []
        self._free: list[np.ndarray] = []
        self._held: dict[int, np.ndarray] = {}
        self._room_is_free = threading.Condition()
        super().__init__(objective, config, states=states, values=values)

    def _build(self, objective: Objective) -> tuple[list[Entry], FirstValues]:
        entries, values = super()._build(objective)
        (entry,) = entries
        entry.announced = [[f"{name}/accumulated" for name in bucket] for bucket in self._buckets]
        entry.passed = {name: entry.updates.pop(name) for bucket in entry.announced for name in bucket}
        entry.states = [name for name in entry.states if name not in entry.passed]
        return entries, FirstValues({name: values.tensors[name] for name in entry.states})

    def _join_gradients(self) -> list[np.ndarray]:
        return []

    def _own_gradients(self) -> list[np.ndarray]:
        size = self.communicator.size
        return [np.zeros(parameters.size // size, parameters.dtype) for parameters in self._parameters]

    def _taker(self) -> Take | None:
        return self._take

    def _take(self, bucket: int, addresses: Sequence[int]) -> None:
        """Copy the gradients of a bucket to where they are sent from."""
        room = self._held[bucket] = self._cleared_room(bucket)
        gradients = self._in_room(bucket, room)
        for name, address in zip(self._buckets[bucket], addresses, strict=True):
            begin, size = self._begin(bucket, name), self.states.current(name).size
            if size:
                ctypes.memmove(gradients[begin:].ctypes.data, address, size * gradients.itemsize)

    def _reduce(self, bucket: int) -> None:
        """Add up this process's share of a bucket."""
        if bucket not in self._held:  # no part of the batch is here
            self._held[bucket] = self._cleared_room(bucket)
        room = self._held.pop(bucket)
        rows = self._in_room(bucket, room).reshape(self.communicator.size, -1)
        self.communicator.reduce_scatter_(rows)
        self._own[bucket][...] = rows[self.communicator.rank]
        with self._room_is_free:
            self._free.append(room)
            self._room_is_free.notify()

    def _cleared_room(self, bucket: int) -> np.ndarray:
        """Memory for any bucket, with zeros for this one; waits until there is some."""
        with self._room_is_free:
            while not self._free and len(self._rooms) >= _ROOMS and not self._reduction.is_idle():
                self._room_is_free.wait(0.05)  # what fails does not tell
            if not self._free:
                self._rooms.append(np.empty(max(memory.nbytes for memory in self._parameters), np.uint8))
                self._free.append(self._rooms[-1])
            room = self._free.pop()
        self._in_room(bucket, room)[...] = 0
        return room

    def _in_room(self, bucket: int, room: np.ndarray) -> np.ndarray:
        memory = self._parameters[bucket]
        return room[: memory.nbytes].view(memory.dtype)
