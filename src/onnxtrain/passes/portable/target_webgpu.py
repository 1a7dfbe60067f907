"""Fit step graphs to ONNX Runtime's WebGPU provider: nothing in them is float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.replace import remove_nodes, take_over
from onnxtrain.passes.portable.webgpu_convolutions import mend_convolutions

_DOUBLE, _FLOAT = ir.DataType.DOUBLE, ir.DataType.FLOAT


def target_webgpu(model: ir.Model) -> None:
    """Fit a step graph to the WebGPU provider of onnxruntime-web 1.30, in place.

    ONNX Runtime runs operators on the CPU that the provider does not list. The provider lists, but does not support,
    BatchNormalization in training mode, which this pass writes in other operators, and MaxPool's output Indices, which
    gradients of MaxPool read if image sizes are unknown. It computes some convolutions wrongly; this pass replaces them
    by others. (workarounds: statistics on WebGPU, indices on WebGPU, convolutions on WebGPU)

    Requires: a graph without functions. Ensures: a graph without float64 that the provider runs.

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
        _normalize_by_hand(part, model.graph.opset_imports[""])
        mend_convolutions(part, model.graph.opset_imports[""])
    _use_single_precision(model)


def _normalize_by_hand(graph: ir.Graph, opset: int) -> None:
    """Write BatchNormalization in training mode in other operators, in place."""
    for node in list(graph):
        mode = node.attributes.get("training_mode")
        if node.domain or node.op_type != "BatchNormalization" or mode is None or mode.as_int() != 1:
            continue
        op = Builder(graph, opset, before=node)
        op.scope = node.name or "batch_norm"
        x, scale, bias, mean, variance = (op.wrap(value) for value in node.inputs if value is not None)
        given = {name: attribute.as_float() for name, attribute in node.attributes.items() if name != "training_mode"}
        epsilon, momentum = given.get("epsilon", 1e-5), given.get("momentum", 0.9)
        if x.rank is None:
            raise OptionError(f"The rank of {x.ir.name!r} is not known; declare its shape in the model.")
        column = op.ints(*range(1, x.rank - 1))

        def per_channel(value: Value, op: Builder = op, column: Value = column, rank: int = x.rank) -> Value:
            return op.Unsqueeze(value, column) if rank > 2 else value

        over = op.ints(0, *range(2, x.rank))
        centred = x - (batch_mean := op.ReduceMean(x, over, keepdims=1))
        batch_variance = op.ReduceMean(centred * centred, over, keepdims=1)
        y = centred * (per_channel(scale) * op.Reciprocal(op.Sqrt(batch_variance + epsilon))) + per_channel(bias)
        new = [y]
        for running, own in ((mean, batch_mean), (variance, batch_variance)):
            new.append(running * momentum + op.Reshape(own, op.ints(-1)) * (1 - momentum))
        pairs = zip(node.outputs, new, strict=False)
        take_over(graph, {old: made.ir for old, made in pairs if old.name})
        remove_nodes(graph, [node])


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
