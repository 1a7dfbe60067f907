"""Put a working copy into training mode: batch normalization and dropout. The user's file stays as it is."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.builder import Builder


def batch_norm_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The BatchNormalization nodes that run on fixed statistics."""
    return [
        node for node in graph if node.op_type == "BatchNormalization" and not node.domain and not _is_training(node)
    ]


def _is_training(node: ir.Node) -> bool:
    mode = node.attributes.get("training_mode")
    return mode is not None and mode.as_int() == 1


def train_batch_norm(model: ir.Model) -> dict[str, str]:
    """Let batch normalization use the statistics of the batch and update the running ones, in place.

    Returns:
        The initializers of running statistics, to the names of the values that replace them after a step.

    Raises:
        OptionError: Running statistics are not initializers, or several nodes share them.
    """
    nodes = [node for node in model.graph if node.op_type == "BatchNormalization" and not node.domain]
    statistics: dict[str, str] = {}
    for node in nodes:
        if not _is_training(node):
            node.attributes.add(ir.AttrInt64("training_mode", 1))
            node.resize_outputs(3)
        for position, (index, kind) in enumerate(((3, "mean"), (4, "var")), start=1):
            source = _source(node.inputs[index])
            if source is None or not source.is_initializer() or not source.name:
                raise OptionError(
                    f"batch_norm='train' needs the running {kind} of {node.name!r} as an initializer; it is computed."
                )
            if source.name in statistics:
                raise OptionError(
                    f"batch_norm='train': several BatchNormalization nodes share the running {kind} {source.name!r} "
                    "(exporters merge equal initializers); untie=True gives each its own."
                )
            output = node.outputs[position]
            if not output.name:
                output.name = f"{source.name}_running"
            output.type, output.shape = source.type, source.shape
            statistics[source.name] = output.name
    return statistics


def _source(value: ir.Value | None) -> ir.Value | None:
    """The value behind Identity nodes."""
    while value is not None:
        producer = value.producer()
        if producer is None or producer.op_type != "Identity":
            return value
        value = producer.inputs[0]
    return None


def train_dropout(model: ir.Model, seed: int) -> int:
    """Let Dropout nodes drop, in place, each with a seed of its own; returns how many there are."""
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "Dropout" and not node.domain]
    op = Builder(graph, model.opset_imports[""])
    true = op.constant(True).ir if nodes else None
    for position, node in enumerate(nodes):
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        node.replace_input_with(2, true)
        # onnxruntime takes a 64-bit seed; consecutive nodes must not draw the same masks.
        node.attributes.add(ir.AttrInt64("seed", (seed * 1_000_003 + position) % (1 << 62)))
    return len(nodes)
