"""Sums over several processes in the middle of a step: what nodes of ``AllReduce`` call.

The native library calls a function of Python, on the thread that runs the session and so of the steps that this thread
takes: other engines than MPI serve as well, and MPI is called from the thread that has opened it.
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
"""Replaces every element of a vector by its sum over all processes, in place."""

_TYPES = (ctypes.c_float, ctypes.c_double)


class _Thread(threading.local):
    """What the nodes of a session do that runs on this thread, and what went wrong."""

    action: Action | None = None
    error: BaseException | None = None


_thread = _Thread()


@contextmanager
def all_reducing(action: Action) -> Iterator[None]:
    """Let the ``AllReduce`` nodes of what runs in this block call an action.

    Raises:
        BaseException: What the action has raised, in the place of ONNX Runtime's error about the node.
    """
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
    """What the native library calls; 0 where it went well."""
    try:
        if _thread.action is None:
            raise StepError("A graph with sums over several processes runs in one that trains alone.")
        pointer = ctypes.cast(data, ctypes.POINTER(_TYPES[kind]))
        _thread.action(np.ctypeslib.as_array(pointer, (count,)))
    except BaseException as error:  # which cannot pass through the library
        _thread.error = error
        return 1
    return 0


@functools.cache
def _install() -> Any:
    """Give the library the function; what is returned must live as long as the library may call it."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    install, function = library().onnxtrain_set_all_reduce, kind(_reduce)
    install.argtypes, install.restype = [kind], None
    install(function)
    return function
