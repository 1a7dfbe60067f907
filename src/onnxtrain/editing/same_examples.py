"""Check by running that a model with a dynamic batch size computes the same for every example as the original."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime

from onnxtrain.errors import OptionError

_FREE_SIZES = (8, 16, 32, 64, 224, 1)
"""Sizes for other free axes, tried in this order."""

_TOLERANCE = 1e-3


def check_same_examples(fixed: onnx.ModelProto, free: onnx.ModelProto, *, seed: int = 0) -> None:
    """Run both models on the same random examples and compare."""
    size = next(
        dim.dim_value
        for old, new in zip(fixed.graph.input, free.graph.input, strict=True)
        for dim, other in zip(_dims(old)[:1], _dims(new)[:1], strict=True)
        if dim.dim_value != other.dim_value
    )
    batched = {
        new.name
        for old, new in zip(fixed.graph.input, free.graph.input, strict=True)
        if _dims(old) and _dims(old)[0].dim_value != _dims(new)[0].dim_value
    }
    before, after = _session(fixed), _session(free)
    examples = 2 * size if size > 1 else 3
    feeds, expected = _first_that_runs(before, free, batched, size, examples, seed)
    try:
        found = after.run(None, feeds)
    except Exception as error:
        raise _refusal(f"ONNX Runtime cannot run it on {examples} examples ({_reason(error)})") from error
    for info, parts, array in zip(free.graph.output, expected, found, strict=True):
        _compare(info.name, parts, array)


def _first_that_runs(
    session: onnxruntime.InferenceSession,
    model: onnx.ModelProto,
    batched: set[str],
    size: int,
    examples: int,
    seed: int,
) -> tuple[dict[str, np.ndarray], list[list[np.ndarray]]]:
    """Return inputs that the fixed model accepts, and its outputs for each of its batches."""
    problem: Exception | None = None
    for free in _FREE_SIZES:
        feeds = dict(_inputs(model, examples, free, batched, seed))
        try:
            runs = [
                session.run(
                    None,
                    {name: array[start : start + size] if name in batched else array for name, array in feeds.items()},
                )
                for start in range(0, examples, size)
            ]
        except Exception as error:
            problem = problem or error
            continue
        return feeds, [list(parts) for parts in zip(*runs, strict=True)]
    assert problem is not None
    raise _refusal(f"the model itself does not run on random inputs ({_reason(problem)})") from problem


def _inputs(
    model: onnx.ModelProto, examples: int, free: int, batched: set[str], seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    initialized = {tensor.name for tensor in model.graph.initializer}
    for info in model.graph.input:
        if info.name in initialized:
            continue
        shape = [dim.dim_value or free for dim in _dims(info)]
        if info.name in batched:
            shape[0] = examples
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        if info.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            yield info.name, np.array(["text"] * int(np.prod(shape)), object).reshape(shape)
        elif dtype.kind in "iub":
            yield info.name, rng.integers(0, 2, shape).astype(dtype)
        else:
            yield info.name, rng.normal(size=shape).astype(dtype)


def _compare(name: str, parts: list[np.ndarray], found: np.ndarray) -> None:
    for axis in range(parts[0].ndim):
        joined = np.concatenate(parts, axis)
        if joined.shape == found.shape and _are_close(joined, found):
            return
    if all(part.shape == np.shape(found) and _are_close(part, found) for part in parts):
        return  # an output without examples, such as a table
    shapes = f"{parts[0].shape} and {np.shape(found)}"
    raise _refusal(f"its output {name!r} then differs for the same examples (shapes {shapes})")


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    scale = float(np.max(np.abs(one), initial=1.0, where=np.isfinite(one)))
    return bool(np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True))


def _dims(info: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(info.type.tensor_type.shape.dim)


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _refusal(f"ONNX Runtime cannot load it then ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _refusal(reason: str) -> OptionError:
    return OptionError(f"The batch size of the model cannot be freed: {reason}. Export it with a free one.").about(
        got=reason
    )
