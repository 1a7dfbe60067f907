"""The order of nodes: ONNX wants each behind what it reads; ONNX Runtime sorts, and its tools write any order."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from onnxtrain.errors import ModelError
from onnxtrain.model_file.skeleton import proto_subgraphs


def sort_nodes(label: str, proto: ModelProto) -> None:
    """Put the nodes of a model behind what they read, in place, in bodies and functions too; sorted ones stay.

    Args:
        label: What messages call the model.
        proto: The model.

    Raises:
        ModelError: Nodes read each other's results in a circle.
    """
    for holder in (proto.graph, *proto.functions):
        _sort(label, holder)


def _sort(label: str, holder: GraphProto | FunctionProto) -> None:
    for node in holder.node:
        for body in proto_subgraphs(node):
            _sort(label, body)
    nodes = list(holder.node)
    order = _sorted_places(label, nodes)
    if order != list(range(len(nodes))):
        sorted_nodes = [NodeProto.FromString(nodes[place].SerializeToString()) for place in order]
        del holder.node[:]
        holder.node.extend(sorted_nodes)


def _sorted_places(label: str, nodes: Sequence[NodeProto]) -> list[int]:
    """In which order to take the nodes: always the first one of which all is known that it reads."""
    given = [(name, place) for place, node in enumerate(nodes) for name in node.output if name]
    producer = dict(given)
    read = [[producer[name] for name in _read(node) if name in producer] for node in nodes]
    in_order = all(source < place for place, sources in enumerate(read) for source in sources)
    if in_order or len(producer) < len(given):
        return list(range(len(nodes)))  # names that are given twice are another mistake, which the checker tells
    waiting = [set(sources) for sources in read]
    readers: list[list[int]] = [[] for _ in nodes]
    for place, sources in enumerate(waiting):
        for source in sources:
            readers[source].append(place)
    ready = [place for place, sources in enumerate(waiting) if not sources]
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers[place]:
            waiting[reader].discard(place)
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        raise ModelError(f"{label} has {_circle(nodes, waiting)}, so that none can run first; export it again.")
    return order


def _circle(nodes: Sequence[NodeProto], waiting: Sequence[Collection[int]]) -> str:
    """The nodes of one circle, in the order in which they wait for each other."""
    place = next(place for place, sources in enumerate(waiting) if sources)
    seen: list[int] = []
    while place not in seen:
        seen.append(place)
        place = min(waiting[place])
    names = [f"{nodes[at].op_type} (output {nodes[at].output[0]!r})" for at in seen[seen.index(place) :]]
    if len(names) == 1:
        return f"a node that reads its own result, {names[0]}"
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} nodes that read each other's results in a circle, {shown}"


def _read(node: NodeProto) -> set[str]:
    """Return the outer values that a node reads, those read in its bodies included."""
    found = set(node.input)
    if node.op_type != "Constant":
        for body in proto_subgraphs(node):
            found |= _read_outside(body)
    found.discard("")
    return found


def _read_outside(body: GraphProto) -> set[str]:
    own = {info.name for info in body.input} | {tensor.name for tensor in body.initializer}
    own |= {sparse.values.name for sparse in body.sparse_initializer}
    own |= {name for node in body.node for name in node.output}
    read = {info.name for info in body.output}.union(*(_read(node) for node in body.node))
    return read - own
