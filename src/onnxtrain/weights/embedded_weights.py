"""Find floating tensors that a working copy cannot lift: to list them, and to say why nothing is trainable."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.ir.clone import all_nodes
from onnxtrain.ir.domains import MACHINE_LEARNING_DOMAIN
from onnxtrain.weights.parameters import Initializer


def other_tensors(model: ir.Model) -> list[Initializer]:
    """List the floating tensors of a working copy that are no initializers, with the reasons why they are not trained.

    These are values of other operators than Constant, such as those of trees, sparse Constants, and tensors of Constant
    nodes and bodies whose data is in another file.

    Args:
        model: A working copy.

    Example:
        >>> import onnx
        >>> from onnxtrain.model_file.file import ModelFile
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (int64[1] s) => (float[n] y) { y = ConstantOfShape <value = float[1] {0.5}> (s) }''')
        >>> [(row.name, row.reason) for row in other_tensors(ModelFile.load(model).training_model())]
        [('y.value', 'an attribute of ConstantOfShape')]
    """
    found = []
    for holder in (model.graph, *model.functions.values()):
        for node in all_nodes(holder):
            label = node.name or (node.outputs[0].name if node.outputs else "") or node.op_type
            for attribute in node.attributes.values():
                for shape, dtype in _tensors(attribute):
                    name = f"{label}.{attribute.name}" if node.op_type != "Constant" else str(node.outputs[0].name)
                    reason = f"an attribute of {node.op_type}"
                    if node.op_type == "Constant":
                        reason = "sparse, or stored in another file; write the model with it as an initializer"
                    size = math.prod(shape)
                    found.append(Initializer(name, shape, dtype.name.lower(), size, False, reason, (node.op_type,)))
    return found


def _tensors(attribute: ir.Attr) -> Iterator[tuple[tuple[int, ...], ir.DataType]]:
    """Yield shape and type of the floating tensors of an attribute; a list of floats is one."""
    if attribute.is_ref():
        return
    given = attribute.value if attribute.type == ir.AttributeType.TENSORS else [attribute.value]
    if attribute.type in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS, ir.AttributeType.SPARSE_TENSOR):
        for tensor in given:
            values = getattr(tensor, "values", tensor)
            if isinstance(values, ir.TensorProtocol) and values.dtype.is_floating_point():
                yield tuple(int(size) for size in tensor.shape.numpy() or ()), values.dtype
    elif _is_list(attribute):
        yield (len(attribute.as_floats()),), ir.DataType.FLOAT


def untrainable(model: ir.Model) -> str:
    """Return a sentence about values that no gradient changes, and about tensors stored elsewhere; "" without any.

    Operators of ``ai.onnx.ml`` (trees, support vectors) hold values that no gradient changes.

    Args:
        model: A working copy.
    """
    sentences = []
    names = [repr(row.name) for row in other_tensors(model) if row.uses == ("Constant",)]
    if names:
        sentences.append(f"its weights are in Constant nodes ({', '.join(names[:3])}); write them as initializers")
    fitted = dict.fromkeys(node.op_type for node in all_nodes(model.graph) if _is_fitted(node))
    if fitted:
        sentences.append(
            f"it computes with {' and '.join(fitted)}, through which no gradient flows: trees, support vectors and "
            "the like are fitted by the program that made them"
        )
    integers = dict.fromkeys(node.op_type for node in all_nodes(model.graph) if _is_integer(node))
    if integers:
        sentences.append(
            f"it is quantized: {', '.join(integers)} compute with integers, through which no gradient flows; train "
            "the float model, or one with QuantizeLinear and DequantizeLinear nodes and qat=True"
        )
    return "; ".join(sentences)


def _is_integer(node: ir.Node) -> bool:
    """Return whether an operator computes with quantized integers."""
    return node.op_type.startswith("QLinear") or node.op_type in ("ConvInteger", "MatMulInteger", "QGemm")


def _is_fitted(node: ir.Node) -> bool:
    """Return whether a node holds fitted values that are not parameters."""
    return node.domain == MACHINE_LEARNING_DOMAIN and any(map(_is_list, node.attributes.values()))


def _is_list(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.FLOATS and not attribute.is_ref() and len(attribute.as_floats()) > 1
