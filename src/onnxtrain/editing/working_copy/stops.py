"""Stop gradients where the program behind a file does.

PyTorch stops them at ``detach`` and at the padding row of embeddings; ONNX has no operator for either. PyTorch's newer
exporter records the call behind each node as metadata, which tells both (and ``scale_grad_by_freq`` of embeddings),
also where it removed the Identity of a ``detach``. Files of other exporters do not tell. Keras's recurrent layers have
no second bias, which tf2onnx fills with zeros.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.no_gradient import stopped
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.value import constant_array, is_float
from onnxtrain.model_file.exporters import gives
from onnxtrain.model_file.exporters.pytorch import (
    BEGINNINGS,
    CALL,
    arguments,
    declared_kind,
    embedding_call,
    is_detached,
    name_in_program,
)


def stop_as_program(model: ir.Model) -> tuple[str, ...]:
    """Add StopGradient to a working copy where the program of its file stops gradients, in place."""
    graph, calls = model.graph, dict[str, list[ir.Node]]()
    for node in graph:
        call = node.metadata_props.get(CALL, "")
        if "%detach" in call:
            calls.setdefault(call, []).append(node)
    known = {value.name for value in (*graph.inputs, *(output for node in graph for output in node.outputs))}
    known.update(map(name_in_program, graph.initializers.values()))
    unclear = []
    for call, readers in calls.items():
        detached = _detached(readers, call, known)
        if detached is None:
            unclear.append(call.partition(" : ")[0].lstrip("%"))
            continue
        op = Builder(graph, graph.opset_imports[""], before=readers[0])
        for node, slot in detached:
            value = node.inputs[slot]
            if value is not None and is_float(value):
                node.replace_input_with(slot, stopped(op, op.wrap(value)).ir)
    nodes = list(graph)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        if lookup := embedding_call(node):
            _pass_as_embedding(graph, node, following, lookup[0], share=lookup[1])
    _stop_at_filled_biases(graph)
    return tuple(unclear)


def _detached(nodes: list[ir.Node], call: str, known: set[str | None]) -> list[tuple[ir.Node, int]] | None:
    """Return the inputs of nodes that are results of ``detach`` in their call, also where the file has no Identity."""
    names = arguments(call)
    inner = {output for node in nodes for output in node.outputs}
    read = [
        (node, slot, value)
        for node in nodes
        for slot, value in enumerate(node.inputs)
        if value is not None
        and value not in inner
        and (value.name in names or declared_kind(value) in BEGINNINGS or not value.is_initializer())
    ]
    if len(read) == len(names) and all(
        name_in_program(value) == name for (_, _, value), name in zip(read, names, strict=True) if name in known
    ):
        return [(node, slot) for (node, slot, _), name in zip(read, names, strict=True) if is_detached(name)]
    missing = {name for name in names if name not in known}
    gone = {name for name in missing if is_detached(name)}
    unknown = {value for _, _, value in read if name_in_program(value) not in names}
    if gone and (gone != missing or len(unknown) != len(gone)):
        return None
    named = {value for _, _, value in read if is_detached(name_in_program(value))}
    return [(node, slot) for node, slot, value in read if value in named or (gone and value in unknown)]


def _pass_as_embedding(graph: ir.Graph, node: ir.Node, following: ir.Node | None, padding: int, *, share: bool) -> None:
    """y = table[tokens], whose gradient passes as in PyTorch's embedding."""
    value = node.outputs[0]
    if node.op_type != "Gather" or node.domain or not is_float(value) or not (share or padding >= 0):
        return
    uses = list(value.uses())
    op = Builder(graph, graph.opset_imports[""], before=following)
    y = kept = op.wrap(value)
    table, tokens = (op.wrap(given) for given in node.inputs if given is not None)
    if share:
        part = y * op.Unsqueeze(op.Reciprocal(_counts(table, tokens, y)), op.ints(-1))
        kept = (part + stopped(op, y - part)).with_shape(y.shape)
    if padding >= 0:
        is_padding = op.Unsqueeze(op.binary("Equal", tokens, padding), op.ints(-1))
        kept = op.Where(is_padding, stopped(op, kept), kept).with_shape(y.shape)
    for reader, slot in uses:
        reader.replace_input_with(slot, kept.ir)
    if value.is_graph_output():
        graph.outputs[list(graph.outputs).index(value)] = kept.ir
        name, value.name = value.name, f"{value.name}/rows"
        kept.ir.name = name


def _counts(table: Value, tokens: Value, like: Value) -> Value:
    """Count each token among all, in the shape of the tokens."""
    op, rows = table.op, table.op.Reshape(tokens, table.op.ints(-1))
    none = op.Expand(op.scalar(0, like), op.Shape(table, start=0, end=1))
    ones = op.Expand(op.scalar(1, like), op.Shape(rows))
    return op.Gather(op.ScatterElements(none, rows, ones, reduction="add"), tokens)


_BIAS: Final = 3
"""The input slot of the biases, [directions, 2 rows]."""


def _stop_at_filled_biases(graph: ir.Graph) -> None:
    """Stop at second biases of zeros: trained, their sum with the first would take steps of twice the size."""
    for node in list(graph):
        value = node.inputs[_BIAS] if node.op_type in ("LSTM", "GRU", "RNN") and len(node.inputs) > _BIAS else None
        if value is None or node.domain or not gives("joined biases", value.name or ""):
            continue
        array = constant_array(value)
        if array is None or array.ndim != 2:
            continue
        half = array.shape[1] // 2
        if np.any(array[:, half:]) or not np.any(array):
            continue
        op = Builder(graph, graph.opset_imports[""], before=node)
        first, second = op.several("Split", op.wrap(value), op.ints(half, half), outputs=2, axis=1)
        both = op.Concat(first, stopped(op, second), axis=1).with_shape(array.shape)
        node.replace_input_with(_BIAS, both.ir)
