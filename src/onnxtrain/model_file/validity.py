"""Attribute a failure to the user's model, if ONNX Runtime rejects it, or to onnxtrain.

Gradient rules and passes assume a valid model: inputs with ranks, and attributes with types, that their operators
accept. ONNX's checker finds only some violations. A session would find all of them, but costs time and memory for
every valid model. So ONNX Runtime opens the model only after an unexpected failure. If it rejects the model, its
reason becomes the error.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from onnx import ModelProto

from onnxtrain.errors import ModelError, OnnxTrainError

P = ParamSpec("P")
R = TypeVar("R")


def refuses_invalid(parameter: str = "model") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function raise ModelError where it fails on a model that ONNX Runtime does not take.

    Errors of our own, of the system and of memory pass; so does whatever happens with a model that is valid.

    Args:
        parameter: The name of the function's parameter that is a path or a model.

    Example:
        >>> @refuses_invalid()
        ... def first_axis(model):
        ...     return model.graph.node[0].attribute[0].i
        >>> first_axis(ModelProto(ir_version=8))
        Traceback (most recent call last):
            ...
        onnxtrain.errors.ModelError: The model is none that ONNX Runtime takes: ...
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with invalid_refused(lambda: inspect.signature(function).bind(*args, **kwargs).arguments[parameter]):
                return function(*args, **kwargs)

        return call

    return decorate


@contextlib.contextmanager
def invalid_refused(find: Callable[[], Any]) -> Iterator[None]:
    """Raise ModelError for a block that fails on an invalid model, as :func:`refuses_invalid` does for a function.

    Args:
        find: Returns the path or the model, where something has failed.
    """
    try:
        yield
    except (OnnxTrainError, OSError, MemoryError):
        raise
    except Exception as error:
        model = find()
        reason = why_not_taken(model)
        if reason is None:
            raise
        label = "The model" if isinstance(model, ModelProto) else repr(os.fspath(model))
        raise ModelError(f"{label} is none that ONNX Runtime takes: {reason}; export it again.") from error


def why_not_taken(model: str | os.PathLike[str] | ModelProto) -> str | None:
    """Why ONNX Runtime takes no session of a model; ``None`` where it does, or where nobody can know.

    A model with operators that plain ONNX Runtime does not have may be a good one.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    try:
        given = model.SerializeToString() if isinstance(model, ModelProto) else os.fspath(model)
    except Exception:  # larger than protocol buffers can be
        return None
    try:
        onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it has many classes of errors, without a common one
        return _reason(str(error))
    return None


_PREFIX = r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .*? failed:)?(This is an invalid model\. )?"
_UNKNOWN = r"not a registered function/op|No opset import for domain|external data|bad_alloc|memory"


def _reason(text: str) -> str | None:
    """The first sentence of what ONNX Runtime says; ``None`` where it says nothing about the model's validity."""
    reason = re.sub(_PREFIX, "", " ".join(text.split())).rstrip(". ")
    return None if not reason or re.search(_UNKNOWN, reason) else reason[:400]
