"""Registry of functions that reproduce upstream bugs, and the models that they run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import onnxruntime
from onnx import ModelProto, parser

SHOWN: dict[str, Callable[[], bool]] = {}


def shows(name: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Register a function that reproduces a bug: true where the bug is there."""

    def decorate(function: Callable[[], bool]) -> Callable[[], bool]:
        SHOWN[name] = function
        return function

    return decorate


def session(model: ModelProto | bytes, *, threads: int = 1, **arguments: object) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"], **arguments)


def model(text: str, opset: int = 18) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')


def fails(content: ModelProto) -> bool:
    try:
        session(content)
    except Exception:
        return True
    return False


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
