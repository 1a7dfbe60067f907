"""Communicator with threads as ranks, without MPI, and one process that computes what ranks do."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import onnxtrain
from onnxtrain.distributed import Communicator


class Thread(Communicator):
    """Communicator of one of several threads."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(table)
        self._table, self._barrier = table, barrier
        self.sent = 0

    def _shared(self, array: np.ndarray) -> list[np.ndarray]:
        self._table[self.rank] = np.array(array)
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def all_reduce_(self, array: np.ndarray) -> None:
        total = self._shared(array)
        array[...] = total[0]
        for part in total[1:]:
            array += part

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        array[...] = self._shared(array)[root]

    def all_gather_(self, array: np.ndarray) -> None:
        self.sent += (self.size - 1) * array[self.rank].nbytes
        for rank, part in enumerate(self._shared(array[self.rank])):
            array[rank] = part

    def all_to_all_(self, array: np.ndarray) -> None:
        self.sent += (self.size - 1) * array[0].nbytes
        for rank, part in enumerate(self._shared(array)):
            array[rank] = part[self.rank]


def in_threads(size: int, work: Callable[[Thread], Any]) -> Sequence[Any]:
    """Run a function on each rank in a thread; return the results."""
    table: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=30)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Thread(rank, table, barrier)), range(size)))


def step_in_rank_order(
    trainer: onnxtrain.Trainer, inputs: tuple[np.ndarray, ...], labels: np.ndarray, ranks: int
) -> float:
    """Train a step of one process that adds up the gradients of the ranks' parts of a batch in rank order."""
    executor, objective, rows = trainer.executor, trainer.objective, len(labels)
    names, states, each = objective.names, executor.states, -(-rows // ranks)
    _, feeds = trainer.data_adapter.step_feeds(objective, inputs, labels, None)
    rate = {names.learning_rate: np.float32(trainer.learning_rate)}
    before = {name: np.array(states.current(name)) for name in objective.statistics}
    found: list[dict[str, np.ndarray]] = []
    for start in range(0, rows, each):
        for name in executor.transient:
            states.current(name)[...] = 0
        for name, value in before.items():
            states.current(name)[...] = value
        executor._add_up({name: array[start : start + each] for name, array in feeds.items()}, rate)
        found.append({name: np.array(states.current(name)) for name in (*executor.transient, *before)})
    for name in found[0]:
        total = functools.reduce(np.add, [part[name] for part in found])
        states.current(name)[...] = total / total.dtype.type(len(found)) if name in before else total
    return float(executor.session.step(rate, entry=1)[names.loss])
