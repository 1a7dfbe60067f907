"""A model in the form required by onnxsim 0.8.1: opset 17, static shapes, the loss as an output."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


def with_loss(model: onnx.ModelProto, batch: int, classes: int, parameters: Sequence[str]) -> onnx.ModelProto:
    """Simplify the model at a fixed batch size and add softmax cross-entropy with the input ``one_hot``.

    Args:
        model: The exported model, whose first axis is the batch.
        batch: Examples per step.
        classes: The number of logits.
        parameters: Trained initializers, which must not be folded.

    Raises:
        ValueError: A node needs opset 18.
    """
    import onnxsim

    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    del fixed.graph.value_info[:]
    # While they are inputs, parameters are not folded into constants. Merging batch normalization into
    # convolutions would train another model.
    initializers = fixed.graph.initializer
    trained = [tensor for tensor in initializers if tensor.name in parameters]
    others = [tensor for tensor in initializers if tensor.name not in parameters]
    count = len(fixed.graph.input)
    fixed.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in trained)
    del initializers[:]
    initializers.extend(others)
    simplified, _ = onnxsim.simplify(fixed, skip_fuse_bn=True)
    del simplified.graph.input[count:]
    simplified.graph.initializer.extend(trained)
    _lower_opset(simplified)
    _flatten_by_reshape(simplified, batch)
    graph = simplified.graph
    logits = graph.output[0].name
    graph.input.append(helper.make_tensor_value_info("one_hot", TensorProto.FLOAT, [batch, classes]))
    graph.initializer.append(helper.make_tensor("loss_axis", TensorProto.INT64, [1], [1]))
    graph.node.extend(
        [
            helper.make_node("Softmax", [logits], ["loss_probabilities"], axis=1),
            helper.make_node("Log", ["loss_probabilities"], ["loss_logarithms"]),
            helper.make_node("Mul", ["loss_logarithms", "one_hot"], ["loss_terms"]),
            helper.make_node("ReduceSum", ["loss_terms", "loss_axis"], ["loss_examples"], keepdims=0),
            helper.make_node("ReduceMean", ["loss_examples"], ["loss_mean"], keepdims=0, axes=[0]),
            helper.make_node("Neg", ["loss_mean"], ["loss"]),
        ]
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    return simplified


def _lower_opset(model: onnx.ModelProto) -> None:
    """Convert opset 18 to 17 in place: axes of reductions become attributes."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if onnx.defs.get_schema(node.op_type, 18).since_version < 18:
            continue
        if not node.op_type.startswith("Reduce"):
            raise ValueError(f"{node.op_type} of opset 18 cannot be written at opset {OPSET}")
        if len(node.input) > 1:
            node.attribute.append(helper.make_attribute("axes", numpy_helper.to_array(tensors[node.input[1]]).tolist()))
            del node.input[1:]
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = OPSET


def _flatten_by_reshape(model: onnx.ModelProto, batch: int) -> None:
    """Replace Flatten(axis=1), which onnxsim does not differentiate, by the equivalent Reshape at a fixed batch."""
    model.graph.initializer.append(helper.make_tensor("flat_shape", TensorProto.INT64, [2], [batch, -1]))
    for node in model.graph.node:
        if node.op_type == "Flatten" and all(a.i == 1 for a in node.attribute if a.name == "axis"):
            node.op_type = "Reshape"
            del node.attribute[:]
            node.input.append("flat_shape")
