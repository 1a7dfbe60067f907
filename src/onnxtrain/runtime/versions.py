"""Whole versions of values for any number of reading threads, while one thread changes them.

A version is what the values are between two changes. A reader that begins while nothing changes reads the values
themselves. Before a change, the values that readers still need are copied, once for all of them; they go on with the
copy, and the change waits only for the runs that have begun. A reader that begins during a change gets the copy of the
version before it where there is one, and otherwise waits for the end of the change.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any, Self

import numpy as np

from onnxtrain.errors import BusyError

_numbers = itertools.count(1)
_local = threading.local()


def _thread() -> int:
    """Return a number that no other thread ever has; identifiers of threads are used again."""
    try:
        number: int = _local.number
    except AttributeError:
        number = _local.number = next(_numbers)
    return number


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class Versioned(MutableMapping[str, np.ndarray]):
    """Arrays by name that one thread changes, and any number of threads read."""

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._trainer = 0  # number of the thread that trains
        self._home = _thread()  # the thread that trained last, whose arrays are live; once it has ended, the main one
        self._training = threading.current_thread()  # the thread that trained last
        self._call = ""  # its outermost call
        self._calls = self._change = 0  # its depth of calls, and the depth at which a change began
        self._runs = 0  # runs of readers on these values
        self._readings: set[Reading] = set()  # readers of the current version without a copy
        self._waiting: set[Reading] = set()  # readers that wait for the end of a change
        self._wanted: set[str] = set()  # what readers that began since the last change read
        self._kept: Any = None  # copy of the current version; during a change, of the one before
        self._spare: Any = None  # copy without readers, to be overwritten
        self._users = 0  # of a copy: its readers

    @abstractmethod
    def current(self, name: str) -> np.ndarray:
        """Return the current value; callers must not keep it."""

    @abstractmethod
    def copied(self, names: Collection[str], into: Self | None) -> Self:
        """Return a copy of some values, written into an earlier copy of the same names if there is one."""

    @property
    def is_settled(self) -> bool:
        """True where the values stay until :attr:`version` changes: nobody is about to write them."""
        return not self._change

    @property
    def is_foreign(self) -> bool:
        """True while another thread trains."""
        return self._trainer not in (0, _thread())

    @property
    def is_home(self) -> bool:
        """True in the thread that trained last, and in the main one once that has ended."""
        me = _thread()
        if self._home != me and not (self._trainer or self._training.is_alive()) and _is_main():
            self._home = me
        return self._home == me

    @property
    def is_own(self) -> bool:
        """True in a :meth:`training` of this thread."""
        return self._trainer == _thread()

    def training(self, call: str, *, changes: bool = False) -> Training:
        """Return the context of a call that changes values: no other thread may begin one meanwhile."""
        return Training(self, call, changes)

    def writing(self) -> Training:
        """Return the context of an assignment, which is one change."""
        return Training(self, "assigning values", True)

    def change(self) -> None:
        """Begin a change, unless one has begun: keep what readers need, and wait for their runs."""
        if self._change:
            return
        with self._lock:
            self._change = self._calls
            self.version += 1
            if self._readings or self._wanted or self._runs:
                try:
                    names, self._wanted = self._wanted, set()
                    if names or self._readings:
                        self._keep(names)
                    while self._runs:
                        self._changed.wait()
                except BaseException:
                    self._end_change()
                    raise

    def reading(self, names: Collection[str]) -> Reading:
        """Return the context of a reader that needs several runs on one version of some values."""
        return Reading(self, frozenset(names))

    @contextlib.contextmanager
    def snapshot(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        """Context with one version of some values; changes wait or copy, so that callers must not keep the arrays."""
        with self.reading(self if names is None else names) as reading:
            with self._lock:
                if self.is_foreign and reading in self._readings:
                    self._keep(reading.names)
            values = reading.begin()
            try:
                yield Snapshot(values, reading.names)
            finally:
                reading.end(values)

    def _begin(self, call: str) -> None:
        me = _thread()
        with self._lock:
            if self._trainer != me:
                if self._trainer:
                    raise BusyError(
                        f"{call} changes a trainer that another thread ({self._training.name!r}) trains in "
                        f"{self._call}; one thread trains at a time, so leave all training to one thread, for example "
                        "with a queue of its data, or hold one lock in all calls that train."
                    ).about(call, got=self._call)
                self._trainer, self._home, self._call = me, me, call
                self._training = threading.current_thread()
            self._calls += 1

    def _end(self) -> None:
        with self._lock:
            if self._change == self._calls:
                self._end_change()
            self._calls -= 1
            if not self._calls:
                self._trainer, self._spare = 0, None

    def _end_change(self) -> None:
        self._change = 0
        if self._waiting or self._kept is not None:
            kept, self._kept = self._kept, None
            if kept is not None and not kept._users:
                self._spare = kept
            self._readings |= self._waiting
            self._waiting.clear()
            self._changed.notify_all()

    def _keep(self, names: Collection[str]) -> None:
        """Copy some values and those that readers need, and let the readers go on with the copy."""
        needed = set(names).union(*(reading.names for reading in self._readings))
        if self._kept is None or not needed <= self._kept.keys():
            spare, self._spare = self._spare, None
            if spare is not None and needed <= spare.keys():
                self._kept = self.copied(list(spare), spare)
            else:
                self._kept = self.copied([name for name in self if name in needed], None)
        for reading in self._readings:
            reading.take(self._kept)
        self._readings.clear()


class Snapshot(Mapping[str, np.ndarray]):
    """Values of one version by name, in the order of all."""

    def __init__(self, values: Versioned, names: Collection[str]) -> None:
        self._values, self._names = values, dict.fromkeys(name for name in values if name in names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._values.current(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Training:
    """Context of a call that trains: see :meth:`Versioned.training`."""

    __slots__ = ("_call", "_changes", "_values")

    def __init__(self, values: Versioned, call: str, changes: bool) -> None:
        self._values, self._call, self._changes = values, call, changes

    def __enter__(self) -> None:
        self._values._begin(self._call)
        if self._changes:
            try:
                self._values.change()
            except BaseException:
                self._values._end()
                raise

    def __exit__(self, *_: object) -> None:
        self._values._end()


class Reading:
    """Context of a reader: every run from :meth:`begin` to :meth:`end` has the values of one version."""

    __slots__ = ("_copy", "_values", "names")

    def __init__(self, values: Versioned, names: frozenset[str]) -> None:
        self._values, self.names = values, names
        self._copy: Any = None

    def __enter__(self) -> Self:
        values = self._values
        with values._lock:
            is_foreign = values.is_foreign
            if is_foreign:
                values._wanted |= self.names
            if not (values._change and is_foreign):
                values._readings.add(self)
            elif values._kept is not None and self.names <= values._kept.keys():
                self.take(values._kept)
            else:
                values._waiting.add(self)
                try:
                    while self in values._waiting:
                        values._changed.wait()
                except BaseException:
                    self.__exit__()
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        values, copy = self._values, self._copy
        with values._lock:
            values._readings.discard(self)
            values._waiting.discard(self)
            if copy is not None:
                copy._users -= 1
                if not copy._users and copy is not values._kept and values._trainer:
                    values._spare = copy

    def take(self, copy: Any) -> None:
        """Go on with a copy."""
        if self._copy is None:
            self._copy = copy
            copy._users += 1

    def begin(self) -> Any:
        """Begin a run; return the values to read, which no change overwrites before :meth:`end`."""
        values = self._values
        with values._lock:
            if self._copy is not None:
                return self._copy
            values._runs += 1
            return values

    def end(self, given: Any) -> None:
        """End the run on the values that :meth:`begin` returned."""
        values = self._values
        if given is values:
            with values._lock:
                values._runs -= 1
                if not values._runs:
                    values._changed.notify_all()
