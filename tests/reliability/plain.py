"""Plain onnxruntime on the file of a case: whether it also crashes, hangs or exhausts memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from reliability.outcome import Outcome

TIME_LIMIT = 30.0

FACTOR = 4
"""Memory that is allowed, as a multiple of that of plain onnxruntime."""


def compare_with_plain(outcome: Outcome, case: Path) -> Outcome:
    """Return the outcome; its kind is ``runtime`` if plain onnxruntime fails alike on the case's ``model.onnx``."""
    if not (case / "model.onnx").is_file():
        return outcome
    try:
        found = subprocess.run(
            [sys.executable, "-m", "reliability.plain", str(case)],
            capture_output=True,
            timeout=TIME_LIMIT,
            check=False,
            text=True,
            env=environment(),
        )
    except subprocess.TimeoutExpired:
        return dataclasses.replace(outcome, kind="runtime")
    if found.returncode > 0:
        raise RuntimeError(f"plain onnxruntime could not be asked: {found.stderr}")
    if outcome.kind == "crash":
        return dataclasses.replace(outcome, kind="runtime") if found.returncode < 0 else outcome
    if outcome.kind == "memory":
        grown = json.loads(found.stdout.splitlines()[-1])["grown"] if found.returncode == 0 else 0
        if found.returncode < 0 or (outcome.detail.isdigit() and int(outcome.detail) <= FACTOR * max(grown, 128 << 20)):
            return dataclasses.replace(outcome, kind="runtime")
        detail = f"plain onnxruntime took {grown >> 20} MiB\n{outcome.detail}"
        return dataclasses.replace(outcome, detail=detail)
    return outcome


def environment() -> dict[str, str]:
    """Return environment variables for processes that import this package."""
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def feeds(model: onnx.ModelProto, *, batch: int = 3, largest: int = 1 << 16) -> dict[str, Any]:
    """Return arrays for the inputs of a model, of any declared type; they depend on the declarations only."""
    names = {tensor.name for tensor in model.graph.initializer}
    arrays: dict[str, Any] = {}
    for value in model.graph.input:
        if value.name in names or not value.type.HasField("tensor_type"):
            continue
        tensor = value.type.tensor_type
        shape = [axis.dim_value if axis.HasField("dim_value") else batch for axis in tensor.shape.dim]
        if any(size < 0 for size in shape) or np.prod([*map(float, shape), 1.0]) > largest:
            shape = [min(max(size, 0), 4) for size in shape]
        arrays[value.name] = _array(tensor.elem_type, shape)
    return arrays


def _array(element: int, shape: list[int]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape, dtype=np.int64))
    if element == onnx.TensorProto.STRING:
        return np.array(["a", "b", "\u03bb"] * (count // 3 + 1), dtype=object)[:count].reshape(shape)
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    except (KeyError, TypeError):
        dtype = np.dtype(np.float32)
    values: Any = np.random.default_rng(count).normal(size=shape) if dtype.kind in "fc" or dtype.kind == "V" else None
    return np.asarray(np.arange(count).reshape(shape) % 3 if values is None else values).astype(dtype)


def _main(case: Path) -> None:
    import resource

    import onnxruntime

    from reliability.worker import ADDRESS_SPACE, peak_memory, resetpeak_memory

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    before = resetpeak_memory()
    with contextlib.suppress(Exception):
        session = onnxruntime.InferenceSession(case / "model.onnx", options, providers=["CPUExecutionProvider"])
        session.run(None, feeds(onnx.load(case / "model.onnx", load_external_data=False)))
    print(json.dumps({"grown": peak_memory() - before}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
