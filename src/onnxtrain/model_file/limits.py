"""The newest opset and file format that can be used: those that both the installed ONNX Runtime and onnx know.

ONNX Runtime does not say what it supports, so it is asked to open a model, the newest version first. The model has
operators that were defined anew lately: ONNX Runtime may know an opset and lack its kernels (see
:mod:`onnxtrain.workarounds`). That takes milliseconds, and is necessary only for models beyond what every supported
ONNX Runtime opens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx
import onnx.defs
from onnx import helper

MINIMUM_OPSET = 7
"""Older operators broadcast by rules of their own, and ONNX Runtime does not support them."""

MINIMUM_IR_VERSION = 3
"""The first version with opset imports."""

_OPSET_OF_ALL, _IR_VERSION_OF_ALL = 21, 10
"""The newest opset and IR version that ONNX Runtime 1.20, the oldest supported version, opens."""


@functools.cache
def newest_opset() -> int:
    """The newest opset of ONNX's own operators that models may have here."""
    return _newest(onnx.defs.onnx_opset_version(), _OPSET_OF_ALL, lambda opset: _opens(opset, _IR_VERSION_OF_ALL))


@functools.cache
def newest_ir_version() -> int:
    """The newest version of the file format that models may have here."""
    return _newest(int(onnx.IR_VERSION), _IR_VERSION_OF_ALL, lambda version: _opens(_OPSET_OF_ALL, version))


def supports_opset(opset: int) -> bool:
    """Return whether models may have this opset; ONNX Runtime is asked only above opset 21."""
    return opset >= MINIMUM_OPSET and (opset <= _OPSET_OF_ALL or opset <= newest_opset())


def supports_ir_version(version: int) -> bool:
    """Return whether models may have this version of the file format."""
    return version >= MINIMUM_IR_VERSION and (version <= _IR_VERSION_OF_ALL or version <= newest_ir_version())


def _newest(known: int, sure: int, opens: Callable[[int], bool]) -> int:
    return next((version for version in range(known, sure, -1) if opens(version)), sure)


def _opens(opset: int, ir_version: int) -> bool:
    import onnxruntime

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
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # its own classes have no common ancestor
        return False
    return True
