"""Work around bugs of ONNX's shape inference."""

from __future__ import annotations

import onnx
import onnx_ir as ir

_OF_SIZES = frozenset({"Concat", "Cast", "Identity", "Slice", "Add", "Sub", "Mul", "Div", "Max", "Min", "Neg"})


def hide_computed_slices(graph: onnx.GraphProto) -> None:
    """Keep ONNX's data propagation from Slice nodes whose bounds are computed, in place ("computed bounds").

    Compress has the same types and no propagation.
    """
    known = {tensor.name for tensor in graph.initializer}
    known |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    # Propagated values have one axis and hold sizes; their rank may not be declared yet.
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


def is_taken_for_scalar(node: ir.Node, inferred: onnx.TypeProto.Tensor) -> bool:
    """Return whether ONNX inferred a scalar for a matrix ("the matrix of Attention")."""
    return node.op_type == "Attention" and not inferred.shape.dim
