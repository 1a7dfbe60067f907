"""Infer the types and shapes of a whole model by ONNX's own inference."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from onnxtrain.ir.bounded_inference import infer_within_bounds
from onnxtrain.ir.declared_shapes import (
    contradictions,
    correct_outputs,
    forget_anonymous_axes,
    forget_branch_shapes,
    forget_shapes,
    forget_symbols,
    forget_undefined_types,
    has_untrue_shapes,
)
from onnxtrain.ir.limits import check_depth, check_shapes
from onnxtrain.ir.microsoft_shapes import infer_microsoft_types
from onnxtrain.ir.symbols import needs_inference, resolve_symbols
from onnxtrain.ir.value import Dimension, dimensions

_INFERENCES: list[Callable[[ir.Node], bool]] = [infer_microsoft_types]
_NAMERS: list[Callable[[ir.Node], list[ir.Value]]] = []


def register_inference(infer: Callable[[ir.Node], bool], name_outputs: Callable[[ir.Node], list[ir.Value]]) -> None:
    """Add an inference of operators that ONNX does not know.

    Args:
        infer: Gives the outputs of a node types and shapes where it knows the operator; returns whether any of them
            was not known before.
        name_outputs: Names those outputs of a node for which ONNX's inference needs a name, and returns them; they
            lose the names afterwards.
    """
    _INFERENCES.append(infer)
    _NAMERS.append(name_outputs)


def infer_shapes(model: ir.Model) -> ir.Model:
    """Infer types and shapes of all values of a model, in place, as far as they can be inferred.

    Large tensors are not given to ONNX's inference, so that models beyond protobuf's limit of 2 GiB work. Functions
    registered with :func:`register_inference` infer the operators of the domain ``onnxtrain``, and
    :func:`infer_microsoft_types` those of Microsoft in language models.
    """
    forget_anonymous_axes(model.graph)
    forget_undefined_types(model.graph)
    skipped = [output for node in model.graph for name in _NAMERS for output in name(node)]
    try:
        _infer_consistently(model)
        while sum(infer(node) for node in model.graph for infer in _INFERENCES):  # those behind others come later
            _infer(model)
        if resolve_symbols(model.graph):
            if needs_inference(model.graph):
                _infer(model)
            resolve_symbols(model.graph)
        correct_outputs(model.graph)
    finally:
        for output in skipped:
            output.name = ""
    return model


def complete_shapes(model: ir.Model) -> ir.Model:
    """Infer types and shapes, in place, where a value of the main graph lacks them; in most graphs none does."""
    for node in model.graph:
        for output in node.outputs:
            known = output.shape is not None or not isinstance(output.type, ir.TensorType | None)
            if output.name and not known:
                return infer_shapes(model)
    return model


Shape = tuple[Dimension, ...]

Sizes = dict[str, set[int]]
"""The sizes of the axes that share a symbol."""


def _infer_consistently(model: ir.Model) -> None:
    """Infer; where declared shapes contradict each other, infer again without them."""
    untrue = {symbol for symbol, sizes in _infer(model).items() if len(sizes) > 1}
    if untrue:
        forget_symbols(model.graph, untrue)
        _infer(model)
    if forget_branch_shapes(model.graph):
        _infer(model)
    before, untrue_shapes = contradictions(model.graph), has_untrue_shapes(model.graph)
    if not before and not untrue_shapes:
        return
    removed = forget_shapes(model.graph)
    _infer(model)
    after = contradictions(model.graph)
    if after > before or (after == before and not untrue_shapes):  # that was not the reason
        for value, shape in removed.items():
            value.shape = shape


def _infer(model: ir.Model) -> Sizes:
    """Infer once; return the sizes that were found for the model's own symbols."""
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
    return _copy(graph, infer_within_bounds(proto).graph)


_SMALL = 1024
"""Bytes up to which the values of tensors take part in inference (shapes, axes, repeats)."""


def _copy(graph: ir.Graph, inferred: onnx.GraphProto) -> Sizes:
    sizes: Sizes = {}
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
                    value.shape = _better(known, shape, sizes)
    for node, other_node in zip(graph, inferred.node, strict=False):
        for attribute in other_node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH and attribute.name in node.attributes:
                for symbol, numbers in _copy(node.attributes[attribute.name].as_graph(), attribute.g).items():
                    sizes.setdefault(symbol, set()).update(numbers)
    return sizes


def _sizes(shape: onnx.TensorShapeProto) -> Shape:
    return tuple([size.dim_value if size.HasField("dim_value") else size.dim_param or None for size in shape.dim])


def _better(old: Shape | None, new: Shape, sizes: Sizes) -> ir.Shape:
    """Choose the better size per axis: a number, then a symbol of the model, then a new symbol."""
    if old is None or len(old) != len(new):
        return ir.Shape(new)
    for a, b in zip(old, new, strict=True):
        if isinstance(a, str) and isinstance(b, int):
            sizes.setdefault(a, set()).add(b)
    return ir.Shape([b if isinstance(b, int) or a is None else a for a, b in zip(old, new, strict=True)])
