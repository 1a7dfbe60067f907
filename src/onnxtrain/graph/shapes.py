"""Infer the types and shapes of a whole model by ONNX's own inference; fold the sizes that follow from them."""

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
from onnxtrain.graph.sizes import (
    Content,
    computed_content,
    constant_content,
    is_made_up,
    is_open,
    is_plain,
    product,
    quotient,
)
from onnxtrain.graph.symbols import needs_inference, resolve_symbols
from onnxtrain.graph.value import Dimension, add_initializer, dimensions

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


_ROUNDS = 8
"""Times that shapes are inferred again with sizes that reshapes have taught."""


def fold_sizes(model: ir.Model) -> dict[ir.Value, Content]:
    """Replace small integer tensors that follow from known shapes by constants, in place."""
    known: dict[ir.Value, Content] = {}
    for _ in range(_ROUNDS):
        if not _fold(model.graph, known):
            break
        infer_again(model)
        known.clear()
    return known


def infer_again(model: ir.Model) -> None:
    """Infer the sizes that inference did not find before, in place."""
    for value in [output for node in model.graph for output in node.outputs]:
        sizes = dimensions(value)
        if sizes is not None and any(map(is_made_up, sizes)):
            value.shape = ir.Shape([None if is_made_up(size) else size for size in sizes])
    infer_shapes(model)


def _fold(graph: ir.Graph, known: dict[ir.Value, Content]) -> bool:
    """Fold once; return whether a reshape taught a size from which others may follow."""

    def content(value: ir.Value | None) -> Content | None:
        return known[value] if value in known else constant_content(value)

    def shape(value: ir.Value | None) -> Shape | None:
        sizes = dimensions(value)
        return None if sizes is None else tuple(size if is_plain(size) else None for size in sizes)

    learned = False
    for node in list(graph):
        if node.domain or len(node.outputs) != 1:
            continue
        learned = _learn_reshaped(node, content) or learned
        (output,) = node.outputs
        constant = node.op_type == "Constant"
        found = constant_content(output) if constant else computed_content(node, content, shape)
        if found is None:
            continue
        known[output] = found
        if constant or output.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or output.is_graph_output():
            continue
        if len(dimensions(output) or ()) == found.ndim and all(isinstance(item, int) for item in found.flat):
            name = f"{output.name}/known"
            while name in graph.initializers:
                name += "'"
            value = add_initializer(graph, ir.tensor(found.astype(output.dtype.numpy()), name=name))
            output.replace_all_uses_with(value)
            known[value] = found
    return learned


def _learn_reshaped(node: ir.Node, content: Callable[[ir.Value | None], Content | None]) -> bool:
    """Give the output of a reshape the sizes that its target holds; return whether any was not known."""
    if node.op_type != "Reshape" or "allowzero" in node.attributes:
        return False
    before, after, target = dimensions(node.inputs[0]), dimensions(node.outputs[0]), content(node.inputs[1])
    if before is None or after is None or target is None or len(target) != len(after):
        return False
    open_axes = {axis for axis, size in enumerate(after) if size is None or is_made_up(size)}
    found = list(after)
    for axis in open_axes:
        found[axis] = before[axis] if target[axis] == 0 else None if target[axis] == -1 else target[axis]
    if found.count(None) == 1:
        found[found.index(None)] = quotient(product(before), product([size or 1 for size in found]))
    for axis in open_axes:
        if found[axis] is None or is_made_up(found[axis]):
            found[axis] = after[axis]
    if found == list(after):
        return False
    node.outputs[0].shape = ir.Shape(found)
    return True
