"""Types and shapes of a whole model, by ONNX's own inference."""

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
)
from onnxtrain.ir.limits import check_shapes
from onnxtrain.ir.nesting import check_depth
from onnxtrain.ir.symbols import needs_inference, resolve_symbols
from onnxtrain.ir.value import Dimension, dimensions
from onnxtrain.workarounds.inference import hide_computed_slices, is_taken_for_scalar

_INFERENCES: list[Callable[[ir.Node], bool]] = []
_NAMERS: list[Callable[[ir.Node], list[ir.Value]]] = []


def register_inference(infer: Callable[[ir.Node], bool], name_outputs: Callable[[ir.Node], list[ir.Value]]) -> None:
    """Teach the inference operators that ONNX does not know.

    Args:
        infer: Gives the outputs of a node types and shapes where it knows the operator; returns whether that told
            anything new.
        name_outputs: Names the outputs of a node that have no name, where ONNX's inference needs one, and returns
            them; they lose it afterwards.
    """
    _INFERENCES.append(infer)
    _NAMERS.append(name_outputs)


def infer_shapes(model: ir.Model) -> ir.Model:
    """Fill in types and shapes of all values of a model, in place; what cannot be found stays unknown.

    Big tensors are left out of what ONNX sees, so that models beyond protobuf's 2 GiB pass. ONNX knows nothing
    of the operators in this project's own domain: those are inferred by what
    :func:`register_inference` was given.
    """
    forget_anonymous_axes(model.graph)
    forget_undefined_types(model.graph)
    skipped = [output for node in model.graph for name in _NAMERS for output in name(node)]
    try:
        _infer_consistently(model)
        learned = [infer(node) for node in model.graph for infer in _INFERENCES]
        if any(learned):
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
    """Infer types and shapes where the main graph has a value without them, in place; most graphs have none."""
    for node in model.graph:
        for output in node.outputs:
            known = output.shape is not None or not isinstance(output.type, ir.TensorType | None)
            if output.name and not known:
                return infer_shapes(model)
    return model


Shape = tuple[Dimension, ...]

Sizes = dict[str, set[int]]
"""The sizes that axes of one symbol have."""


def _infer_consistently(model: ir.Model) -> None:
    """Where declared shapes contradict each other, infer again without them."""
    untrue = {symbol for symbol, sizes in _infer(model).items() if len(sizes) > 1}
    if untrue:
        forget_symbols(model.graph, untrue)
        _infer(model)
    if forget_branch_shapes(model.graph):
        _infer(model)
    before = contradictions(model.graph)
    if not before:
        return
    removed = forget_shapes(model.graph)
    _infer(model)
    if contradictions(model.graph) >= before:  # that was not the reason
        for value, shape in removed.items():
            value.shape = shape


def _infer(model: ir.Model) -> Sizes:
    """Infer once; returns the sizes that were found for symbols that the model gives."""
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
    hide_computed_slices(proto.graph)
    return _copy(graph, infer_within_bounds(proto).graph)


_SMALL = 1024
"""Bytes; tensors up to this size take part in inference by their values (shapes, axes, repeats)."""


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
            if tensor.HasField("shape") and not is_taken_for_scalar(node, tensor):
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
    """Per axis what says more: a size, then a symbol that the model itself gave, then a new symbol."""
    if old is None or len(old) != len(new):
        return ir.Shape(new)
    for a, b in zip(old, new, strict=True):
        if isinstance(a, str) and isinstance(b, int):
            sizes.setdefault(a, set()).add(b)
    return ir.Shape([b if isinstance(b, int) or a is None else a for a, b in zip(old, new, strict=True)])
