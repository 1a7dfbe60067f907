"""Fit step graphs to ONNX Runtime's WebGPU provider: nothing in them is float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.lowering.portable.webgpu_convolutions import mend_convolutions

_DOUBLE, _FLOAT = ir.DataType.DOUBLE, ir.DataType.FLOAT


def target_webgpu(model: ir.Model) -> None:
    """Fit a step graph to the WebGPU provider of onnxruntime-web 1.30, in place.

    ONNX Runtime runs operators on the CPU that the provider does not list. The provider lists, but does not support,
    MaxPool's output Indices, which gradients of MaxPool read if image sizes are unknown. It computes some convolutions
    wrongly; this pass replaces them by others. (workarounds: indices on WebGPU, convolutions on WebGPU)

    Requires: a graph without functions, and without batch normalization in training mode. Ensures: a graph without
    float64 that the provider runs.

    Raises:
        OptionError: The model itself is float64, or it needs those indices.
    """
    if any(value.dtype == ir.DataType.BFLOAT16 for value in model.graph.inputs):
        raise OptionError(
            "The optimizer's states, or weights, are bfloat16, which ONNX Runtime's WebGPU provider lacks; "
            "leave precision out."
        )
    for part in [model.graph, *model.graph.subgraphs()]:
        for node in part:
            if not node.domain and node.op_type == "MaxPool" and len(node.outputs) > 1:
                raise OptionError(
                    f"The node {node.name!r} needs MaxPool's output Indices, which ONNX Runtime's WebGPU provider "
                    "lacks: its images have no fixed size, or the model reads the indices. Fix the size (export "
                    "--static height=28), or leave --portable out, and train on the CPU."
                )
        assert isinstance(part, ir.Graph)
        mend_convolutions(part, model.graph.opset_imports[""])
    _use_single_precision(model)


def _use_single_precision(model: ir.Model) -> None:
    """Make every float64 of a step graph float32, in place.

    The bodies of optimizers compute in float64 only the values that depend on learning rate and update count. In
    float32 a step differs by some units in the last place of the update.

    Requires: a graph without functions. Ensures: a graph without float64.

    Raises:
        OptionError: The model itself is float64.
    """
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype == _DOUBLE:
            raise OptionError(
                f"{value.name!r} is float64, which WebGPU lacks; convert the model to float32 before it is exported."
            )
    for part in [graph, *graph.subgraphs()]:
        for value in part.initializers.values():
            if value.const_value is not None and value.const_value.dtype == _DOUBLE:
                value.const_value = _narrow(value.const_value)
                _retype(value)
        for node in part:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _DOUBLE:
                    node.attributes[name] = ir.AttrTensor(name, _narrow(attribute.as_tensor()))
            if node.op_type == "Cast" and not node.domain and node.attributes["to"].as_int() == _DOUBLE:
                node.attributes["to"] = ir.AttrInt64("to", int(_FLOAT))
            for output in node.outputs:
                _retype(output)


def _narrow(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _retype(value: ir.Value) -> None:
    if value.dtype == _DOUBLE:
        value.type = ir.TensorType(_FLOAT)
