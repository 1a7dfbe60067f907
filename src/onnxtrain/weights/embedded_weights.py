"""Find weights stored outside initializers, to explain why a model has nothing to train."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.ir.clone import all_nodes
from onnxtrain.ir.domains import MACHINE_LEARNING_DOMAIN
from onnxtrain.weights.readers import quantized_weights, trains_integers

_LISTED = 3
"""Number of names listed before the sentence says that there are more."""


def hidden_weights(model: ir.Model) -> str:
    """Return a sentence about weights stored outside initializers, with the next step; "" where there are none.

    Weights are floating tensors of more than one element, in Constant nodes, branches, loop bodies and functions.
    Remaining operators of ``ai.onnx.ml`` (trees, support vectors) hold values that no gradient changes.

    Args:
        model: A working copy.

    Example:
        >>> import onnx
        >>> from onnxtrain.model_file.file import ModelFile
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n] x) => (float[n] y) { w = Constant <value_floats = [1.0, 2.0]> ()  y = Mul(x, w) }''')
        >>> hidden_weights(ModelFile.load(model).training_model())
        "its weights are in Constant nodes ('w'); write the model with them as initializers"
    """
    locations: dict[str, list[str]] = {}
    for location, name in _found(model):
        locations.setdefault(location, []).append(name)
    sentences = []
    if locations:
        listed = " and ".join(f"{location} ({_listed(names)})" for location, names in locations.items())
        sentences.append(f"its weights are in {listed}; write the model with them as initializers")
    fitted = dict.fromkeys(node.op_type for node in all_nodes(model.graph) if _is_fitted(node))
    if fitted:
        sentences.append(
            f"it computes with {' and '.join(fitted)}, through which no gradient flows: trees, support vectors and "
            "the like are fitted by the program that made them"
        )
    if integers := quantized_weights(model.graph):
        sentences.append(
            f"it is quantized: {sum(integers.values()):,} elements ({_listed([repr(name) for name in integers])}) are "
            f"integers; qat=True trains {'them' if trains_integers(model.graph) else 'their scales'}"
        )
    return "; ".join(sentences)


def _found(model: ir.Model) -> Iterator[tuple[str, str]]:
    """Yield pairs of a location and the name of a weight stored there."""
    yield from _in_graph(model.graph, "Constant nodes")
    for graph in model.graph.subgraphs():
        yield from _in_graph(graph, f"Constant nodes of the graph {graph.name!r}")
        for name, value in graph.initializers.items():
            if value.const_value is not None and _is_weight(value.const_value):
                yield f"the graph {graph.name!r}", repr(name)
    for function in model.functions.values():
        yield from _in_graph(function, f"the function {function.name!r}")


def _in_graph(graph: ir.Graph | ir.Function, location: str) -> Iterator[tuple[str, str]]:
    for node in graph:
        if node.op_type == "Constant" and node.domain == "":
            attribute = next(iter(node.attributes.values()), None)
            if attribute is not None and (_is_list(attribute) or _is_tensor(attribute)):
                yield location, repr(node.outputs[0].name)


def _is_fitted(node: ir.Node) -> bool:
    """Return whether a node holds fitted values that are not parameters."""
    return node.domain == MACHINE_LEARNING_DOMAIN and any(map(_is_list, node.attributes.values()))


def _is_list(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.FLOATS and not attribute.is_ref() and len(attribute.as_floats()) > 1


def _is_tensor(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref() and _is_weight(attribute.as_tensor())


def _is_weight(tensor: ir.TensorProtocol) -> bool:
    return tensor.dtype.is_floating_point() and tensor.size > 1


def _listed(names: list[str]) -> str:
    more = "" if len(names) <= _LISTED else f" and {len(names) - _LISTED} more"
    return ", ".join(names[:_LISTED]) + more
