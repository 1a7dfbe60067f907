"""Sums over all ranks that are taken beside the computation of what is still to be added up."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from onnxtrain.distributed.communicator import Communicator

Take = Callable[[int, Sequence[int]], None]
"""Takes the number of a group and the addresses of its gradients, before they are lost."""

_LISTENER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64)


class Reduction:
    """Groups of gradients that are added up over all ranks, each as soon as it is there, in the order of their numbers.

    All ranks take the same groups in the same order, however fast they are. A thread does it while the one that
    computes goes on; where it may not, it is done when all is computed.

    Args:
        communicator: The ranks. Nothing else may use it while :meth:`beside` lasts.
        groups: What adds up each of them.
        overlap: Whether another thread may do it.
        take: What is called in the computing thread, every time that a group is announced. Without a second thread, a
            group is then added up at once.

    Attributes:
        waited: Seconds that the computing thread has waited for sums, in all steps.
        last: When the computation of the last step ended, and when its sums were there, by :func:`time.perf_counter`.
    """

    def __init__(
        self,
        communicator: Communicator,
        groups: Sequence[Callable[[], None]],
        *,
        overlap: bool,
        take: Take | None = None,
    ) -> None:
        self._communicator = communicator
        self._groups = groups
        self._take = take
        self._overlap = overlap
        self.waited = 0.0
        self.last = (0.0, 0.0)
        self._listener = _LISTENER(self._announced)
        self._counts = [0] * len(groups)
        self._times = 1
        self._started: list[Future[None]] = []
        self._error: BaseException | None = None

    @property
    def address(self) -> int:
        """The address of the function that announces a group: its number, its gradients and how many they are."""
        return ctypes.cast(self._listener, ctypes.c_void_p).value or 0

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="onnxtrain-reduction")

    @contextmanager
    def beside(self, times: int) -> Iterator[None]:
        """While this lasts, a group that has been announced so many times is added up; at the end, all are.

        Raises:
            ParallelError: Another rank has ended, or does not answer.
        """
        self._counts, self._times, self._started, self._error = [0] * len(self._groups), times, [], None
        self._communicator.behind(self._overlap)
        try:
            yield
            self._communicator.behind(False)
            began = time.perf_counter()
            for future in self._started:
                future.result()
            for group in self._groups[len(self._started) :]:
                group()
            self.last = began, time.perf_counter()
            self.waited += self.last[1] - began
        except BaseException as error:
            if not all(future.done() for future in self._started):
                self._communicator.abandon()
                wait(self._started)
            if self._error is not None:
                raise self._error from error
            raise
        finally:
            self._communicator.behind(False)

    def is_idle(self) -> bool:
        """Return whether all started groups are summed; raise the error of a failed one."""
        done = [future.done() and future.result() is None for future in self._started]
        return all(done)

    def _announced(self, number: int, gradients: ctypes._Pointer[ctypes.c_void_p], count: int) -> int:
        """Called by the native node, in the thread that computes; what is not 0 ends the step."""
        try:
            if self._take is not None:
                self._take(number, [gradients[index] or 0 for index in range(count)])
            self._counts[number] += 1
            self._start()
        except BaseException as error:  # which cannot go through the native code
            self._error = error
            return 1
        return 0

    def _start(self) -> None:
        """Let the thread add up what is there, as far as nothing before it is missing."""
        while len(self._started) < len(self._groups) and self._counts[len(self._started)] >= self._times:
            group = self._groups[len(self._started)]
            if self._overlap:
                self._started.append(self._thread.submit(group))
            elif self._take is not None:  # which holds no more than it must
                group()
                self._started.append(_done())
            else:
                return


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
