"""Give each reader of a shared vector one of its own while structures are looked for.

Exporters store equal vectors once, such as the zero biases of untrained layers. Layers that read the same vector would
otherwise lose the same entries, or none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.value import constant_tensor, dimensions, is_float


def split_shared(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Copy vectors that several nodes read, in place; return the original of each copy."""
    graph = model.graph
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Identity" and not node.domain else None
        if source is not None and source.is_initializer() and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(source)
            graph.remove(node, safe=True)
    originals: dict[ir.Value, ir.Value] = {}
    for value in list(graph.initializers.values()):
        sizes, tensor = dimensions(value), constant_tensor(value)
        readers = list(dict.fromkeys(node for node, _ in value.uses()))
        wide = [size for size in sizes or () if size != 1]
        if tensor is None or len(readers) < 2 or len(wide) != 1 or not is_float(value) or value in graph.inputs:
            continue
        for number, node in enumerate(readers[1:], 2):
            name = f"{value.name}/{number}"
            while name in graph.initializers:
                name += "'"
            copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=_named(tensor, name))
            graph.register_initializer(copy)
            for index, read in enumerate(node.inputs):
                if read is value:
                    node.replace_input_with(index, copy)
            originals[copy] = value
    return originals


def merge_shared(model: ir.Model, originals: dict[ir.Value, ir.Value]) -> None:
    """Share copies that are still equal to each other, in place."""
    found: dict[tuple[ir.Value, tuple[int, ...], bytes], ir.Value] = {}
    for value in (*dict.fromkeys(originals.values()), *originals):
        tensor = constant_tensor(value)
        assert tensor is not None
        array = np.asarray(tensor.numpy())
        first = found.setdefault((originals.get(value, value), array.shape, array.tobytes()), value)
        if first is not value:
            value.replace_all_uses_with(first)
            model.graph.initializers.pop(str(value.name))


def _named(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    return ir.tensor(np.asarray(tensor.numpy()), dtype=tensor.dtype, name=name)
