"""Run the optimizer in the backward pass: each update as soon as its gradients are ready, which are then released.

One node for all parameters reads all gradients, so all are kept until it runs: as many bytes as the weights. With
several nodes, each behind the last reader of its weights, a gradient is released once its weights are updated. Only in
graphs for native kernels: a portable graph has a body for each parameter, and the runtime chooses the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.autodiff.fused import VERSION
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import remove_nodes, take_over
from onnxtrain.lowering.memory.in_place import Ancestors, Readers
from onnxtrain.lowering.updates import Variable, held_in_bfloat16, variables_of, without_factor
from onnxtrain.operators.registry import find

LEAST_BYTES = 4 << 20
"""Smallest weights, in bytes, that one node updates: fewer do not pay for starting all threads."""


def optimizer_in_backward(graph: ir.Graph) -> None:
    """Split optimizer nodes into parts in the order in which gradients become ready, in place.

    If a node that is not an ancestor of a part's gradients reads its weights, such as the matmul for the gradient of a
    layer's input, the part gets its learning rate through ``After``, so that it may write the weights in place. Each
    part is inserted at the earliest possible position, since ONNX Runtime mostly keeps the order of a graph. Optimizer
    nodes whose gradients share a clipping factor stay: the factor needs the norm of all of them.

    Requires: a sorted graph. Ensures: the same.
    """
    for node in list(graph):
        schema = find(node.domain, node.op_type)
        variables = None if schema is None else variables_of(node, schema)
        if variables is None or without_factor(variables)[0] is not None:
            continue
        parts = list(_parts(graph, variables))
        rate = node.inputs[0]
        if len(parts) > 1 and rate is not None and rate.dtype == ir.DataType.FLOAT:
            _split(graph, node, parts)


def _parts(graph: ir.Graph, variables: Sequence[Variable]) -> Iterator[list[Variable]]:
    """Return the parameters in the order in which their gradients come, cut where a part is large enough."""
    index = {node: position for position, node in enumerate(graph)}

    def comes(variable: Variable) -> int:
        producer = variable.inputs[1].producer()
        return -1 if producer is None else index[producer]

    part: list[Variable] = []
    size, left = 0, sum(map(_bytes, variables))
    for variable in sorted(variables, key=comes):
        part.append(variable)
        size += _bytes(variable)
        if size >= LEAST_BYTES and left - size >= LEAST_BYTES:
            yield part
            left, part, size = left - size, [], 0
    if part:
        yield part


def _bytes(variable: Variable) -> int:
    x = variable.inputs[0]
    if x.dtype is None or x.shape is None or not x.shape.is_static():
        return 0
    return math.prod(x.shape.numpy()) * int(x.dtype.itemsize)


def _split(graph: ir.Graph, node: ir.Node, parts: Sequence[Sequence[Variable]]) -> None:
    ancestors, readers, nodes = Ancestors(graph), Readers(graph), list(graph)
    substitutes: dict[ir.Value, ir.Value] = {}
    rate, count = node.inputs[:2]
    assert rate is not None
    assert count is not None
    for number, part in enumerate(parts):
        waiting = _unordered(part, node, readers, ancestors)
        read = [rate, count, *waiting, *(value for variable in part for value in variable.inputs)]
        producers = [producer for value in read if (producer := value.producer()) is not None]
        last = max(map(ancestors.position, producers), default=-1)
        op = Builder(graph, graph.opset_imports[""], before=nodes[last + 1])
        op.scope = f"{node.name or 'update'}/{number}"
        ready = op.wrap(rate)
        if waiting:
            ready = op.After(ready, *map(op.wrap, waiting), domain=ONNXTRAIN_DOMAIN)
            graph.opset_imports.setdefault(ONNXTRAIN_DOMAIN, VERSION)
        old = [output for column in zip(*(variable.outputs for variable in part), strict=True) for output in column]
        columns = zip(*(variable.inputs for variable in part), strict=True)
        new = op.several(
            node.op_type,
            ready,
            op.wrap(count),
            *(op.wrap(value) for column in columns for value in column),
            outputs=len(old),
            domain=node.domain,
            **{name: attribute.value for name, attribute in node.attributes.items()},
        )
        substitutes.update({before: after.ir for before, after in zip(old, new, strict=True)})
    take_over(graph, substitutes)
    remove_nodes(graph, [node])


def _unordered(part: Sequence[Variable], node: ir.Node, readers: Readers, ancestors: Ancestors) -> list[ir.Value]:
    """Return results of readers of weights that may run after the gradients of a part are ready."""
    producers = [producer for variable in part if (producer := variable.inputs[1].producer()) is not None]
    late = {
        reading.node: None
        for variable in part
        for reading in readers.of(held_in_bfloat16(variable.inputs[0]) or variable.inputs[0])
        if reading.node not in (node, variable.inputs[0].producer())
    }
    found: list[ir.Node] = []
    for reader in sorted(late, key=ancestors.position, reverse=True):  # later ones first: they cover earlier ones
        if not any(ancestors.includes(known, reader) for known in (*producers, *found)):
            found.append(reader)
    return [reader.outputs[0] for reader in found]
