"""Ask ONNX Runtime which opsets it supports, and whether a failure is the model's fault.

Gradient rules and passes assume a valid model: inputs with ranks, and attributes with types, that their operators
accept. ONNX's checker finds only some violations. A session would find all of them, but costs time and memory for
every valid model. So ONNX Runtime opens the model only after an unexpected failure. If it rejects the model, its
reason becomes the error.

ONNX Runtime does not say which versions it supports, so it is asked to open a model, the newest version first. The
model has operators that were redefined lately: ONNX Runtime may know an opset and lack its kernels (see
:mod:`onnxtrain.graph.upstream`). That takes milliseconds, and is necessary only for models beyond the versions that
every supported ONNX Runtime opens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import onnx
import onnx.defs
from onnx import ModelProto, helper

from onnxtrain.errors import ModelError, OnnxTrainError

MINIMUM_OPSET = 7
"""Older operators have other broadcasting rules, and ONNX Runtime does not support them."""

MINIMUM_IR_VERSION = 3
"""The first version with opset imports."""

_OPSET_OF_ALL, _IR_VERSION_OF_ALL = 21, 10
"""The newest opset and IR version that ONNX Runtime 1.20, the oldest supported version, opens."""


@functools.cache
def newest_opset() -> int:
    """Return the newest opset of the default domain that both ONNX and ONNX Runtime support."""
    return _newest(onnx.defs.onnx_opset_version(), _OPSET_OF_ALL, lambda opset: _opens(opset, _IR_VERSION_OF_ALL))


@functools.cache
def newest_ir_version() -> int:
    """Return the newest IR version that both ONNX and ONNX Runtime support."""
    return _newest(int(onnx.IR_VERSION), _IR_VERSION_OF_ALL, lambda version: _opens(_OPSET_OF_ALL, version))


def supports_opset(opset: int) -> bool:
    """Return whether an opset is supported; ONNX Runtime is asked only above opset 21."""
    return opset >= MINIMUM_OPSET and (opset <= _OPSET_OF_ALL or opset <= newest_opset())


def supports_ir_version(version: int) -> bool:
    """Return whether an IR version is supported."""
    return version >= MINIMUM_IR_VERSION and (version <= _IR_VERSION_OF_ALL or version <= newest_ir_version())


def _newest(known: int, sure: int, opens: Callable[[int], bool]) -> int:
    return next((version for version in range(known, sure, -1) if opens(version)), sure)


def _opens(opset: int, ir_version: int) -> bool:
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    scale = helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [1.0])
    zero = helper.make_tensor("zero", onnx.TensorProto.INT8, [], [0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("Cast", ["d"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    graph = helper.make_graph(nodes, "probe", [x], [y], [scale, zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    return _refusal(model.SerializeToString()) is None


def _refusal(model: bytes | str, *, optimized: bool = True) -> Exception | None:
    """Return the error with which ONNX Runtime rejects a model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base class
        return error
    return None


P = ParamSpec("P")
R = TypeVar("R")


def refuses_invalid(parameter: str = "model") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it raises ModelError if it fails on a model that ONNX Runtime rejects.

    Example:
        >>> @refuses_invalid()
        ... def first_axis(model):
        ...     return model.graph.node[0].attribute[0].i
        >>> first_axis(ModelProto(ir_version=8))
        Traceback (most recent call last):
            ...
        onnxtrain.errors.ModelError: The model is rejected by ONNX Runtime: ...
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
    """Raise ModelError if a block fails on an invalid model; the context manager of :func:`refuses_invalid`."""
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
        raise ModelError(f"{label} is rejected by ONNX Runtime: {reason}; export it again.").about(
            label, got=reason
        ) from error


def why_not_taken(model: str | os.PathLike[str] | ModelProto) -> str | None:
    """Return the reason why ONNX Runtime rejects a model; ``None`` if it accepts it, or the reason is unclear."""
    try:
        given = model.SerializeToString() if isinstance(model, ModelProto) else os.fspath(model)
    except Exception:  # more than 2 GiB
        return None
    error = _refusal(given, optimized=False)
    if error is None:
        return None
    reason = re.sub(_PREFIX, "", " ".join(str(error).split())).rstrip(". ")
    return None if not reason or re.search(_UNKNOWN, reason) else reason[:400]


_PREFIX = r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .*? failed:)?(This is an invalid model\. )?"
_UNKNOWN = r"not a registered function/op|No opset import for domain|external data|bad_alloc|memory"
"""Errors that are not about the model's validity."""
