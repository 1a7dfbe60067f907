"""Python callback of ``AllReduce`` nodes: a sum over all ranks in the middle of a step.

The native library calls the callback on the thread that runs the session. So any communication engine can serve, and
MPI is called from the thread that initialized it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from onnxtrain.errors import StepError
from onnxtrain.runtime.native import library

Action = Callable[[np.ndarray], None]
"""Replaces every element of a vector by its sum over all ranks, in place."""

_TYPES = (ctypes.c_float, ctypes.c_double)


class _Thread(threading.local):
    """Action of the ``AllReduce`` nodes that run on this thread, and the exception it raised."""

    action: Action | None = None
    error: BaseException | None = None


_thread = _Thread()


@contextmanager
def all_reducing(action: Action) -> Iterator[None]:
    """Run an action for each ``AllReduce`` node that executes on this thread within the block."""
    _install()
    _thread.action, _thread.error = action, None
    try:
        yield
    except StepError:
        if _thread.error is not None:
            raise _thread.error from None
        raise
    finally:
        _thread.action = _thread.error = None


def _reduce(kind: int, data: int, count: int) -> int:
    """Run the action on a C array; return 0 on success, 1 after an exception."""
    try:
        if _thread.action is None:
            raise StepError("A graph with AllReduce nodes, built for distributed training, runs in a single process.")
        pointer = ctypes.cast(data, ctypes.POINTER(_TYPES[kind]))
        _thread.action(np.ctypeslib.as_array(pointer, (count,)))
    except BaseException as error:  # an exception cannot pass through C
        _thread.error = error
        return 1
    return 0


@functools.cache
def _install() -> Any:
    """Register the callback; the returned function must live as long as the library may call it."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    install, function = library().onnxtrain_set_all_reduce, kind(_reduce)
    install.argtypes, install.restype = [kind], None
    install(function)
    return function
