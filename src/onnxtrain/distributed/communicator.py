"""Communication between data-parallel ranks: the interface of communication engines, and what the ranks must share."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from onnxtrain.errors import ParallelError

SAME_CALLS = "call the same methods on every rank, in the same order"

_WHOLE_BATCHES = "give every rank the same whole batches, of which it takes its rows"

Result = TypeVar("Result")


class Communicator(ABC):
    """A group of processes (ranks) that call the same operations in the same order.

    Arrays are C-contiguous and have the same type and shape on every rank; operations change them in place. An engine
    implements :meth:`all_reduce_`, :meth:`broadcast_` and :meth:`all_gather_`. The other operations are built from
    these; an engine may override them with faster ones.

    Attributes:
        rank: Index of this process, from 0.
        size: Number of processes.
        overlap: Whether another thread than the creating one may run operations, one at a time. If so, gradients are
            summed during the backward pass.
        compress: Compression of the gradients that are sent; ``None`` for none.
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
        """Replace all elements by those of the rank ``root``; copies bytes, so that any element type is allowed."""

    @abstractmethod
    def all_gather_(self, array: np.ndarray) -> None:
        """Fill row r of an array [size, ...] with row r of rank r, for all ranks r.

        Copies bytes, so that any element type is allowed.
        """

    def reduce_scatter_(self, array: np.ndarray) -> None:
        """Replace this rank's row of an array [size, ...] by its sum over all ranks; other rows become undefined."""
        self.all_reduce_(array)

    def all_to_all_(self, array: np.ndarray) -> None:
        """Send row r of an array [size, ...] to rank r, and replace it by the row that rank r sent to this rank."""
        array[...] = self.gather(array)[:, self.rank]

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks, stacked to [size, ...]."""
        whole = np.zeros((self.size, *array.shape), array.dtype)
        whole[self.rank] = array
        self.all_gather_(whole)
        return whole

    def fail(self, sentence: str) -> None:  # noqa: B027 - an engine that cannot has nothing to do
        """Send the other ranks the reason why this one ends, if the engine can; they raise ParallelError."""

    def set_background(self, background: bool) -> None:  # noqa: B027 - an engine may ignore it
        """Set whether operations run while other threads compute; if so, waiting should use little CPU time."""

    def abort(self) -> None:  # noqa: B027 - other engines end by their timeout
        """Abort an operation that waits in another thread, if the engine can; the operation raises ParallelError."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a picklable value of every rank, in the order of the ranks."""
        if self.size == 1:
            return [value]
        content = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self.gather(np.asarray(content.size))
        parts = self.gather(np.pad(content, (0, int(sizes.max()) - content.size)))
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
    """Communicator of a single process."""

    rank = 0
    size = 1

    def all_reduce_(self, array: np.ndarray) -> None:
        """Leave the array as it is."""

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        """Leave the array as it is."""

    def all_gather_(self, array: np.ndarray) -> None:
        """Leave the array as it is."""


class Compression(ABC):
    """Compressed sum of gradients over all ranks, with error feedback.

    Every rank r has a residual e_r, initially 0. It sends c_r = C(g_r + e_r) for its gradients g_r, where C drops
    digits or elements, and keeps the rest for the next step: e_r <- g_r + e_r - c_r. The c_r are summed in rank order,
    in the type of the gradients, so that the bits of the sum depend only on the number of ranks. Nothing is lost: the
    sums of all steps plus the residuals equal the gradients of all steps, up to rounding.
    """

    @abstractmethod
    def reduce_(
        self, communicator: Communicator, gradients: np.ndarray, residual: np.ndarray, *, scatter: bool = False
    ) -> None:
        """Replace gradients by the sum of all ranks' compressed gradients, and update the residual."""


def check_same(where: str, rows: Sequence[float], contents: Sequence[float]) -> None:
    """Check that all ranks were given the same batch or batches, by their numbers of rows and checksums."""
    for rank, (count, content) in enumerate(zip(rows, contents, strict=True)):
        if (count, content) != (rows[0], contents[0]):
            how = f"{int(count)} rows, and rank 0 {int(rows[0])}" if count != rows[0] else "other values than rank 0"
            raise ParallelError(f"{where}, rank {rank} was given {how}; {_WHOLE_BATCHES}.")


def check_ends(communicator: Communicator, number: int, *, ended: bool) -> None:
    """Check that the data of all ranks ended after this number of batches, or of none."""
    ends = communicator.gather(np.asarray(ended))
    if ends.min() != ends.max():
        first, other = int(ends.argmax()), int(ends.argmin())
        raise ParallelError(
            f"The data of rank {first} ended after {number} batches, and rank {other} has more; {_WHOLE_BATCHES}."
        )
