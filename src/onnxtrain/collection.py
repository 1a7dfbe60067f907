"""Python's search for circles of objects, paused while a graph is built or modules are imported."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0


@contextmanager
def collection_paused(*, lasting: bool = False) -> Iterator[None]:
    """No collection of garbage inside: building and importing make some hundred thousand objects that stay.

    Each collection would look at many of them again: a sixth of the time to build a model of 2,000 nodes, and of the
    time from the start of a process to its first step. Pauses of several threads overlap; the last to end lets
    collections happen again. Where they were off before, they stay so.

    Args:
        lasting: Whether next to nothing that is made inside becomes garbage, as with modules: it counts as old
            afterwards, so that only a full collection looks at it.
    """
    global _pauses
    with _lock:
        if _pauses or gc.isenabled():
            _pauses += 1
            gc.disable()
            counted = True
        else:
            counted = False
    try:
        yield
    finally:
        if counted:
            with _lock:
                _pauses -= 1
                if not _pauses:
                    if lasting:
                        _make_old()
                    gc.enable()


def _make_old() -> None:
    """Move all objects to the oldest generation, without looking at them; not where a program has frozen some."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
