"""Infer the types and shapes of a whole model by ONNX's own inference."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from onnxtrain.graph.bounded_inference import infer_within_bounds
from onnxtrain.graph.declared_shapes import (
    all_values,
    believe_declared,
    forget_anonymous_axes,
    forget_shapes,
    forget_undefined_types,
)
from onnxtrain.graph.inference import infer_microsoft_types
from onnxtrain.graph.limits import check_depth, check_shapes
from onnxtrain.graph.symbols import is_open, needs_inference, resolve_symbols
from onnxtrain.graph.value import Dimension, dimensions

_INFERENCES: list[Callable[[ir.Node], bool]] = [infer_microsoft_types]
_NAMERS: list[Callable[[ir.Node], list[ir.Value]]] = []


def register_inference(infer: Callable[[ir.Node], bool], name_outputs: Callable[[ir.Node], list[ir.Value]]) -> None:
    """Add an inference of operators that ONNX does not know."""
    _INFERENCES.append(infer)
    _NAMERS.append(name_outputs)


def infer_shapes(model: ir.Model) -> ir.Model:
    """Infer types and shapes of all values of a model, in place, as far as they can be inferred.

    Large tensors are not given to ONNX's inference, so that models beyond protobuf's limit of 2 GiB work. Functions
    registered with :func:`register_inference` infer the operators of the domain ``onnxtrain``, and
    :func:`infer_microsoft_types` those of Microsoft in language models.
    """
    graph = model.graph
    check_shapes(graph)
    forget_anonymous_axes(graph)
    forget_undefined_types(graph)
    skipped = [output for node in graph for name in _NAMERS for output in name(node)]
    try:
        declared = {} if _INFERRED in graph.meta else forget_shapes(graph, ranks=False)
        _infer_all(model)
        if believe_declared(graph, declared) and any(
            is_open(dimensions(value)) for value in all_values(graph) if value.producer()
        ):
            _infer_all(model)
        graph.meta[_INFERRED] = True
    finally:
        for output in skipped:
            output.name = ""
    return model


_INFERRED = "onnxtrain.inferred"
"""Key of graphs whose shapes follow from their nodes: those of other graphs are what a file declares."""


def _infer_all(model: ir.Model) -> None:
    _infer(model)
    while sum(infer(node) for node in model.graph for infer in _INFERENCES):  # those behind others come later
        _infer(model)
    if resolve_symbols(model.graph):
        if needs_inference(model.graph):
            _infer(model)
        resolve_symbols(model.graph)


def complete_shapes(model: ir.Model) -> ir.Model:
    """Infer types and shapes, in place, where a value of the main graph lacks them; in most graphs none does."""
    for node in model.graph:
        for output in node.outputs:
            known = output.shape is not None or not isinstance(output.type, ir.TensorType | None)
            if output.name and not known:
                return infer_shapes(model)
    return model


Shape = tuple[Dimension, ...]


def _infer(model: ir.Model) -> None:
    graph = model.graph
    check_depth(graph)
    check_shapes(graph)
    inputs = len(graph.inputs)
    hidden: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > _SMALL:
            value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
            hidden.append((value, tensor))
            graph.initializers.pop(value.name)  # type: ignore[arg-type]
            value.const_value = None
            if value not in graph.inputs:
                graph.inputs.append(value)
    try:
        proto = ir.serde.serialize_model(model)
    finally:
        added = graph.inputs[inputs:]
        del graph.inputs[inputs:]
        for value, tensor in hidden:
            value.const_value = tensor
            graph.register_initializer(value)
        del added
    _copy(graph, infer_within_bounds(proto).graph)


_SMALL = 1024
"""Bytes up to which the values of tensors take part in inference (shapes, axes, repeats)."""


def _copy(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    found = {info.name: info.type for info in (*inferred.value_info, *inferred.output)}
    for node in graph:
        for value in node.outputs:
            other = found.get(value.name or "")
            if other is None:
                continue
            if value.type is None:
                value.type = ir.serde.deserialize_type_proto_for_type(other)
            tensor = other.tensor_type
            scalar = node.op_type == "Attention" and not tensor.shape.dim  # (workarounds: the matrix of Attention)
            if tensor.HasField("shape") and not scalar:
                shape = _sizes(tensor.shape)
                if shape != (known := dimensions(value)):
                    value.shape = _better(known, shape)
    for node, other_node in zip(graph, inferred.node, strict=False):
        for attribute in other_node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH and attribute.name in node.attributes:
                _copy(node.attributes[attribute.name].as_graph(), attribute.g)


def _sizes(shape: onnx.TensorShapeProto) -> Shape:
    return tuple([size.dim_value if size.HasField("dim_value") else size.dim_param or None for size in shape.dim])


def _better(old: Shape | None, new: Shape) -> ir.Shape:
    """Choose the better size per axis: a number, then a symbol of the model, then a new symbol."""
    if old is None or len(old) != len(new):
        return ir.Shape(new)
    return ir.Shape([b if isinstance(b, int) or a is None else a for a, b in zip(old, new, strict=True)])
