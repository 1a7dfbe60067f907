"""The products of a recurrent layer's gradient in a node of their own.

The gradient of an LSTM goes back in time, and reads the cells and the gradient of Y; then the gradients of X and of the
weights are products over all steps, which read neither. In one node all of them are in memory at once.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import emit
from onnxtrain.autodiff.rules.fused_recurrent import INPUTS
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import take_over

OPERATOR = "RecurrentProductsGradient"
_FIRST, _LAST = 1, 4  # places of dX, dW, dR and dB among the results


def split_recurrent_gradients(model: ir.Model) -> None:
    """Let a node behind ``LSTMGradient`` and ``RNNGradient`` compute dX, dW, dR and dB from dgates, in place.

    The runtime releases before it what it does not read: the cells of an LSTM, the gradient of Y. A GRU stays as it
    is, since its products read more than dgates.

    Requires: a sorted graph whose fused operators are those that kernels run, with types and shapes. Ensures: a sorted
    graph.
    """
    graph = model.graph
    main = Builder(graph, graph.opset_imports[""])
    nodes = list(graph)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        if node.domain != ONNXTRAIN_DOMAIN or node.op_type not in ("LSTMGradient", "RNNGradient"):
            continue
        moved = [value if _is_read(value) else None for value in node.outputs[_FIRST : _LAST + 1]]
        while moved and moved[-1] is None:
            moved.pop()
        if moved:
            _split(graph, main if following is None else main.before(following), node, moved)


def _split(graph: ir.Graph, op: Builder, node: ir.Node, moved: list[ir.Value | None]) -> None:
    x, w, *_ = node.inputs
    lengths, first, y = node.inputs[4], node.inputs[5], node.inputs[INPUTS[node.op_type.removesuffix("Gradient")]]
    values = [x, w, lengths, first, y, node.outputs[0]]
    assert None not in values
    results = emit(
        op,
        OPERATOR,
        *(op.wrap(value) for value in values if value is not None),
        like=[None if value is None else op.wrap(value) for value in moved],
        direction=node.attributes["direction"].as_string() if "direction" in node.attributes else None,
    )
    pairs = {old: new.ir for old, new in zip(moved, results, strict=True) if old is not None}
    take_over(graph, pairs)
    for old, new in zip(moved, results, strict=True):
        if old is None:
            new.ir.name = ""
    for old in node.outputs[_FIRST : _LAST + 1]:
        old.name = ""
    node.resize_outputs(1 + max(index for index, value in enumerate(node.outputs) if index == 0 or _is_read(value)))


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
