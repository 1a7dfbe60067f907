"""Batches on their way to a step: changed by an augmentation, and prepared in a thread while a step runs."""

from __future__ import annotations

import contextvars
import inspect
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

import numpy as np

from onnxtrain.data.base import Batch
from onnxtrain.errors import DataError

Augment = Callable[..., Any]
"""``augment(inputs, rng)`` returns changed inputs of the same types and shapes. A single input is an array [N, ...],
several are a dictionary of arrays by name. ``augment(inputs, targets, rng)`` returns both. A method
``opened(trainer, data)`` changes the training data before the first batch."""


def augmented(
    batches: Iterator[Batch], augment: Augment, *, seed: int, epoch: int, start: int, rank: int = 0
) -> Generator[Batch]:
    """Yield batches with changed inputs, by random numbers that depend on seed, epoch and index alone."""
    for index, batch in enumerate(batches, start):
        if not batch.size:  # other processes have all of its examples
            yield batch
            continue
        sequence = np.random.SeedSequence([seed, epoch, index, *([rank] if rank else [])], spawn_key=(2,))
        generator = np.random.Generator(np.random.PCG64(sequence))
        inputs = {name: np.array(array) for name, array in batch.inputs.items()}  # the caller's data must not change
        single = next(iter(inputs)) if len(inputs) == 1 else None
        asked = "targets" in inspect.signature(augment).parameters
        own = np.array(batch.targets) if asked and batch.targets is not None else None
        found = augment(inputs if single is None else inputs[single], *([own] if asked else []), generator)
        found, targets = found if asked and isinstance(found, tuple) and len(found) == 2 else (found, None)
        given = {single: found} if single is not None else found if isinstance(found, dict) else {}
        yield batch._replace(
            inputs={name: _checked(given.get(name), f"the input '{name}'", array) for name, array in inputs.items()},
            targets=batch.targets if own is None else _checked(targets, "the targets", own, " and targets"),
        )


def _checked(given: Any, what: str, like: np.ndarray[Any, Any], besides: str = "") -> np.ndarray[Any, Any]:
    if given is None:
        raise DataError(f"augment returned nothing for {what}; it must return the changed inputs{besides}.")
    array = np.asarray(given)
    if array.shape != like.shape:
        raise DataError(f"augment returned shape {array.shape} for {what}; it must keep {like.shape}.")
    if array.dtype.kind != like.dtype.kind and not np.can_cast(array.dtype, like.dtype, "same_kind"):
        raise DataError(f"augment returned {array.dtype} for {what}; it must keep {like.dtype}.")
    return np.ascontiguousarray(array, like.dtype)


WORTH: Final = 5e-4
"""Seconds per batch from which a thread prepares them; passing one between threads takes about a tenth of it."""

_IN_A_ROW: Final = 3
"""Consecutive batches that must take that long: a single one may have waited for a busy machine."""

_AHEAD: Final = 1
"""Prepared batches in the queue; one more may be in preparation."""

_PATIENCE: Final = 1.0
"""Seconds to wait at the end for a thread that is still preparing a batch."""


class Prefetch:
    """Read ahead in a thread where preparing batches is slow, and measure the time that steps wait."""

    def __init__(self, *, threaded: bool = True) -> None:
        self.waited = 0.0
        self._threaded = threaded
        self._slow = 0

    def __call__(self, batches: Iterator[Batch], *, copies: bool) -> Generator[Batch]:
        """Yield the batches of an epoch."""
        first = True
        while not self._threaded or self._slow < _IN_A_ROW:
            began = time.perf_counter()
            batch = next(batches, None)
            took = time.perf_counter() - began
            self.waited += took
            if batch is None:
                return
            if self._threaded and not first:  # the first batch opens files
                self._slow = self._slow + 1 if took > WORTH else 0
            first = False
            yield batch
        ahead = _Ahead(batches, copies=copies)
        try:
            while True:
                began = time.perf_counter()
                try:
                    batch = ahead.next()
                finally:
                    self.waited += time.perf_counter() - began
                if batch is None:
                    return
                yield batch
        finally:
            ahead.stop()


class _Ahead:
    def __init__(self, batches: Iterator[Batch], *, copies: bool) -> None:
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(_AHEAD)
        self._stopped = threading.Event()
        # context variables such as numpy.errstate apply in the thread, too
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._read, batches, copies), name="onnxtrain-prefetch", daemon=True
        )
        self._thread.start()

    def next(self) -> Batch | None:
        """Return the next batch or raise its error; None at the end."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self) -> None:
        """Stop the thread after the batch that it is preparing; a hanging thread is abandoned."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        self._thread.join(_PATIENCE)

    def _read(self, batches: Iterator[Batch], copies: bool) -> None:
        try:
            while not self._stopped.is_set():
                batch = next(batches, None)
                if batch is not None and copies:
                    batch = _copied(batch)
                self._put(batch)
                if batch is None:
                    return
        except BaseException as error:
            self._put(error)
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


def _copied(batch: Batch) -> Batch:
    inputs = {name: np.array(array) for name, array in batch.inputs.items()}
    return batch._replace(inputs=inputs, targets=None if batch.targets is None else np.array(batch.targets))
