"""Steps of several processes whose batch normalization takes the statistics of all of them (``batch_norm="sync"``)."""

from __future__ import annotations

import numpy as np

from onnxtrain.runtime.all_reduce import all_reducing
from onnxtrain.training.steps.parallel_steps import ParallelSteps
from onnxtrain.training.steps.sharded_steps import ShardedSteps
from onnxtrain.training.steps.steps import Arrays


class SynchronizedSteps(ParallelSteps):
    """Steps in whose middle the processes wait for each other, twice for each BatchNormalization.

    So all of them run the same number of micro-batches. One that has fewer, or no part of the batch at all, first runs
    some of zeros, of which nothing counts: not in the statistics, since it adds zeros to the sums, and not in the
    gradients, which are cleared afterwards.
    """

    overlaps = False  # the processes send in the middle of the backward pass already
    _silent = False

    def step_share(self, feeds: Arrays, learning_rate: float) -> float:
        """One step of all processes; see :class:`ParallelSteps`."""
        communicator = self.communicator
        counts = np.zeros(communicator.size, np.int64)
        counts[communicator.rank] = own = self._micro_batches(self._rows(feeds))
        communicator.all_gather_(counts)
        names = self.objective.names
        self._silent = True
        try:
            for _ in range(int(counts.max()) - own):
                self._run(self._zeros(feeds), {names.learning_rate: np.asarray(learning_rate, np.float32)})
        finally:
            self._silent = False
        return super().step_share(feeds, learning_rate)

    def _zeros(self, feeds: Arrays) -> Arrays:
        """As many examples as a micro-batch needs, of zeros."""
        rows = 1 if self.fixed is None else self.fixed.size
        return {
            name: np.zeros((rows, *array.shape[1:]), array.dtype) if array.ndim else array
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
        """Leave running statistics as they are: all processes have computed the same."""


class SynchronizedShardedSteps(SynchronizedSteps, ShardedSteps):
    """The same with states that are shared out; see :class:`ShardedSteps`."""
