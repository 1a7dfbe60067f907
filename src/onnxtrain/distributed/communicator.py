"""Communication between data-parallel ranks: the few operations that an engine must have."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")


class Communicator(ABC):
    """A group of processes, each with its rank, that call the same operations in the same order.

    Arrays are C-contiguous and of the same type and shape in every rank; operations change them in place. An engine
    needs :meth:`all_reduce_`, :meth:`broadcast_` and :meth:`all_gather_`; the rest is made of these, or better done by
    an engine that can.

    Attributes:
        rank: The number of this process, from 0.
        size: How many processes there are.
        overlap: Whether operations may run in another thread than the one that made this, one at a time: then those of
            a step run beside its backward pass.
        compress: How gradients are sent; ``None`` for as they are.
    """

    rank: int
    size: int
    overlap: bool = False
    compress: Compression | None = None

    @abstractmethod
    def all_reduce_(self, array: np.ndarray) -> None:
        """Replace every element by its sum over all ranks; all ranks get the same bits."""

    @abstractmethod
    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        """Replace all elements by those that the rank ``root`` has. Moves bytes, whatever the type of the elements."""

    @abstractmethod
    def all_gather_(self, array: np.ndarray) -> None:
        """Fill an array [size, ...] of which each rank has the row of its number with the rows of all others.

        Moves bytes, whatever the type of the elements.
        """

    def reduce_scatter_(self, array: np.ndarray) -> None:
        """Replace the row of this rank, of an array [size, ...], by its sum over all ranks; other rows are lost."""
        self.all_reduce_(array)

    def all_to_all_(self, array: np.ndarray) -> None:
        """Send the rows of an array [size, ...] to the ranks of their numbers; rows are then what those have sent."""
        whole = np.zeros((self.size, *array.shape), array.dtype)
        whole[self.rank] = array
        self.all_gather_(whole)
        array[...] = whole[:, self.rank]

    def fail(self, sentence: str) -> None:  # noqa: B027 - an engine that cannot has nothing to do
        """Tell the other ranks that this one ends, and why, where the engine can: they raise ParallelError."""

    def behind(self, computation: bool) -> None:  # noqa: B027 - an engine that does not care has nothing to do
        """Say whether other threads compute from now on, and need the processor more than one that waits."""

    def abandon(self) -> None:  # noqa: B027 - an engine that cannot ends by its timeout
        """End what waits for other ranks in another thread, where the engine can: it raises ParallelError."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a picklable value of every rank, in the order of the ranks."""
        if self.size == 1:
            return [value]
        content = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = content.size
        self.all_gather_(sizes)
        parts = np.zeros((self.size, int(sizes.max())), np.uint8)
        parts[self.rank, : content.size] = content
        self.all_gather_(parts)
        return [pickle.loads(part[:count].tobytes()) for part, count in zip(parts, sizes, strict=True)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Broadcast a picklable value of the rank ``root``."""
        if self.size == 1:
            return value
        content = np.frombuffer(pickle.dumps(value) if self.rank == root else b"", np.uint8).copy()
        size = np.asarray([content.size], np.int64)
        self.broadcast_(size, root)
        if self.rank != root:
            content = np.empty(int(size[0]), np.uint8)
        self.broadcast_(content, root)
        return value if self.rank == root else pickle.loads(content.tobytes())

    def on_root(self, action: Callable[[], Result]) -> Result:
        """Run an action on rank 0 while the other ranks wait, and return its result on all ranks."""
        return self.broadcast_object(action() if self.rank == 0 else None)  # type: ignore[no-any-return]


class Single(Communicator):
    """A process alone, where a communicator is wanted."""

    rank = 0
    size = 1

    def all_reduce_(self, array: np.ndarray) -> None:
        """Leave the array as it is."""

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        """Leave the array as it is."""

    def all_gather_(self, array: np.ndarray) -> None:
        """Leave the array as it is."""


class Compression(ABC):
    """A sum over all ranks of which less is sent than its terms are, with error feedback.

    Every rank r has a residual e_r, at first 0. Of its gradients g_r it sends c_r = C(g_r + e_r), where C drops digits
    or elements, and keeps the rest, e_r <- g_r + e_r - c_r, for the next step. The sum of all c_r is taken in the order
    of the ranks, in the type of the gradients, so that its bits depend on the number of ranks and on nothing else.
    Nothing is lost: the sums of all steps and the residuals are together the gradients of all steps, up to rounding.

    Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al., Error feedback fixes SignSGD, 2019.
    """

    @abstractmethod
    def reduce_(
        self, communicator: Communicator, gradients: np.ndarray, residual: np.ndarray, *, scatter: bool = False
    ) -> None:
        """Replace gradients by the sum of what all ranks send of theirs; the residual gets what was not sent.

        Args:
            communicator: The ranks.
            gradients: Of any number of elements that the ranks can share equally [size n].
            residual: What was not sent before, of the same type and shape; changed in place.
            scatter: Whether each rank needs the sum of its share alone, that of its number among equal ones; what
                stands in the others is then any number.
        """
