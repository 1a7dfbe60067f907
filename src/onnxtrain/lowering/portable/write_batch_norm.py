"""Write batch normalization in training mode in operators that every provider has.

(workarounds: statistics on WebGPU, statistics on CUDA)
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.replace import remove_nodes, take_over


def write_batch_norm(model: ir.Model) -> None:
    """Write every BatchNormalization in training mode in other operators, in place.

    With mean m and variance v of a channel over the batch: y = scale (x - m) / sqrt(v + epsilon) + bias, and each
    running statistic r becomes momentum r + (1 - momentum) times that of the batch.

    Requires: nodes whose x has a known rank. Ensures: no BatchNormalization in training mode.

    Raises:
        OptionError: The rank of an x is not known.
    """
    for graph in [model.graph, *model.graph.subgraphs()]:
        assert isinstance(graph, ir.Graph)
        _write(graph, model.graph.opset_imports[""])


def _write(graph: ir.Graph, opset: int) -> None:
    for node in list(graph):
        mode = node.attributes.get("training_mode")
        if node.domain or node.op_type != "BatchNormalization" or mode is None or mode.as_int() != 1:
            continue
        op = Builder(graph, opset, before=node)
        op.scope = node.name or "batch_norm"
        x, scale, bias, mean, variance = (op.wrap(value) for value in node.inputs if value is not None)
        given = {name: attribute.as_float() for name, attribute in node.attributes.items() if name != "training_mode"}
        epsilon, momentum = given.get("epsilon", 1e-5), given.get("momentum", 0.9)
        if x.rank is None:
            raise OptionError(f"The rank of {x.ir.name!r} is not known; declare its shape in the model.")
        column = op.ints(*range(1, x.rank - 1))

        def per_channel(value: Value, op: Builder = op, column: Value = column, rank: int = x.rank) -> Value:
            return op.Unsqueeze(value, column) if rank > 2 else value

        over = op.ints(0, *range(2, x.rank))
        centred = x - (batch_mean := op.ReduceMean(x, over, keepdims=1))
        batch_variance = op.ReduceMean(centred * centred, over, keepdims=1)
        y = centred * (per_channel(scale) * op.Reciprocal(op.Sqrt(batch_variance + epsilon))) + per_channel(bias)
        new = [y]
        for running, own in ((mean, batch_mean), (variance, batch_variance)):
            new.append(running * momentum + op.Reshape(own, op.ints(-1)) * (1 - momentum))
        pairs = zip(node.outputs, new, strict=False)
        take_over(graph, {old: made.ir for old, made in pairs if old.name})
        remove_nodes(graph, [node])
