"""Pause Python's cyclic garbage collector while a graph is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Run the body without cyclic garbage collection.

    Building a graph allocates some hundred thousand long-lived objects. Collections would scan them again and again,
    a sixth of the time to build a model of 2,000 nodes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
