"""Weights that are no initializers of the main graph: where they are in a file, and how a working copy has them.

Tools write weights as Constant nodes (Paddle, some optimizers), as initializers of the bodies of If and Loop (voice
activity models), or as attributes (linear models of scikit-learn, see `linear_models`). In a working copy they are
initializers of the main graph, like any other; in the file they stay where they are. Which constants are weights is
told by what reads them.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnxtrain.ir.domains import is_default_domain
from onnxtrain.model_file.linear_models import attribute_weights, is_normalizer, mirror, put, standard_form
from onnxtrain.model_file.proto import default_opset, proto_subgraphs
from onnxtrain.model_file.protobuf_wire import Path, Template

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

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Operators whose weights nobody writes as literals in code."""

_PRODUCTS = frozenset({"MatMul", "Conv", "ConvTranspose", "Gemm"})
_HANDING_ON = frozenset(
    {"Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Slice", "Split", "Concat"}
)
_ROOTS = frozenset({"Sqrt", "Reciprocal"})


class Hidden(NamedTuple):
    """A weight that is no initializer of the main graph.

    Attributes:
        name: What the initializer of a working copy is called: as the value in the file, with a number behind it
            where several bodies have a value of that name.
        path: Where its tensor is, or the attribute that holds its numbers.
        tensor: The tensor.
        mirrored: Whether the attribute holds the negative, too (see `linear_models`).
    """

    name: str
    path: Path
    tensor: TensorProto
    mirrored: bool = False

    def stored(self, values: np.ndarray) -> np.ndarray:
        """New values in the form of the file."""
        return mirror(values) if self.mirrored else values


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
    for value, path, tensor, mirrored in _weights(proto.graph, ((_GRAPH, 0),), literal=only):
        numbered = (f"{value}_{number}" for number in itertools.count(1))
        is_free = counts[value] == 1 or value not in taken
        name = value if is_free else next(name for name in numbered if name not in taken)
        taken.add(name)
        found.append(Hidden(name, path, tensor, mirrored))
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
    linear: dict[Path, tuple[Any, Any, dict[str, str]]] = {}
    for item in hidden:
        chain = _chain(proto, item.path)
        tensor = chain[-1]
        if isinstance(tensor, AttributeProto):
            _, _, names = linear.setdefault(item.path[:-1], (chain[-3], chain[-2], {}))
            names[tensor.name] = item.name
            made = proto.graph.initializer.add()
            made.CopyFrom(item.tensor)
            made.name = item.name
            continue
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
    _to_standard_operators(proto, [*linear.values()])


def fill(proto: ModelProto, item: Hidden, values: np.ndarray) -> None:
    """Give a weight new values in a model, in place; its name and what is said about it stay."""
    place = _chain(proto, item.path)[-1]
    if isinstance(place, AttributeProto):
        put(place, item.stored(values))
    else:
        fill_tensor(place, values)


def fill_tensor(tensor: TensorProto, values: np.ndarray) -> None:
    """Give a tensor these values, in place; its name and what is said about it stay."""
    full = numpy_helper.from_array(np.ascontiguousarray(values))
    for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data"):
        tensor.ClearField(field)
    tensor.ClearField("data_location")
    tensor.raw_data = full.raw_data


def _to_standard_operators(proto: ModelProto, linear: Sequence[tuple[Any, Any, dict[str, str]]]) -> None:
    """Put standard operators in the place of linear models, and of the Normalizer behind them."""
    opset = default_opset(proto.opset_import) or 1
    if not linear:
        return
    softmax: set[str] = set()
    forms: dict[int, list[NodeProto]] = {}
    for _, node, names in linear:
        forms[id(node)] = standard_form(node, names, opset=opset)
        softmax.update(made.output[0] for made in forms[id(node)] if made.op_type == "Softmax")
    for graph in _graphs(proto.graph):
        made: list[NodeProto] = []
        for node in graph.node:
            form = forms.get(id(node))
            if form is None and is_normalizer(node):
                one = node.input[0] in softmax and any(a.name == "norm" and a.s == b"L1" for a in node.attribute)
                same = NodeProto(op_type="Identity", input=node.input, output=node.output)
                form = [same] if one else standard_form(node, {}, opset=opset)
            made += [node] if form is None else form
        if len(made) != len(graph.node) or any(a is not b for a, b in zip(made, graph.node, strict=True)):
            kept = [NodeProto.FromString(node.SerializeToString()) for node in made]
            del graph.node[:]
            graph.node.extend(kept)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and those of its bodies, the inner ones first."""
    for node in graph.node:
        for body in proto_subgraphs(node):
            yield from _graphs(body)
    yield graph


def _chain(proto: ModelProto, path: Path) -> list[Any]:
    """The messages on the way to one."""
    chain: list[Any] = [proto]
    for number, place in path:
        field = chain[-1].DESCRIPTOR.fields_by_number[number]
        value = getattr(chain[-1], field.name)
        chain.append(value if field.name in ("graph", "t", "g") else value[place])
    return chain


def _weights(graph: GraphProto, path: Path, *, literal: bool) -> Iterator[tuple[str, Path, TensorProto, bool]]:
    """Names, paths and tensors of a graph's weights, those of bodies included; and whether they are mirrored."""
    outputs = {value.name for value in graph.output}
    reads = _weight_reads(graph)
    if len(path) > 1:
        given = {value.name for value in graph.input}
        for place, tensor in enumerate(graph.initializer):
            if _is_weight(tensor) and tensor.name in reads.weights and tensor.name not in outputs | given:
                yield tensor.name, (*path, (_INITIALIZER, place)), tensor, False
    for place, node in enumerate(graph.node):
        at = (*path, (_NODE, place))
        if node.op_type == "Constant" and is_default_domain(node.domain) and node.output:
            value = node.output[0]
            is_literal = not literal and value not in reads.certain and _is_written_in_code(node)
            kept = value in outputs or value not in reads.weights or is_literal
            for index, attribute in enumerate(node.attribute):
                if not kept and attribute.HasField("t") and _is_weight(attribute.t):
                    yield node.output[0], (*at, (_ATTRIBUTE, index), (_TENSOR, 0)), attribute.t, False
        for weight in attribute_weights(node) if node.output else ():
            label = node.name or node.output[-1]
            yield f"{label}.{weight.tensor.name}", (*at, (_ATTRIBUTE, weight.place)), weight.tensor, weight.mirrored
        for index, attribute in enumerate(node.attribute):
            if attribute.HasField("g"):
                yield from _weights(attribute.g, (*at, (_ATTRIBUTE, index), (_BODY, 0)), literal=literal)
            for number, body in enumerate(attribute.graphs):
                yield from _weights(body, (*at, (_ATTRIBUTE, index), (_BODIES, number)), literal=literal)


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_type in _FLOATING and math.prod(tensor.dims) > 1 and tensor.data_location != TensorProto.EXTERNAL


