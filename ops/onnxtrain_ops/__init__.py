"""The native operators of onnxtrain for ONNX Runtime, without the trainer."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import onnxruntime

__all__ = ["library", "session"]

_SECONDS, _LEAST_PAIRS, _MOST_PAIRS = 0.2, 3, 25
"""How long both sessions are timed together, and the pairs of runs whose median decides."""


def library() -> str:
    """Return the path of the library, for ``SessionOptions.register_custom_ops_library``."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    return str(Path(__file__).resolve().parent / "lib" / f"libonnxtrain_kernels{suffix}")


def session(
    path: str | os.PathLike[str], feeds: dict[str, Any], options: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    """Return a session of a compiled model, with the sparse kernels only if they are faster here.

    The model is loaded with the kernels and without them, and both run on ``feeds`` in turn, for 0.2 seconds in all or
    three pairs of runs, whichever is longer. So the session is as fast as the dense model at least, on this processor
    and with this number of threads and this batch size.

    Args:
        path: A file that ``onnxtrain sparsify`` wrote.
        feeds: Inputs of the size in use.
        options: Options of the session, such as its number of threads. The library is registered in them, so each
            session needs its own.

    Raises:
        ValueError: The options have the library already.
    """
    options = options or onnxruntime.SessionOptions()
    dense = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    options.register_custom_ops_library(library())
    try:
        sparse = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if "already set in registry" not in str(error):
            raise
        raise ValueError(
            "The options have the library of kernels already; session registers it, so give each session new options."
        ) from error
    return sparse if _speedup(dense, sparse, feeds) > 1 else dense


def _speedup(dense: onnxruntime.InferenceSession, sparse: onnxruntime.InferenceSession, feeds: dict[str, Any]) -> float:
    """Return the median ratio of pairs of runs, after one run of each that is not timed."""
    for one in (dense, sparse):
        one.run(None, feeds)
    end, ratios = time.perf_counter() + _SECONDS, []
    while len(ratios) < _LEAST_PAIRS or (time.perf_counter() < end and len(ratios) < _MOST_PAIRS):
        ratios.append(_seconds(dense, feeds) / _seconds(sparse, feeds))
    return statistics.median(ratios)


def _seconds(one: onnxruntime.InferenceSession, feeds: dict[str, Any]) -> float:
    start = time.perf_counter()
    one.run(None, feeds)
    return time.perf_counter() - start
