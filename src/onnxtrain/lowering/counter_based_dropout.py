"""Draw the masks of Dropout from counters that are states of the training, instead of the runtime's generator.

The runtime's generator starts with the session, so a resumed training would draw other masks than the undisturbed one.
A mask that follows from (seed, counters, index) is the same in any session, on any runtime, at any step.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit
from onnxtrain.autodiff.options import read_texts
from onnxtrain.autodiff.rules.dropout import OPERATOR
from onnxtrain.errors import ModelError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.graph.value import constant_tensor
from onnxtrain.lowering.training_info.recipe import COUNTERS_KEY

_APART = 1_000_003
"""Number of micro-batches in a step up to which each has masks of its own."""


def counter_based_dropout(model: ir.Model) -> None:
    """Replace Dropout nodes that drop and have a seed by ``CountedDropout`` of the domain ``onnxtrain``, in place.

    Its inputs are x, the ratio and the counters that the model's metadata names. Nodes in the bodies of control flow
    stay, and so do all nodes where the metadata names no counters, as in training models of other tools.

    Requires: a sorted graph. Ensures: a sorted graph.

    Raises:
        ModelError: The metadata entry is not a list of names.
    """
    graph = model.graph
    entry = model.metadata_props.pop(COUNTERS_KEY, "[]")
    names = read_texts(entry)
    if names is None:
        raise ModelError(f"The model's metadata entry {COUNTERS_KEY} is {entry[:80]!r}; it is a JSON list of names.")
    nodes = [node for node in graph if _drops(node)]
    values = {value.name: value for value in graph.inputs}
    if not nodes or not names or any(name not in values for name in names):
        return
    main = Builder(graph, graph.opset_imports[""])
    first = main.before(nodes[0])
    count = first.constant(0, np.int64)
    for name in names:
        count = count * _APART + first.cast(first.reshape(first.wrap(values[name]), []), ir.DataType.INT64)
    for node in nodes:
        _replace(graph, main.before(node), node, count)
    graph.sort()


def _drops(node: ir.Node) -> bool:
    """Return whether a node is a Dropout with a seed whose training mode is constant and true."""
    if node.op_type != "Dropout" or node.domain or "seed" not in node.attributes or len(node.inputs) < 3:
        return False
    mode = constant_tensor(node.inputs[2])
    return mode is not None and bool(mode.numpy().all())


def _replace(graph: ir.Graph, op: Builder, node: ir.Node, count: Value) -> None:
    x, ratio = node.inputs[0], node.inputs[1]
    assert x is not None
    value = op.wrap(x)
    share = op.scalar(0.5, value) if ratio is None else op.cast(op.wrap(ratio), value.dtype)
    seed = node.attributes["seed"].as_int()
    (y,) = emit(op, OPERATOR, value, share, op.wrap(count.ir), like=[value], seed=seed)
    op.emitted[-1].name = node.name
    substitutes = {node.outputs[0]: y.ir}
    if len(node.outputs) > 1 and node.outputs[1].uses():
        (kept,) = emit(op, OPERATOR, op.ones_like(value), share, op.wrap(count.ir), like=[value], seed=seed)
        substitutes[node.outputs[1]] = op.cast(kept, ir.DataType.BOOL).ir
    take_over(graph, substitutes)
    remove_nodes(graph, [node])
