"""Find floating tensors that a working copy cannot lift: to list them, and to say why nothing is trainable."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto

from onnxtrain.errors.formatting import listed
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, is_default_domain
from onnxtrain.model_file.linear_models import attribute_weights
from onnxtrain.model_file.proto import all_nodes as nodes_of_proto
from onnxtrain.parameters.readers import quantized_weights, trains_integers
from onnxtrain.parameters.trainable import Initializer

_ELSEWHERE = "sparse, or its data is in another file; write the model with it as an initializer"


def other_tensors(proto: ModelProto) -> list[Initializer]:
    """List the floating tensors of a file that are no initializers of its working copy, with the reasons.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n] x) => (float[n] y) { y = own.Scale <factors = float[2] {0.5, 2.0}> (x) }''')
        >>> [(row.name, row.reason) for row in other_tensors(model)]
        [('y.factors', 'an attribute of Scale')]
    """
    found = []
    for node in (node for holder in (proto.graph, *proto.functions) for node in nodes_of_proto(holder)):
        lifted = {weight.tensor.name for weight in attribute_weights(node)}
        is_constant = node.op_type == "Constant" and is_default_domain(node.domain)
        label = node.name or next(iter(node.output), node.op_type)
        for attribute in node.attribute:
            for shape, dtype in () if attribute.name in lifted else _tensors(node, attribute, is_constant):
                if not ir.DataType(dtype).is_floating_point() or (math.prod(shape) < 2 and not is_constant):
                    continue  # one value is a setting, such as the fill of ConstantOfShape
                name = node.output[0] if is_constant else f"{label}.{attribute.name}"
                reason = _ELSEWHERE if is_constant else f"an attribute of {node.op_type}"
                kind = ir.DataType(dtype).name.lower()
                found.append(Initializer(name, shape, kind, math.prod(shape), False, reason, (node.op_type,)))
    return found


def _tensors(node: NodeProto, attribute: AttributeProto, is_constant: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield shape and type of the floating tensors of an attribute; a list of floats of ``ai.onnx.ml`` is one."""
    dense = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    for tensor in dense:
        if not is_constant or tensor.data_location == TensorProto.EXTERNAL:
            yield tuple(tensor.dims), tensor.data_type
    sparse = [*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []), *attribute.sparse_tensors]
    yield from ((tuple(tensor.dims), tensor.values.data_type) for tensor in sparse)
    if node.domain == MACHINE_LEARNING_DOMAIN and len(attribute.floats) > 1:
        yield (len(attribute.floats),), TensorProto.FLOAT


def untrainable(model: ir.Model, proto: ModelProto) -> str:
    """Return a sentence about values that no gradient changes, and about tensors stored elsewhere; "" without any."""
    sentences = []
    names = [repr(row.name) for row in other_tensors(proto) if row.reason == _ELSEWHERE]
    if names:
        sentences.append(f"its weights are in Constant nodes ({listed(names)}); write them as initializers")
    fitted = dict.fromkeys(node.op_type for node in all_nodes(model.graph) if _is_fitted(node))
    if fitted:
        sentences.append(
            f"it computes with {' and '.join(fitted)}, through which no gradient flows: trees, support vectors and "
            "the like are fitted by the program that made them"
        )
    if integers := quantized_weights(model.graph):
        sentences.append(
            f"it is quantized: {sum(integers.values()):,} elements ({listed(map(repr, integers))}) are "
            f"integers; qat=True trains {'them' if trains_integers(model.graph) else 'their scales'}"
        )
    return "; ".join(sentences)


def _is_fitted(node: ir.Node) -> bool:
    """Return whether a node holds fitted values that are not parameters."""
    return node.domain == MACHINE_LEARNING_DOMAIN and any(
        _is_list(attribute) or attribute.type == ir.AttributeType.TENSOR for attribute in node.attributes.values()
    )


def _is_list(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.FLOATS and not attribute.is_ref() and len(attribute.as_floats()) > 1
