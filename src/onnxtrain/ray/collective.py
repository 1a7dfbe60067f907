"""What Ray's workers say to each other: Ray's own collective operations, which gloo carries."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from onnxtrain.distributed.communicator import Communicator
from onnxtrain.errors import OptionError, ParallelError


def ray(module: str = "ray") -> Any:
    """A module of Ray.

    Raises:
        OptionError: Ray is not installed, or has no such module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"onnxtrain.ray needs Ray 2.60 or newer ({error}); install it with pip install 'onnxtrain[ray]'."
        ) from None


class Collective(Communicator):
    """The workers of one training on Ray, through ``ray.util.collective`` on gloo.

    Gloo is that of PyTorch, which has to be installed where the workers run. Sums are gloo's: the same bits in all
    workers and in every run of as many workers; of two workers they are those of one process with two micro-batches.

    Args:
        rank: The number of this worker, from 0.
        size: How many there are.
        group: A name that the workers of this training alone have.

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
        """Replace all elements by those that the worker ``root`` has."""
        if self.size > 1 and array.size:
            self._call("broadcast", self._tensor(_bytes(array)), root, self._group)

    def all_gather_(self, array: np.ndarray) -> None:
        """Fill the rows of an array [size, ...] of which each worker has one."""
        if self.size > 1 and array.size:
            rows = [self._tensor(_bytes(row)) for row in array.reshape(self.size, -1)]
            self._call("allgather", rows, rows[self.rank].clone(), self._group)

    def _tensor(self, array: np.ndarray) -> Any:
        """A tensor that has the memory of an array."""
        return self._torch.from_numpy(array.reshape(-1))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            getattr(self._calls, name)(*arguments)
        except RuntimeError as error:
            raise ParallelError(
                f"Worker {self.rank} lost another one ({' '.join(str(error).split())[:200]}).", lost=True
            ) from error


def _bytes(array: np.ndarray) -> np.ndarray:
    """The memory of an array as uint8, which gloo moves; it does not know uint16 or bfloat16 of NumPy."""
    return array.reshape(-1).view(np.uint8)
