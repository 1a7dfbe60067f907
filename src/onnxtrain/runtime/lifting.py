"""Where the tensors of a working graph are: initializers, constants, attributes, in subgraphs and functions too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def lift_large_constants(model: ir.Model, is_large: Callable[[ir.TensorProtocol], bool]) -> None:
    """Make large constants, and large initializers of subgraphs, initializers of the main graph, in place.

    A subgraph sees what surrounds it, so that the graph computes the same. What a subgraph returns as it is stays
    where it is, and so do the constants of functions.

    Args:
        model: The working graph.
        is_large: Which tensors to lift.
    """
    lifted = [
        (value, tensor)
        for value, tensor in _constants(model.graph)
        if is_large(tensor) and not value.is_graph_output() and not value.is_graph_input()
    ]
    names = _names(model.graph) if lifted else set()
    for value, tensor in lifted:
        name = str(value.name)
        while name in names:
            name += "_"
        names.add(name)
        new = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
        new.const_value = tensor
        ir.convenience.replace_all_uses_with(value, new)
        node = value.producer()
        if node is not None and node.graph is not None:
            node.graph.remove(node, safe=True)
        elif value.graph is not None:
            value.graph.initializers.pop(str(value.name))
        model.graph.register_initializer(new)


def replace_tensors(model: ir.Model, replace: Callable[[ir.TensorProtocol], ir.TensorProtocol]) -> None:
    """Replace tensors wherever they are, in place.

    Args:
        model: The working graph.
        replace: Gives the new tensor, or the same.
    """
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        _replace_initializers(graph, replace)
        for node in ir.traversal.RecursiveGraphIterator(graph):
            for name, attribute in list(node.attributes.items()):
                if attribute.is_ref():
                    continue
                if attribute.type == ir.AttributeType.TENSOR:
                    if (new := replace(attribute.as_tensor())) is not attribute.value:
                        node.attributes[name] = ir.AttrTensor(name, new)
                elif attribute.type == ir.AttributeType.TENSORS:
                    node.attributes[name] = ir.AttrTensors(name, [replace(tensor) for tensor in attribute.as_tensors()])
                for subgraph in _subgraphs(attribute):
                    _replace_initializers(subgraph, replace)


def _replace_initializers(graph: ir.Graph, replace: Callable[[ir.TensorProtocol], ir.TensorProtocol]) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.const_value = replace(value.const_value)


def _constants(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """The results of Constant nodes, and the initializers of subgraphs."""
    for node in ir.traversal.RecursiveGraphIterator(graph):
        attribute = node.attributes.get("value") if (node.domain, node.op_type) == ("", "Constant") else None
        if attribute is not None and not attribute.is_ref():
            yield node.outputs[0], attribute.as_tensor()
        for subgraph in (graph for attribute in node.attributes.values() for graph in _subgraphs(attribute)):
            for value in subgraph.initializers.values():
                if value.const_value is not None:
                    yield value, value.const_value


def _subgraphs(attribute: ir.Attr) -> Iterator[ir.Graph]:
    if attribute.is_ref() or attribute.type not in _GRAPHS:
        return
    yield from attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else [attribute.as_graph()]


def _names(graph: ir.Graph) -> set[str]:
    """The names of all values of a graph and its subgraphs."""
    values = [*graph.inputs, *graph.initializers.values()]
    for node in ir.traversal.RecursiveGraphIterator(graph):
        values += node.outputs
        for subgraph in (graph for attribute in node.attributes.values() for graph in _subgraphs(attribute)):
            values += [*subgraph.inputs, *subgraph.initializers.values()]
    return {str(value.name) for value in values}
