"""Facts about onnx-ir values: shapes, constants, the nodes that compute them; and the metadata keys of inputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir

Dimension = int | str | None
"""One axis: a size, a symbol (equal symbols are equal sizes), or nothing known."""

KV_CACHES = "onnxtrain.kv_caches"
"""Metadata key of an input: the names of the KV-cache inputs that were removed from the model."""


RIGHT_PADDED = "onnxtrain.right_padded"
"""Metadata key of an input: true for a mask that attention reduces to the number of its ones."""


DOCUMENTS = "onnxtrain.documents"
"""Metadata key of an input that keeps the documents of a packed row apart: ``"numbers"`` for a mask of their numbers,
``"begins"`` for positions, which are 0 where they begin."""


TABLE_ROWS = "onnxtrain.table_rows"
"""Metadata key of an input of token ids: the rows of the embedding table that the model looks them up in."""


COMMON = "onnxtrain.common"
"""Metadata key of an input of a fixed size that has one value for all examples, such as the settings of a voice."""


TIME_FIRST = "onnxtrain.time_first"
"""Metadata key of an input whose first axis is not that of examples: the node that steps along it as time, in words, or
an empty text for nodes of a graph, tokens of bags and layers of a state; and the batch axis."""


PIXELS = "onnxtrain.pixels"
"""Metadata key of an input of images of 0 to 255, which the model scales itself."""


def dimensions(value: ir.Value | None) -> tuple[Dimension, ...] | None:
    """The shape of an onnx-ir value as a tuple; ``None`` where its rank is unknown, or where there is no value."""
    if value is None or value.shape is None:
        return None
    return tuple([d if isinstance(d, int) else d.value for d in value.shape])


def have_one_shape(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Return whether two values are known to have the same shape."""
    shape = dimensions(one)
    return shape is not None and None not in shape and shape == dimensions(other)


def is_float(value: ir.Value) -> bool:
    """Return whether an onnx-ir value has a real floating element type."""
    return value.dtype in _FLOATING


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or of a Constant node's output; ``None`` for other values."""
    if value is None:
        return None
    node = value.producer()
    if value.const_value is None and node is not None and node.op_type == "Constant" and not node.domain:
        given = node.attributes.get("value")
        if given is not None and not given.is_ref():
            tensor: ir.TensorProtocol = given.value
            tensor.name = value.name  # as onnx-ir does
            return tensor
    return ir.convenience.get_const_tensor(value)


def producer_of(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a value, if there is one."""
    return None if value is None else value.producer()


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of a node; ``None`` where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Return the values of a node's attributes by name."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


Order = tuple[int, ...]
"""For each axis of a transposed value, the axis of the value."""


def order_of(transpose: ir.Node, rank: int) -> Order:
    """Return the order in which a Transpose puts the axes; by default it reverses them."""
    return tuple(transpose.attributes.get_ints("perm", range(rank)[::-1]))


def behind(value: ir.Value | None, operators: Collection[str]) -> ir.Value | None:
    """Return the value before any standard nodes of these operators, each of which passes its first input on."""
    while value is not None and (node := value.producer()) is not None:
        if node.domain or node.op_type not in operators:
            break
        value = node.inputs[0]
    return value


def made_by(value: ir.Value | None, operator: str, domain: str = "", *, alone: bool = False) -> ir.Node | None:
    """Return the node of an operator that computes a value; if ``alone``, only where one input of one node reads it."""
    node = producer_of(value)
    if value is None or node is None or node.op_type != operator or node.domain != domain:
        return None
    return None if alone and (len(value.uses()) != 1 or value.is_graph_output()) else node


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """The array of an initializer or of a Constant node's output; ``None`` for other values."""
    tensor = constant_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """The elements of a constant of integers as a list; ``None`` for other values."""
    array = constant_array(value)
    return None if array is None else [int(item) for item in array.flat]


def constant_number(value: ir.Value | None) -> float | None:
    """The number of a constant with one element; ``None`` for other values."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size != 1:
        return None
    return float(np.asarray(tensor.numpy()).reshape(()))


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a tensor to a graph under its own name; return its value."""
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The 16-bit floating types."""

_FLOATING = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES})
