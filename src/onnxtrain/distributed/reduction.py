"""Overlap communication with computation: sum gradients over all ranks during the backward pass."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from onnxtrain.distributed.communicator import Communicator

Announced = Callable[[int, bytes], bool]
"""Takes the index of a group and the addresses of its gradients, as 64-bit numbers, in the computing thread; returns
whether the group may be reduced before the step ends."""

_LISTENER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64)


class Reduction:
    """Sum groups of gradients over all ranks, each as soon as it is ready."""

    def __init__(
        self,
        communicator: Communicator,
        groups: Sequence[Callable[[], None]],
        announced: Announced,
        *,
        overlap: bool,
        at_once: bool = False,
    ) -> None:
        self._communicator = communicator
        self._groups = groups
        self._announced = announced
        self._overlap, self._at_once = overlap, at_once
        self.waited = 0.0
        self.last = (0.0, 0.0)
        self._listener = _LISTENER(self._on_ready)
        self._counts = [0] * len(groups)
        self._times = 1
        self._started: list[Future[None]] = []
        self._error: BaseException | None = None

    @property
    def address(self) -> int:
        """Address of the C callback for a group that is ready: index, gradients, number of gradients."""
        return ctypes.cast(self._listener, ctypes.c_void_p).value or 0

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="onnxtrain-reduction")

    @contextmanager
    def overlapping(self, times: int) -> Iterator[None]:
        """Context of a backward pass: reduce each group once it was ready ``times`` times, the others at the end."""
        self._counts, self._times, self._started, self._error = [0] * len(self._groups), times, [], None
        self._communicator.set_background(self._overlap)
        try:
            yield
            self._communicator.set_background(False)
            began = time.perf_counter()
            for future in self._started:
                future.result()
            for group in self._groups[len(self._started) :]:
                group()
            self.last = began, time.perf_counter()
            self.waited += self.last[1] - began
        except BaseException as error:
            if not all(future.done() for future in self._started):
                self._communicator.abort()
                wait(self._started)
            if self._error is not None:
                raise self._error from error
            raise
        finally:
            self._communicator.set_background(False)

    def is_idle(self) -> bool:
        """Return whether all started groups are reduced; raise the error of a failed one."""
        done = [future.done() and future.result() is None for future in self._started]
        return all(done)

    def _on_ready(self, number: int, gradients: ctypes._Pointer[ctypes.c_void_p], count: int) -> int:
        """Handle the call of a native node in the computing thread; a nonzero result aborts the step."""
        try:
            if self._announced(number, ctypes.string_at(gradients, count * ctypes.sizeof(ctypes.c_void_p))):
                self._counts[number] += 1
                self._start()
        except BaseException as error:  # an exception cannot pass through native code
            self._error = error
            return 1
        return 0

    def _start(self) -> None:
        """Submit all groups that are ready, up to the first that is not."""
        while len(self._started) < len(self._groups) and self._counts[len(self._started)] >= self._times:
            group = self._groups[len(self._started)]
            if self._overlap:
                self._started.append(self._thread.submit(group))
            elif self._at_once:
                group()
                self._started.append(_done())
            else:
                return


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
