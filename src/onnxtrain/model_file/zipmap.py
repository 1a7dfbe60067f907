"""Maps at the end of classifiers, in working copies: tensors take their place. The user's file keeps them."""

from __future__ import annotations

import onnx

from onnxtrain.ir.domains import MACHINE_LEARNING_DOMAIN


def maps_to_tensors(graph: onnx.GraphProto) -> None:
    """Replace every ZipMap by an Identity, in place: the output of its name is the tensor of probabilities.

    scikit-learn's converters end classifiers in a sequence of maps from label to probability. Nothing can be
    trained on a map, and onnx-ir cannot hold one.
    """
    outputs = {info.name: info for info in (*graph.output, *graph.value_info)}
    for node in graph.node:
        if node.op_type != "ZipMap" or node.domain != MACHINE_LEARNING_DOMAIN:
            continue
        node.op_type, node.domain = "Identity", ""
        del node.attribute[:]
        info = outputs.get(node.output[0])
        if info is not None:
            tensor = onnx.helper.make_tensor_value_info(info.name, onnx.TensorProto.FLOAT, [None, None])
            info.type.CopyFrom(tensor.type)
