"""Infer the types and shapes of a whole model: ONNX's own inference, what it leaves open, and sizes that follow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph.bounded_inference import infer_within_bounds
from onnxtrain.graph.clone import all_nodes, subgraphs
from onnxtrain.graph.declared_shapes import (
    all_values,
    believe_declared,
    forget_anonymous_axes,
    forget_shapes,
    forget_undefined_types,
)
from onnxtrain.graph.inference import Sizes, infer_microsoft_types, is_inferred, output_shape, shape_from_inputs
from onnxtrain.graph.limits import check_depth, check_shapes
from onnxtrain.graph.sizes import (
    Content,
    computed_content,
    constant_content,
    filled_in,
    is_made_up,
    is_open,
    is_plain,
    product,
    quotient,
)
from onnxtrain.graph.value import Dimension, add_initializer, dimensions, is_float

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
    if _resolve_symbols(model.graph):
        if _needs_inference(model.graph):
            _infer(model)
        _resolve_symbols(model.graph)


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
        del graph.inputs[inputs:]
        for value, tensor in hidden:
            value.const_value = tensor
            graph.register_initializer(value)
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


# Exporters compute shapes in the graph: the shape of one tensor, taken apart and joined again, reshapes another. ONNX's
# inference follows that in part and gives every size that it cannot determine a new symbol, even where it is plainly
# the batch size again. Each such symbol costs gradients a computation of the axes along which something was broadcast.


def _resolve_symbols(graph: ir.Graph) -> bool:
    """Replace made-up symbols by the sizes or symbols that they are equal to, in place.

    Requires: a sorted graph whose shapes ONNX has inferred. Ensures: shapes are the same or more specific.
    """
    resolver = _Resolver()
    for node in graph:
        resolver.visit(node)
    if resolver.found:
        resolver.write(graph)
    return bool(resolver.found)


def _needs_inference(graph: ir.Graph) -> bool:
    """Return whether ONNX may infer further unknown sizes, now that others are known.

    It cannot if each unknown shape belongs to an operator that Python infers, too; these shapes are filled in.

    Requires: a graph whose symbols are resolved.
    """
    for node in graph:
        if subgraphs(node):
            return True
        open_ones = [output for output in node.outputs if output.name and is_open(dimensions(output))]
        if open_ones and (node.domain or not is_inferred(node.op_type)):
            return True
        for output in open_ones:
            _fill_in(output, shape_from_inputs(output))
    return False


def _fill_in(value: ir.Value, shape: Sizes) -> None:
    sizes = filled_in(dimensions(value), shape)
    value.shape = None if sizes is None else ir.Shape(sizes)


class _Resolver:
    """Propagate sizes through a graph."""

    divides_symbols = True

    def __init__(self) -> None:
        self.found: dict[str, int | str] = {}
        self._contents: dict[ir.Value, Content | None] = {}

    def shape(self, value: ir.Value | None) -> Sizes:
        """The shape of a value by all that is known so far."""
        known = dimensions(value)
        return None if known is None else tuple(self._resolved(size) for size in known)

    def _resolved(self, size: Dimension) -> Dimension:
        while isinstance(size, str) and size in self.found:
            size = self.found[size]
        return size

    def content(self, value: ir.Value | None) -> Sizes:
        """The elements of an integer tensor of rank 0 or 1; ``None`` for other tensors or where nothing is known."""
        known = self._elements(value)
        return None if known is None else tuple(known.flat)

    def _elements(self, value: ir.Value | None) -> Content | None:
        if value is None or is_float(value):
            return None
        if value not in self._contents:
            self._contents[value] = constant_content(value)
        known = self._contents[value]
        if known is None or not self.found:
            return known
        return np.asarray(np.frompyfunc(self._resolved, 1, 1)(known), object)

    def visit(self, node: ir.Node) -> None:
        """Follow sizes through one node."""
        if node.domain or not node.outputs:
            return
        output = node.outputs[0]
        if output.shape is None or len(output.shape) <= 1:
            found = computed_content(node, self._elements, self.shape)
            if found is not None:
                self._contents[output] = self._without_products(node, found)
        old = dimensions(output)
        new = output_shape(node, self) if is_open(old) else None
        if new is None or output.type is None:  # only shapes with a type are written
            return
        for before, now in zip(map(self._resolved, old or ()), new, strict=False):
            if now is not None and now != before and isinstance(before, str) and is_made_up(before):
                self.found[before] = now
        if old is None or None in old:
            _fill_in(output, new)

    def _without_products(self, node: ir.Node, found: Content) -> Content:
        """Forget products of symbols: an axis gets a number or a symbol of the model."""
        if node.op_type not in ("Mul", "Div"):
            return found
        known = {size for value in node.inputs for size in self.content(value) or ()}
        sizes = [size if isinstance(size, int) or size in known else None for size in found.flat]
        return np.array(sizes, object).reshape(found.shape)

    def write(self, graph: ir.Graph) -> None:
        """Replace the resolved symbols in all shapes."""
        for output in [output for node in all_nodes(graph) for output in node.outputs]:
            old = dimensions(output)
            if old is not None and any(isinstance(size, str) and size in self.found for size in old):
                output.shape = ir.Shape(tuple(self._resolved(size) for size in old))


# Sizes that follow from known shapes

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
