"""Split the matmuls of a recurrent layer's gradient into separate nodes.

The backward recurrence reads the cells of an LSTM and the gradient of Y. The gradients of X and of the weights are then
matmuls over all steps, which read neither, and each reads only some of the other tensors. A single node would hold all
of them at once.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.rules.fused_recurrent import INPUTS, keeps_linear
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import take_over
from onnxtrain.lowering.fuse.transposition import order_of

OPERATOR = "RecurrentProductsGradient"
_RESULTS = ("dX", "dW", "dR", "dB")
_READ = {"dX": ("W",), "dW": ("X",), "dR": ("sequence_lens", "initial_h", "Y"), "dB": ()}
_NODES = (("dR",), ("dX",), ("dW", "dB"))
"""Results of each node, in order. Y is released after the first, if no other layer reads it; W is updated last."""


def split_recurrent_gradients(model: ir.Model) -> None:
    """Compute dX, dW, dR and dB from dgates in nodes behind the gradient of a recurrent layer, in place.

    Before these nodes the runtime releases the tensors that they do not read: the cells of an LSTM and the gradient of
    Y; between them, Y, and a weight's gradient once the weight is updated. A GRU with ``linear_before_reset`` = 0 is
    not split, since its matmuls read more than the gradients of the gates.

    Requires: a sorted graph whose fused operators are those that kernels run, with types and shapes. Ensures: a sorted
    graph.
    """
    graph = model.graph
    main = Builder(graph, graph.opset_imports[""])
    nodes = list(graph)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        op = main if following is None else main.before(following)
        if node.domain == ONNXTRAIN_DOMAIN and _is_split(Node(node, op)):
            _split(graph, op, node)


def _is_split(node: Node) -> bool:
    return node.operator in ("LSTMGradient", "RNNGradient") or (node.operator == "GRUGradient" and keeps_linear(node))


def _split(graph: ir.Graph, op: Builder, node: ir.Node) -> None:
    y = INPUTS[node.op_type.removesuffix("Gradient")]
    inputs = {"X": 0, "W": 1, "sequence_lens": 4, "initial_h": 5, "Y": y}
    spaces = 2 if node.op_type == "GRUGradient" else 1  # dgates, and dlinear of a GRU
    moved = {
        name: value
        for name, value in zip(_RESULTS, node.outputs[spaces:], strict=False)
        if value.uses() or value.is_graph_output()
    }
    for results in _NODES:
        wanted = [name if name in results and name in moved else None for name in _RESULTS]
        while wanted and wanted[-1] is None:
            wanted.pop()
        if not wanted:
            continue
        read = {given for name in wanted if name is not None for given in _READ[name]}
        values = {name: node.inputs[slot] if name in read else None for name, slot in inputs.items()}
        batch_first = _batch_first(values["X"])
        if batch_first is not None:
            values["X"] = batch_first
        dtype = node.outputs[0].dtype
        assert dtype is not None
        nothing = [np.zeros(0, np.int32 if name == "sequence_lens" else dtype.numpy()) for name in inputs]
        found = emit(
            op,
            OPERATOR,
            *(op.constant(none) if x is None else op.wrap(x) for x, none in zip(values.values(), nothing, strict=True)),
            *(op.wrap(value) for value in node.outputs[:spaces]),
            like=[None if name is None else op.wrap(moved[name]) for name in wanted],
            direction=node.attributes["direction"].as_string() if "direction" in node.attributes else None,
            batch_first=None if batch_first is None else 1,
        )
        take_over(graph, {moved[name]: new.ir for name, new in zip(wanted, found, strict=True) if name is not None})
        for name, new in zip(wanted, found, strict=True):
            if name is None:
                new.ir.name = ""
    if moved:
        for old in node.outputs[spaces : spaces + len(_RESULTS)]:
            old.name = ""
        used = [index for index, value in enumerate(node.outputs) if value.uses() or value.is_graph_output()]
        node.resize_outputs(1 + max(used))


def _batch_first(x: ir.Value | None) -> ir.Value | None:
    """Return the graph input that X [steps, batch, inputs] is a transposition of, or ``None``.

    The input exists in any case, so X need not be kept from the forward pass.
    """
    node = None if x is None else x.producer()
    if node is None or node.domain or node.op_type != "Transpose" or order_of(node, 3) != (1, 0, 2):
        return None
    source = node.inputs[0]
    return source if source is not None and source.is_graph_input() else None
