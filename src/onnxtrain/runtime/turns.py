"""Time two sessions in turns, in the processor time of this thread, so that other programs do not count."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnxruntime

_TURNS = 15
"""Turns of both sessions, of which the fastest decide, since other programs only add time."""

_clock = time.perf_counter if os.name == "nt" else time.thread_time
"""Time that this thread computes; Windows counts it in steps of 16 ms."""


def session_of_one_thread(model: bytes, library: str | None = None) -> onnxruntime.InferenceSession:
    """Return a session of a model on the CPU, with a library of custom operators if given."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    options.intra_op_num_threads = 1
    if library is not None:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def times_in_turns(
    one: onnxruntime.InferenceSession,
    other: onnxruntime.InferenceSession,
    feeds: Mapping[str, np.ndarray],
    *,
    seconds: float = 0.15,
) -> tuple[float, float]:
    """Return the seconds of a call of each session, which have one thread: the fastest of some turns."""
    for session in (one, other):
        session.run(None, feeds)
    calls = max(1, int(seconds / _TURNS / max(_seconds(one, feeds, 1), 1e-6)))
    turns = [(_seconds(one, feeds, calls), _seconds(other, feeds, calls)) for _ in range(_TURNS)]
    return min(turn[0] for turn in turns) / calls, min(turn[1] for turn in turns) / calls


def _seconds(session: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray], calls: int) -> float:
    start = _clock()
    for _ in range(calls):
        session.run(None, feeds)
    return _clock() - start
