"""MPI through mpi4py: the communication engine on clusters and on one machine."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import numpy as np

from onnxtrain.distributed.communicator import SAME_CALLS, Communicator, Compression
from onnxtrain.distributed.compression import choose_compression
from onnxtrain.errors import OptionError, ParallelError
from onnxtrain.errors.spelling import checks_arguments

_FAILURE, _LEAVING, _DATA = 8, 9, range(10, 32767)
"""Message tags: error message of a failed rank; notice that a rank is about to exit; data, with a tag by operation."""

_GRACE = 10.0
"""Seconds that a failed rank waits for rank 0 to report the error: a launcher kills all ranks when one exits."""

_SMALL_BYTES = 1 << 15
"""Largest array, in bytes, that ranks exchange whole: one round of messages instead of two."""

_BLOCK = 1 << 20
"""Bytes of a share to receive and add up at a time, small enough to stay in the cache."""

_EAGER_POLLS = 100
"""Polls without a pause: about 50 microseconds, in which small messages arrive."""

_POLLS_PER_CHECK = 256
"""Number of polls between checks of the clock and of error messages."""

_PAUSE = 1e-3
"""Seconds between two polls while another thread computes."""

_OPEN: list[MPI] = []
"""Communicators of this process with more than one rank."""


def environment_rank() -> int:
    """Return the rank from the environment of a launcher (mpiexec, srun), without MPI; 0 without a launcher."""
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def tell_ranks(error: BaseException) -> bool:
    """Tell the other ranks of all communicators that this one ends; return whether there are any.

    A rank other than 0 prints the error only if rank 0 is lost.
    """
    sentence = " ".join(str(error).split()) or type(error).__name__
    for communicator in _OPEN:
        communicator.fail(sentence)
        if communicator.rank and communicator.speaks and sys.__stderr__ is not None:
            sys.__stderr__.write(f"error: {sentence}\n")
    return any(communicator.size > 1 for communicator in _OPEN)


@checks_arguments
class MPI(Communicator):
    """Ranks started by ``mpiexec`` or ``srun``, through mpi4py (``pip install mpi4py mpich``).

    Args:
        order: ``"rank"`` sums in rank order, so that the bits depend only on the number of ranks, not on network, MPI
            library or placement. Every rank sums its share and sends it to all others: 2 (N - 1) / N of the array in
            N - 1 messages each way, which is optimal in bytes. ``"fast"`` uses the library's own sum, whose bits may
            differ between clusters.
        overlap: Whether a second thread sums gradients during the backward pass.
        compress: Round gradients to ``"float16"`` or ``"bfloat16"``, or send only the largest with ``TopK(0.01)``;
            the rest is added to the gradients of the next step (error feedback). Sums are then in rank order.
        timeout: Seconds to wait for another rank; the error names the rank. Other ranks wait while one writes a
            checkpoint. If a rank does not start MPI in time, the others exit with status 3.

    Raises:
        OptionError: mpi4py is not installed, or finds no MPI; an argument has a value that is not accepted.
    """

    def __init__(
        self,
        order: Literal["rank", "fast"] = "rank",
        *,
        compress: Literal["float16", "bfloat16"] | Compression | None = None,
        timeout: float = 600.0,
        overlap: bool = True,
    ) -> None:
        if order not in ("rank", "fast"):
            raise OptionError(f"order is {order!r}; it is 'rank' or 'fast'.")
        if not timeout > 0:
            raise OptionError(f"timeout is {timeout}; it needs a number of seconds above 0.")
        self.order = order
        self.compress = choose_compression(compress)
        self.timeout = float(timeout)
        self._library = _library(self.timeout)
        world = self._library.COMM_WORLD
        self.overlap = overlap and self._library.Query_thread() >= self._library.THREAD_SERIALIZED
        self._pause = 0.0
        self._aborted = False
        self._world = world.Dup()  # keeps messages apart from those of the calling program
        self.rank: int = world.Get_rank()
        self.size: int = world.Get_size()
        self._scratch = np.empty(0, np.uint8)
        self._failed = False
        self._lost: set[int] = set()
        atexit.register(self._leave)
        if self.size > 1:
            self._report_uncaught_errors()
            _OPEN.append(self)

    def __repr__(self) -> str:
        return f"MPI(order={self.order!r}, rank={self.rank}, size={self.size})"

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(MPI, self.order, compress=self.compress, timeout=self.timeout, overlap=self.overlap)
        return made, ()

    def all_reduce_(self, array: np.ndarray) -> None:
        """Replace every element by its sum over all ranks; see :class:`MPI` for the order of the sum."""
        if self.size == 1 or not array.size:
            return
        flat = _flat(array)
        if self.order == "fast" and flat.dtype.char in _TYPES:
            self._wait([self._world.Iallreduce(self._library.IN_PLACE, flat)], "all_reduce_")
        elif flat.nbytes <= _SMALL_BYTES:
            parts = self._receive_buffer((self.size, flat.size), flat.dtype)
            parts[self.rank] = flat
            self._exchange([flat] * self.size, list(parts), "all_reduce_", flat.nbytes)
            _add_in_order(parts, flat)
        else:
            shares = self._shares(flat)
            self._reduce_share(shares, "all_reduce_", flat.nbytes)
            self._exchange([shares[self.rank]] * self.size, shares, "all_reduce_", flat.nbytes)

    def reduce_scatter_(self, array: np.ndarray) -> None:
        """Replace this rank's row by its sum over all ranks; other rows become undefined."""
        if self.size > 1 and array.size:
            self._reduce_share(list(_rows(array, self.size)), "reduce_scatter_", array.nbytes)

    def all_gather_(self, array: np.ndarray) -> None:
        """Fill the rows of the other ranks."""
        if self.size > 1 and array.size:
            rows = list(_rows(array, self.size))
            self._exchange([rows[self.rank]] * self.size, rows, "all_gather_", array.nbytes)

    def all_to_all_(self, array: np.ndarray) -> None:
        """Send row r of an array to rank r, and replace it by the row that rank r sent to this rank."""
        if self.size > 1 and array.size:
            rows = _rows(array, self.size)
            parts = self._receive_buffer((self.size, rows.shape[1]), rows.dtype)
            self._exchange(list(rows), list(parts), "all_to_all_", array.nbytes)
            parts[self.rank] = rows[self.rank]
            rows[...] = parts

    def broadcast_(self, array: np.ndarray, root: int = 0) -> None:
        """Replace all elements by those of one rank: it sends each rank a share, then all ranks exchange shares."""
        if self.size == 1 or not array.size:
            return
        flat = _flat(array)
        whole: Any = [None] * self.size
        if flat.nbytes <= _SMALL_BYTES or self.size == 2:
            sent, received = ([flat] * self.size, whole) if self.rank == root else (whole, list(whole))
            if self.rank != root:
                received[root] = flat
            self._exchange(sent, received, "broadcast_", flat.nbytes)
            return
        shares = self._shares(flat)
        received = list(whole)
        if self.rank != root:
            received[root] = shares[self.rank]
        self._exchange(shares if self.rank == root else whole, received, "broadcast_", flat.nbytes)
        self._exchange([shares[self.rank]] * self.size, shares, "broadcast_", flat.nbytes)

    def set_background(self, background: bool) -> None:
        """Set whether operations run while other threads compute; if so, pause between two polls."""
        self._pause = _PAUSE if background else 0.0

    def abort(self) -> None:
        """Abort an operation that waits in another thread; later operations fail, too."""
        self._aborted = True

    @property
    def speaks(self) -> bool:
        """True if this rank reports errors: rank 0, or any other rank if rank 0 does not answer."""
        return self.rank == 0 or 0 in self._lost

    def fail(self, sentence: str) -> None:
        """Tell the other ranks that this one ends, and why: their pending operations raise ParallelError."""
        if self.size == 1 or self._failed:
            return
        self._failed = True
        content = f"Rank {self.rank} ended: {sentence}".encode()
        requests = [self._world.Isend(bytearray(content), other, _FAILURE) for other in self._others() if other]
        if self.rank:  # a synchronous send: it completes when rank 0 receives the message
            requests.append(self._world.Issend(bytearray(content), 0, _FAILURE))
        until = time.monotonic() + self.timeout
        while not self._library.Request.Testall(requests) and time.monotonic() < until:
            time.sleep(0.001)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _reduce_share(self, shares: Sequence[np.ndarray], what: str, size: int) -> None:
        """Replace the share of this rank by its sum over all ranks."""
        longest = max(share.size for share in shares)
        step = max(1, _BLOCK // shares[0].itemsize)
        for start in range(0, longest, step):
            blocks = [share[start : start + step] for share in shares]
            own = blocks[self.rank]
            parts = self._receive_buffer((self.size, own.size), own.dtype)
            self._exchange(blocks, list(parts), what, size)
            parts[self.rank] = own
            _add_in_order(parts, own)

    def _shares(self, flat: np.ndarray) -> list[np.ndarray]:
        """Split an array into one part per rank."""
        bounds = [flat.size * rank // self.size for rank in range(self.size + 1)]
        return [flat[start:stop] for start, stop in itertools.pairwise(bounds)]

    def _receive_buffer(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
        """Return scratch memory to receive in; the next call reuses it."""
        needed = shape[0] * shape[1] * dtype.itemsize
        if self._scratch.size < needed:
            self._scratch = np.empty(needed, np.uint8)
        return self._scratch[:needed].view(dtype).reshape(shape)

    def _exchange(
        self, sent: Sequence[np.ndarray | None], received: Sequence[np.ndarray | None], what: str, size: int
    ) -> None:
        """Send each other rank its part and receive one from each; ``None`` or empty arrays are skipped."""
        world, requests, waiting, tag = self._world, [], [], _tag(what, size)
        for step in range(1, self.size):  # pairs up all ranks differently in each step
            other = (self.rank - step) % self.size
            array = received[other]
            if array is not None and array.size:
                requests.append(world.Irecv(_bytes(array), other, tag))
                waiting.append(other)
        received_first = len(requests)
        for step in range(1, self.size):
            other = (self.rank + step) % self.size
            array = sent[other]
            if array is not None and array.size:
                requests.append(world.Isend(_bytes(array), other, tag))
                waiting.append(other)
        self._wait(requests, what, waiting, dict(zip(waiting[:received_first], requests, strict=False)), tag)

    def _wait(
        self,
        requests: list[Any],
        what: str,
        partners: Sequence[int] = (),
        receives: Mapping[int, Any] = MappingProxyType({}),
        tag: int = 0,
    ) -> None:
        """Wait until requests are done, another rank fails, or the timeout expires.

        The first polls do not pause, since most messages arrive soon. Later polls yield the CPU: with fewer CPUs than
        ranks, a busy wait would block the rank that it waits for.
        """
        done, until, polls = self._library.Request.Testall, 0.0, 0
        while not done(requests):
            polls += 1
            if polls > _EAGER_POLLS:
                time.sleep(self._pause)
            if self._aborted:
                raise ParallelError(f"{what} was aborted, because this process failed in the same step.")
            if polls % _POLLS_PER_CHECK:
                continue
            now = time.monotonic()
            until = until or now + self.timeout
            if self._world.Iprobe(self._library.ANY_SOURCE, _FAILURE):
                self._give_up(self._receive_failure())
            for other, request in receives.items():
                if not request.Test() and self._has_sent_other(other, tag):
                    raise ParallelError(
                        f"Rank {other} has called another method than rank {self.rank}, or its data ended elsewhere; "
                        f"{SAME_CALLS}, with the same data."
                    )
            if now > until:
                missing = sorted({p for p, request in zip(partners, requests, strict=False) if not request.Test()})
                who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
                who = who if missing else "A rank"
                self._give_up(f"{who} did not answer for {self.timeout:g} s, in {what}.", missing or self._others())

    def _has_sent_other(self, other: int, tag: int) -> bool:
        """Return whether data of another operation have arrived from a rank that owes those of this one.

        Messages of a rank arrive in order, so that the data of its next operation arrive after those of this one.
        """
        status = self._library.Status()
        found = self._world.Iprobe(other, self._library.ANY_TAG, status)
        return bool(found) and status.Get_tag() in _DATA and status.Get_tag() != tag

    def _give_up(self, sentence: str, lost: Iterable[int] = ()) -> None:
        self._failed = True  # other ranks know of the failure or time out themselves
        self._lost.update(lost)
        raise ParallelError(sentence, lost=bool(self._lost))

    def _receive_failure(self) -> str:
        status = self._library.Status()
        self._world.Probe(self._library.ANY_SOURCE, _FAILURE, status)
        content = bytearray(status.Get_count(self._library.BYTE))
        self._world.Recv(content, status.Get_source(), _FAILURE)
        return content.decode(errors="replace")

    def _report_uncaught_errors(self) -> None:
        """Install an exception hook that tells the other ranks of an uncaught error, so that they do not wait."""
        before = sys.excepthook

        def end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            if self.speaks or not getattr(error, "everywhere", False):
                before(kind, error, traceback)
                sys.stderr.flush()
            self.fail(" ".join(str(error).split()) or kind.__name__)

        sys.excepthook = end

    def _leave(self) -> None:
        """Finalize MPI; after a failure, make sure that rank 0 can report the error."""
        library, world = self._library, self._world
        if library.Is_finalized():
            return
        if self._failed and self._lost:
            if not self.speaks:
                sys.stderr.flush()
                time.sleep(_GRACE)
                os._exit(1)
            return
        if self._failed and self.rank:
            world.Isend(bytearray(1), 0, _LEAVING).Free()
            library.Finalize()
            sys.stderr.flush()
            ctypes.CDLL(None).exit(0)  # after os._exit the launcher would kill the other ranks
        if self._failed:
            requests = [world.Irecv(bytearray(1), other, _LEAVING) for other in self._others()]
            until = time.monotonic() + _GRACE
            while not library.Request.Testall(requests):
                if time.monotonic() > until:
                    return
                if world.Iprobe(library.ANY_SOURCE, _FAILURE):
                    self._receive_failure()  # another rank failed at the same time and waits for this receive
                time.sleep(0.01)
            time.sleep(0.2)
        library.Finalize()


@functools.cache
def _tag(what: str, size: int) -> int:
    """Return the tag of the messages of an operation on an array of this number of bytes."""
    return _DATA[zlib.crc32(f"{what} {size}".encode()) % len(_DATA)]


_TYPES = "bBhHiIlLqQfd"
"""NumPy type characters that MPI can sum."""


def _library(timeout: float) -> Any:
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # `_start` initializes MPI, with a time limit
        mpi4py.rc.finalize = False  # `_leave` finalizes MPI, unless ranks are lost
        from mpi4py import MPI as library  # noqa: N811 - a module with the name of a class
    except ImportError as error:
        raise OptionError(
            f"MPI needs mpi4py, which cannot be imported ({error}); install it with pip install mpi4py mpich."
        ) from error
    except RuntimeError as error:  # "cannot load MPI library"
        raise OptionError(
            f"mpi4py finds no MPI library ({' '.join(str(error).split())}); install one, such as pip install mpich."
        ) from error
    if not library.Is_initialized():
        _start(library, timeout)
    return library


def _start(library: Any, timeout: float) -> None:
    """Call MPI_Init_thread, which waits for all ranks; exit this process if they do not start in time.

    mpi4py would hold the GIL during the call, which blocks the timer thread; ctypes releases it. The call never returns
    if a rank has already ended, so that the timer must exit the process instead of raising an error.
    """

    def give_up() -> None:
        sys.stderr.flush()
        (sys.__stderr__ or sys.stderr).write(
            f"error: Rank {environment_rank()} waited {timeout:g} s for all ranks to start MPI; one of them has ended "
            "before or is slow to start: see its own message, or wait longer (timeout=, --wait).\n"
        )
        os._exit(3)

    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        wanted = int(library.THREAD_MULTIPLE)
        ctypes.CDLL(library.__file__).MPI_Init_thread(None, None, wanted, ctypes.byref(ctypes.c_int()))
    finally:
        timer.cancel()


def _flat(array: np.ndarray) -> np.ndarray:
    """Return a flat view of an array."""
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ParallelError(f"An array of shape {array.shape} is read-only or not contiguous; give a copy of it.")
    return array.reshape(-1)


def _rows(array: np.ndarray, size: int) -> np.ndarray:
    """Return an array [size, ...] as a view [size, n]."""
    if not array.ndim or len(array) != size:
        raise ParallelError(f"An array of shape {array.shape} needs one row for each of {size} ranks.")
    return _flat(array).reshape(size, -1)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8) if array.ndim else array.reshape(1).view(np.uint8)


def _add_in_order(parts: np.ndarray, total: np.ndarray) -> None:
    """Sum the rows in order; an overflow is not reported here, since it makes the loss NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            np.add(total, part, out=total)
