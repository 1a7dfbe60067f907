"""Weights that are no initializers of the main graph: where they are in a file, and how a working copy has them.

Tools write weights as Constant nodes (Paddle, some optimizers), or as initializers of the bodies of If and Loop (voice
activity models). In a working copy they are initializers of the main graph, like any other; in the file they stay where
they are. Which constants are weights is told by what reads them.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxtrain.graph.domains import is_default_domain
from onnxtrain.model.skeleton import proto_subgraphs
from onnxtrain.model.wire import Path, Template

_GRAPH, _NODE, _ATTRIBUTE, _TENSOR, _BODY, _BODIES, _INITIALIZER = 7, 1, 5, 5, 6, 11, 5

_FLOATING = (TensorProto.FLOAT, TensorProto.DOUBLE)

_WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "MatMul": (0, 1),
    "Gemm": (0, 1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
    "Gather": (0,),
    "BatchNormalization": (1, 2, 3, 4),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "PRelu": (1,),
}
"""Operators that read weights, and at which inputs."""

_PRODUCTS = frozenset({"MatMul", "Conv", "ConvTranspose", "Gemm"})
_HANDING_ON = frozenset({"Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast"})


@dataclass(frozen=True)
class Hidden:
    """A weight that is no initializer of the main graph.

    Attributes:
        name: What the initializer of a working copy is called: as the value in the file, with a number behind it
            where several bodies have a value of that name.
        path: Where its tensor is.
        tensor: The tensor.
    """

    name: str
    path: Path
    tensor: TensorProto


def find_hidden(proto: ModelProto) -> list[Hidden]:
    """The weights in Constant nodes and in the bodies of a model's main graph, in the order of the file.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n, 1] x) => (float[n, 2] y) {
        ...   w = Constant <value = float[1, 2] {1.0, 2.0}> ()  y = MatMul(x, w) }''')
        >>> [(item.name, item.path) for item in find_hidden(model)]
        [('w', ((7, 0), (1, 0), (5, 0), (5, 0)))]
    """
    counts = Counter(_names(proto.graph))
    taken = set(counts)
    only = not any(tensor.data_type in _FLOATING for tensor in proto.graph.initializer)
    found = []
    for value, path, tensor in _weights(proto.graph, ((_GRAPH, 0),), literal=only):
        numbered = (f"{value}_{number}" for number in itertools.count(1))
        name = value if counts[value] == 1 else next(name for name in numbered if name not in taken)
        taken.add(name)
        found.append(Hidden(name, path, tensor))
    return found


def with_hidden(proto: ModelProto, template: Template, data: bytes | mmap.mmap) -> tuple[Template, list[Hidden]]:
    """The hidden weights of a model, and its template, cut there, too; both are none where there are doubts.

    Args:
        proto: The model.
        template: Its bytes, cut at the initializers of the main graph.
        data: Its bytes.
    """
    hidden = find_hidden(proto)
    if not hidden:
        return template, []
    cut = Template(data, [item.path for item in hidden])
    return (cut, hidden) if all(cut.holds(item.path) for item in hidden) else (template, [])


def lift(proto: ModelProto, hidden: Sequence[Hidden]) -> None:
    """Make weights initializers of the main graph, in place.

    Requires: the model's nodes stand as in that whose weights were found. Ensures: values keep their names.
    """
    moved = []
    for item in hidden:
        chain = _chain(proto, item.path)
        tensor = chain[-1]
        if isinstance(chain[-2], AttributeProto):
            graph, node = chain[-4], chain[-3]
            value = node.output[0]
        else:
            graph, node = chain[-2], None
            value = tensor.name
        moved.append((graph, node, tensor, value, item.name))
    for graph, node, tensor, value, name in moved:
        made = proto.graph.initializer.add()
        made.CopyFrom(tensor)
        made.name = name
        if name != value:
            identity = NodeProto(op_type="Identity", input=[name], output=[value])
            if node is None:
                graph.node.insert(0, identity)
            else:
                node.CopyFrom(identity)
        elif node is not None:
            graph.node.remove(node)
        if node is None:
            graph.initializer.remove(tensor)


def _chain(proto: ModelProto, path: Path) -> list[Any]:
    """The messages on the way to one."""
    chain: list[Any] = [proto]
    for number, place in path:
        field = chain[-1].DESCRIPTOR.fields_by_number[number]
        value = getattr(chain[-1], field.name)
        chain.append(value if field.name in ("graph", "t", "g") else value[place])
    return chain


def _weights(graph: GraphProto, path: Path, *, literal: bool) -> Iterator[tuple[str, Path, TensorProto]]:
    """Names, paths and tensors of a graph's weights, those of bodies included."""
    outputs = {value.name for value in graph.output}
    reads = _weight_reads(graph)
    if len(path) > 1:
        given = {value.name for value in graph.input}
        for place, tensor in enumerate(graph.initializer):
            if _is_weight(tensor) and tensor.name in reads and tensor.name not in outputs | given:
                yield tensor.name, (*path, (_INITIALIZER, place)), tensor
    for place, node in enumerate(graph.node):
        at = (*path, (_NODE, place))
        if node.op_type == "Constant" and is_default_domain(node.domain) and node.output:
            kept = node.output[0] in outputs or node.output[0] not in reads or (not literal and _is_literal(node))
            for index, attribute in enumerate(node.attribute):
                if not kept and attribute.HasField("t") and _is_weight(attribute.t):
                    yield node.output[0], (*at, (_ATTRIBUTE, index), (_TENSOR, 0)), attribute.t
        for index, attribute in enumerate(node.attribute):
            if attribute.HasField("g"):
                yield from _weights(attribute.g, (*at, (_ATTRIBUTE, index), (_BODY, 0)), literal=literal)
            for number, body in enumerate(attribute.graphs):
                yield from _weights(body, (*at, (_ATTRIBUTE, index), (_BODIES, number)), literal=literal)


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_type in _FLOATING and math.prod(tensor.dims) > 1 and tensor.data_location != TensorProto.EXTERNAL


def _is_literal(node: NodeProto) -> bool:
    """Whether it is a tensor written in the code, as TorchScript's exporter calls those, beside its initializers."""
    return "Constant" in node.output[0].rsplit("/", 1)[-1] or node.output[0].isdigit()


def _weight_reads(graph: GraphProto) -> set[str]:
    """The names of the values that nodes of a graph and its bodies read as weights."""
    found: set[str] = set()
    _collect(graph, found, frozenset())
    return found


def _collect(graph: GraphProto, found: set[str], products: Collection[str]) -> None:
    handed: list[tuple[str, str]] = []
    results = set(products)
    for node in graph.node:
        if is_default_domain(node.domain):
            places = _WEIGHTS.get(node.op_type, ())
            found.update(name for place, name in enumerate(node.input) if place in places)
            if node.op_type in _PRODUCTS:
                results.update(node.output)
            elif node.op_type == "Add" and any(name in results for name in node.input):
                found.update(name for name in node.input if name not in results)
            elif node.op_type in _HANDING_ON and node.input and node.output:
                handed.append((node.input[0], node.output[0]))
        for body in proto_subgraphs(node):
            _collect(body, found, results)
    for source, result in reversed(handed):
        if result in found:
            found.add(source)


def _names(graph: GraphProto) -> Iterator[str]:
    """The names of all values that a graph and its bodies give or hold."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    for node in graph.node:
        yield from node.output
        for body in proto_subgraphs(node):
            yield from _names(body)