def _is_written_in_code(node: NodeProto) -> bool:
    """Return whether TorchScript's exporter named the Constant as a literal of the code, not as a weight."""
    return "Constant" in node.output[0].rsplit("/", 1)[-1] or node.output[0].isdigit()


class _Reads(NamedTuple):
    """The names of values that nodes read as weights.

    Attributes:
        weights: All of them.
        certain: Those that cannot be literals of the code: weights of recurrent layers, scales of normalizations.
    """

    weights: set[str]
    certain: set[str]


def _weight_reads(graph: GraphProto) -> _Reads:
    """The names of the values that nodes of a graph and its bodies read as weights."""
    found = _Reads(set(), set())
    _collect(graph, found, _Results(set(), set(), set(), set()))
    return found


class _Results(NamedTuple):
    """Values by what they are the result of.

    Attributes:
        products: Of products.
        roots: Of square roots and their reciprocals: deviations.
        normalized: Of quotients by roots, and of InstanceNormalization.
        scaled: Of normalized values times a scale.
    """

    products: set[str]
    roots: set[str]
    normalized: set[str]
    scaled: set[str]


def _collect(graph: GraphProto, found: _Reads, outer: _Results) -> None:
    handed: list[tuple[str, str]] = []
    results = _Results(*(set(names) for names in outer))
    constants = {node.output[0] for node in graph.node if node.op_type == "Constant" and node.output}
    constants |= {tensor.name for tensor in graph.initializer}
    halves = {name for node in graph.node if node.op_type == "Constant" and _is_half(node) for name in node.output[:1]}
    halves |= {tensor.name for tensor in graph.initializer if _holds_half(tensor)}
    for node in graph.node:
        if is_default_domain(node.domain):
            places = _WEIGHTS.get(node.op_type, ())
            read = [name for place, name in enumerate(node.input) if place in places]
            found.weights.update(read)
            if node.op_type in _RECURRENT:
                found.certain.update(read)
            if node.op_type in _PRODUCTS:
                results.products.update(node.output)
            elif node.op_type == "Add" and any(name in results.products for name in node.input):
                found.weights.update(name for name in node.input if name not in results.products)
            elif node.op_type in _HANDING_ON and node.input and node.output:
                sources = node.input if node.op_type == "Concat" else node.input[:1]
                handed += [(source, result) for source in sources for result in node.output]
                if all(name in constants for name in sources):
                    constants.update(node.output)
                for names in results[1:]:
                    if node.input[0] in names:
                        names.update(node.output)
            if node.op_type == "Pow" and any(name in halves for name in node.input[1:2]):
                results.roots.update(node.output)
            _collect_normalization(node, found, results, constants)
        for body in proto_subgraphs(node):
            _collect(body, found, results)
    for source, result in reversed(handed):
        for names in found:
            if result in names:
                names.add(source)


def _is_half(node: NodeProto) -> bool:
    """Return whether a Constant holds 0.5 or -0.5: the exponent of a root."""
    return any(abs(a.f) == 0.5 or (a.HasField("t") and _holds_half(a.t)) for a in node.attribute)


def _holds_half(tensor: TensorProto) -> bool:
    if tensor.data_type not in _FLOATING or math.prod(tensor.dims) != 1 or tensor.external_data:
        return False
    try:
        return abs(float(numpy_helper.to_array(tensor).reshape(-1)[0])) == 0.5
    except ValueError:  # its data are damaged, which reading it says
        return False


def _collect_normalization(node: NodeProto, found: _Reads, results: _Results, constants: Collection[str]) -> None:
    """Collect the scale and bias of a normalization that is written as its arithmetic."""
    given = [name for name in node.input if name in constants]
    if node.op_type in _ROOTS and not given:
        results.roots.update(node.output)
    elif node.op_type == "InstanceNormalization" or (
        node.op_type in ("Div", "Mul") and any(name in results.roots for name in node.input)
    ):
        results.normalized.update(node.output)
    elif node.op_type == "Mul" and len(given) == 1 and any(name in results.normalized for name in node.input):
        found.weights.update(given)
        found.certain.update(given)
        results.scaled.update(node.output)
    elif node.op_type == "Add" and len(given) == 1 and any(name in results.scaled for name in node.input):
        found.weights.update(given)
        found.certain.update(given)


def _names(graph: GraphProto) -> Iterator[str]:
    """The names of all values that a graph and its bodies give or hold."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    for node in graph.node:
        yield from node.output
        for body in proto_subgraphs(node):
            yield from _names(body)
