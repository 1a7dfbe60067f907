"""Communication of Ray's workers by Ray's collective operations over gloo."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxtrain.distributed.communicator import Communicator
from onnxtrain.errors import ParallelError
from onnxtrain.errors._internal import import_optional


def ray(module: str = "ray") -> Any:
    """Import a module of Ray.

    Raises:
        OptionError: Ray is not installed, or has no such module.
    """
    return import_optional(
        module, needs="onnxtrain.interop.ray needs Ray 2.60 or newer", packages="'ray[data,train]' torch"
    )


class Collective(Communicator):
    """Communicator of the workers of one training on Ray, by ``ray.util.collective`` over gloo.

    Gloo comes with PyTorch, which must be installed where the workers run. Gloo's sums have the same bits in all
    workers and in every run with as many workers; with two workers they equal one process with two micro-batches.

    Args:
        rank: Index of this worker, from 0.
        size: Number of workers.
        group: Name that is unique to the workers of this training.

    Raises:
        OptionError: Ray or PyTorch is not installed.
    """

    def __init__(self, rank: int, size: int, group: str) -> None:
        self.rank, self.size = rank, size
        self._group = group
        self._calls, self._torch = ray("ray.util.collective"), ray("torch")
        if size > 1:
            self._calls.init_collective_group(size, rank, backend="gloo", group_name=group)

    def all_reduce_(self, array: np.ndarray) -> None:
        """Replace every element by its sum over all workers."""
        if self.size > 1 and array.size:
            self._call("allreduce", self._tensor(array), self._group)

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        """Replace all elements by those of the worker ``root``."""
        if self.size > 1 and array.size:
            self._call("broadcast", self._tensor(_bytes(array)), root, self._group)

    def all_gather_(self, array: np.ndarray) -> None:
        """Fill the rows of an array [size, ...]; each worker contributes one."""
        if self.size > 1 and array.size:
            rows = [self._tensor(_bytes(row)) for row in array.reshape(self.size, -1)]
            self._call("allgather", rows, rows[self.rank].clone(), self._group)

    def _tensor(self, array: np.ndarray) -> Any:
        """Return a PyTorch tensor that shares the memory of an array."""
        return self._torch.from_numpy(array.reshape(-1))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            getattr(self._calls, name)(*arguments)
        except RuntimeError as error:
            raise ParallelError(
                f"Worker {self.rank} lost another one ({' '.join(str(error).split())[:200]}).", lost=True
            ) from error


def _bytes(array: np.ndarray) -> np.ndarray:
    """View an array as uint8, since gloo does not support uint16 and ml_dtypes types."""
    return array.reshape(-1).view(np.uint8)
