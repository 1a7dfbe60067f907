"""Measure how much faster one model runs than another, in pairs of runs."""

from __future__ import annotations

import os
import statistics
import time

import numpy as np
import onnx
import onnxruntime

from onnxtrain.errors import OptionError

_FREE_SIZES = (1, 8, 16, 32, 64, 224)
"""Sizes for free axes behind the first, tried in this order; the first axis, the batch, gets 1."""

_SECONDS = 0.4
"""Time for the pairs of one measurement."""

_PAIRS = 7
"""Pairs that are measured at least."""

_clock = time.perf_counter if os.name == "nt" else time.thread_time
"""Time that this thread computes, so that other processes do not count; Windows counts it in steps of 16 ms."""


def speedup(before: onnx.ModelProto, after: onnx.ModelProto) -> float:
    """Return the time of the first model over that of the second: the median over pairs of runs, for one example.

    Each runs in one thread: with several, those of the session that waits disturb the other one.

    Args:
        before: The original model.
        after: The model to compare it with; it has the same inputs.

    Raises:
        OptionError: The model does not run on random inputs.
    """
    sessions = [_session(before), _session(after)]
    feeds = _feeds(before, sessions[0])
    for session in sessions:
        session.run(None, feeds)
    ratios: list[float] = []
    start = time.perf_counter()
    repeats = 1
    while len(ratios) < _PAIRS or time.perf_counter() - start < _SECONDS:
        times = [_time(session, feeds, repeats) for session in sessions]
        if min(times) < 1e-3 and repeats < 64:  # too short for the clock
            repeats *= 2
            ratios.clear()
            continue
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def _time(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray], repeats: int) -> float:
    start = _clock()
    for _ in range(repeats):
        session.run(None, feeds)
    return _clock() - start


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _feeds(model: onnx.ModelProto, session: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    """Return random inputs on which a model runs."""
    rng = np.random.default_rng(0)
    problem: Exception | None = None
    initialized = {tensor.name for tensor in model.graph.initializer}
    for free in _FREE_SIZES:
        feeds: dict[str, np.ndarray] = {}
        for info in model.graph.input:
            if info.name in initialized:
                continue
            dims = info.type.tensor_type.shape.dim
            shape = [dim.dim_value or (1 if place == 0 else free) for place, dim in enumerate(dims)]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            drawn = rng.integers(0, 2, shape) if dtype.kind in "iub" else rng.normal(size=shape)
            feeds[info.name] = drawn.astype(dtype)
        try:
            session.run(None, feeds)
        except Exception as error:  # another size may do
            problem = problem or error
        else:
            return feeds
    raise OptionError(
        f"speedup= is measured on random inputs, on which the model does not run ({problem}); give flops=."
    )
