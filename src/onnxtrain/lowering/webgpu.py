"""Make step graphs that ONNX Runtime's WebGPU provider runs: nothing in them is float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError

_DOUBLE, _FLOAT = ir.DataType.DOUBLE, ir.DataType.FLOAT


def fit_webgpu(model: ir.Model) -> None:
    """Fit a step graph to the WebGPU provider of onnxruntime-web 1.30, in place.

    What the provider does not claim to have runs on the processor by itself. Two things it claims and has not: MaxPool
    with the output Indices, which gradients of MaxPool read, and BatchNormalization in training mode.

    Requires: a graph without functions. Ensures: a graph without float64 that the provider runs.

    Raises:
        OptionError: The model itself is float64, or has one of the two.
    """
    for part in [model.graph, *model.graph.subgraphs()]:
        for node in part:
            what = _lacking(node)
            if what is not None:
                raise OptionError(
                    f"The node {node.name!r} is {what}, which ONNX Runtime's WebGPU provider has not; leave --portable "
                    "out, and train on the processor."
                )
    use_single_precision(model)


def _lacking(node: ir.Node) -> str | None:
    """What a node is, where the provider fails in it."""
    if node.domain:
        return None
    if node.op_type == "MaxPool" and len(node.outputs) > 1:
        return "the gradient of a MaxPool"
    training = node.attributes.get("training_mode")
    if node.op_type == "BatchNormalization" and training is not None and training.as_int() == 1:
        return "a BatchNormalization in training mode"
    return None


def use_single_precision(model: ir.Model) -> None:
    """Make every float64 of a step graph float32, in place.

    The bodies of optimizers compute in float64 what depends on learning rate and update count only. In float32 a step
    differs by some units of the last place of the update.

    Requires: a graph without functions. Ensures: a graph without float64.

    Raises:
        OptionError: The model itself is float64.
    """
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype == _DOUBLE:
            raise OptionError(
                f"{value.name!r} is float64, which WebGPU has not; convert the model to float32 before it is exported."
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
