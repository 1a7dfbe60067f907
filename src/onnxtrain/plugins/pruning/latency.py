"""Measure how much faster one model runs than another."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

from onnxtrain.errors import OptionError
from onnxtrain.runtime.turns import times_in_turns

_FREE_SIZES = (1, 8, 16, 32, 64, 224)
"""Sizes for free axes behind the first, tried in this order; the first axis, the batch, gets 1."""


def speedup(before: onnx.ModelProto, after: onnx.ModelProto) -> float:
    """Return the time of the first model over that of the second, for one example."""
    sessions = [_session(before), _session(after)]
    feeds = _feeds(before, sessions[0])
    first, second = times_in_turns(sessions[0], sessions[1], feeds)
    return first / second


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
