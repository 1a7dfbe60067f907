"""Draw the masks of Dropout from counters that are states of the training, instead of the runtime's generator.

The runtime's generator starts with the session, so a resumed training would draw other masks than the undisturbed one.
A mask that follows from (seed, counters, index) is the same in any session, on any runtime, at any step.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.fused import emit
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.options import read_texts
from onnxtrain.autodiff.rules.dropout import OPERATOR
from onnxtrain.errors import ModelError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import constant_array, input_of
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule
from onnxtrain.lowering.training_info.recipe import COUNTERS_KEY

_APART = 1_000_003
"""Number of micro-batches in a step up to which each has masks of its own."""


def counter_based_dropout(model: ir.Model) -> None:
    """Replace Dropout nodes that drop and have a seed by ``CountedDropout`` of the domain ``onnxtrain``, in place.

    Its inputs are x, the ratio and the counters that the model's metadata names. Nodes in the bodies of control flow
    stay, and so do all nodes where the metadata names no counters, as in training models of other tools.

    Requires: a sorted graph. Ensures: a sorted graph.
    """
    entry = model.metadata_props.pop(COUNTERS_KEY, "[]")
    names = read_texts(entry)
    if names is None:
        raise ModelError(f"The model's metadata entry {COUNTERS_KEY} is {entry[:80]!r}; it is a JSON list of names.")
    values = {value.name: value for value in model.graph.inputs}
    if names and all(name in values for name in names):
        counts: list[Value] = []  # what all nodes read, once it is computed

        def emit_counted(op: Builder, match: Match) -> list[Value]:
            op.scope = ""
            counts[:] = counts or [_count(op, [values[name] for name in names])]
            return _emit(op, match, op.wrap(counts[0].ir))

        Rewrite(Rule(operators("dropout", "Dropout"), emit_counted, _drops), sort=True)(model)


def _drops(match: Match) -> str | None:
    """A Dropout with a seed whose training mode is constant and true."""
    (node,) = match.nodes
    mode = constant_array(input_of(node, 2))
    return None if "seed" in node.attributes and mode is not None and mode.all() else "it has no seed, or drops nothing"


def _count(op: Builder, counters: list[ir.Value]) -> Value:
    """Emit the number of the step, or of the micro-batch."""
    count = op.constant(0, np.int64)
    for counter in counters:
        count = count * _APART + op.cast(op.reshape(op.wrap(counter), []), ir.DataType.INT64)
    return count


def _emit(op: Builder, match: Match, count: Value) -> list[Value]:
    view = Node(match.nodes[0], op)
    x, ratio, seed = view.x, view.input(1), view.attribute("seed")
    share = op.scalar(0.5, x) if ratio is None else op.cast(ratio, x.dtype)
    (y,) = emit(op, OPERATOR, x, share, count, like=[x], seed=seed)
    op.emitted[-1].name = view.ir.name
    if not view.ir.outputs[1:2] or not view.ir.outputs[1].uses():
        return [y]
    (kept,) = emit(op, OPERATOR, op.ones_like(x), share, count, like=[x], seed=seed)
    return [y, op.cast(kept, ir.DataType.BOOL)]
