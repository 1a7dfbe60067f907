"""Types and shapes of a whole model, by ONNX's own inference."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.graph.declared import contradictions, forget_shapes
from onnxtrain.graph.symbols import resolve_symbols


def infer_shapes(model: ir.Model) -> ir.Model:
    """Fill in types and shapes of all values of a model, in place; what cannot be found stays unknown.

    Big tensors are left out of what ONNX sees, so that models beyond protobuf's 2 GiB pass. ONNX knows nothing
    of the operators in this project's own domain: optimizers are inferred here.
    """
    from onnxtrain.operators.lowering import infer_optimizer_types, name_skipped_outputs  # built on this package

    skipped = [output for node in model.graph for output in name_skipped_outputs(node)]
    try:
        _infer_consistently(model)
        learned = [infer_optimizer_types(node) for node in model.graph]
        if any(learned):
            _infer(model)
        resolve_symbols(model.graph)
    finally:
        for output in skipped:
            output.name = ""
    return model


def _infer_consistently(model: ir.Model) -> None:
    """Where declared shapes contradict each other, infer again without them."""
    _infer(model)
    before = contradictions(model.graph)
    if not before:
        return
    removed = forget_shapes(model.graph)
    _infer(model)
    if contradictions(model.graph) >= before:  # that was not the reason
        for value, shape in removed.items():
            value.shape = shape


def _infer(model: ir.Model) -> None:
    graph = model.graph
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
    _hide_computed_slices(proto.graph)
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    _copy(graph, inferred.graph)


def _hide_computed_slices(graph: onnx.GraphProto) -> None:
    """Keep ONNX's data propagation from Slice nodes whose bounds are computed, in place.

    It takes bounds that it does not know for absent ones, and so the whole input for the result: shapes that
    are made of such slices come out wrong (seen in 1.23). Compress has the same types and no propagation.
    """
    known = {tensor.name for tensor in graph.initializer}
    known |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    # What is propagated has one axis and holds sizes; its rank may not be declared yet.
    integers: set[str] = set()
    for node in graph.node:
        read = node.input[:1] if node.op_type == "Slice" else node.input  # bounds are sizes of whatever is sliced
        if node.op_type == "Shape" or (node.op_type in _OF_SIZES and any(name in integers for name in read)):
            integers.add(node.output[0])
    ranks = {info.name: len(info.type.tensor_type.shape.dim) for info in (*graph.value_info, *graph.input)}
    ranks.update((tensor.name, len(tensor.dims)) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Slice" and any(name and name not in known for name in node.input[1:]):
            if ranks.get(node.input[0]) != 1 and node.input[0] not in integers:
                continue
            condition = node.input[1]
            del node.input[1:]
            node.input.append(condition)
            node.op_type = "Compress"
            node.attribute.append(onnx.helper.make_attribute("axis", 0))


_OF_SIZES = frozenset({"Concat", "Cast", "Identity", "Slice", "Add", "Sub", "Mul", "Div", "Max", "Min", "Neg"})

_SMALL = 1024
"""Bytes; tensors up to this size take part in inference by their values (shapes, axes, repeats)."""


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
            if tensor.HasField("shape") and not (node.op_type == "Attention" and not tensor.shape.dim):
                # ONNX takes the matrix of an Attention of unknown shapes for a scalar.
                value.shape = _better(value.shape, ir.serde.deserialize_type_proto_for_shape(other))
    for node, other_node in zip(graph, inferred.node, strict=False):
        for attribute in other_node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH and attribute.name in node.attributes:
                _copy(node.attributes[attribute.name].as_graph(), attribute.g)


def _better(old: ir.Shape | None, new: ir.Shape | None) -> ir.Shape | None:
    """Per axis what says more: a size, then a symbol that the model itself gave, then a new symbol."""
    if old is None or new is None or len(old) != len(new):
        return old if new is None else new
    chosen = [
        b if isinstance(b, int) or (not isinstance(a, int) and a.value is None) else a
        for a, b in zip(old, new, strict=True)
    ]
    return ir.Shape(chosen)
