"""The input of a loss: an output of the model, or the logits before its final activation."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.ir.value import is_float
from onnxtrain.losses.base import Loss, class_axis


def named_output(graph: ir.Graph, name: str | None) -> ir.Value:
    """The output that the loss is for: the one of that name, by default the first floating one.

    Raises:
        OptionError: There is none.
    """
    outputs = list(graph.outputs)
    if name is not None:
        found = [value for value in outputs if value.name == name]
        if not found:
            raise OptionError(f"output={name!r}, but the outputs are {', '.join(str(v.name) for v in outputs)}.")
    else:
        found = [value for value in outputs if is_float_tensor(value)]
    if not found or not is_float_tensor(found[0]):
        raise OptionError("The model has no floating output to build a loss on; name one with output=.")
    return found[0]


def is_float_tensor(value: ir.Value) -> bool:
    """Return whether a value is a floating tensor: neither a sequence of them nor an optional one."""
    return is_float(value) and not isinstance(value.type, ir.SequenceType | ir.OptionalType)


def sums_to_one(value: ir.Value) -> bool:
    """Whether a classifier's output is built as probabilities: (1 - p, p), or normalized."""
    producer = value.producer()
    while producer is not None and producer.op_type in ("Identity", "Cast", "Reshape"):
        source = producer.inputs[0]
        producer = None if source is None else source.producer()
    return producer is not None and producer.op_type in ("Concat", "Normalizer", "Div")


def before_activation(value: ir.Value, loss: Loss) -> tuple[ir.Value, int | None]:
    """Return the logits before a final activation that the loss contains, and that activation's class axis."""
    producer = value.producer()
    if producer is None or not producer.inputs or producer.inputs[0] is None or producer.domain:
        return value, None
    source = producer.inputs[0]
    if producer.op_type == "Identity" or (producer.op_type == "Cast" and source.dtype == value.dtype):
        inner, axis = before_activation(source, loss)
        return (value, None) if inner is source else (inner, axis)
    if producer.op_type not in loss.trains_through:
        return value, None
    if producer.op_type not in ("Softmax", "LogSoftmax"):
        return source, None
    if source.shape is None:
        return value, None
    rank = len(source.shape)
    axis = (producer.attributes["axis"].as_int() if "axis" in producer.attributes else -1) % rank
    wanted = getattr(loss, "axis", class_axis(rank))  # None where the loss leaves it open
    if axis == 0 or (wanted is not None and wanted % rank != axis):
        return value, None
    return source, axis
