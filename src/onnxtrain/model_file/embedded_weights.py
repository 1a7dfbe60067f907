"""Weights outside the initializers of the main graph: found in a file, and lifted in its working copy.

Tools write weights as Constant nodes (Paddle, some optimizers), as initializers of the bodies of If and Loop (voice
activity models), or as attributes (linear models of scikit-learn, see `linear_models`). In a working copy they are
initializers of the main graph; in the file they stay where they are. The operators that read a constant decide whether
it is a weight.
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
from onnxtrain.model_file.linear_models import attribute_weights, is_normalizer, mirror, set_values, standard_form
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
"""Input slots of weights by operator."""

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Operators whose weights are never literals in code."""

_LINEAR = frozenset({"MatMul", "Conv", "ConvTranspose", "Gemm"})
_PASS_THROUGH = frozenset(
    {"Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Slice", "Split", "Concat"}
)
_ROOTS = frozenset({"Sqrt", "Reciprocal"})


class EmbeddedWeight(NamedTuple):
    """A weight outside the initializers of the main graph.

    Attributes:
        name: Name of the initializer in a working copy: the value's name in the file, with a number if several bodies
            have a value of this name.
        path: Path of its tensor, or of the attribute with its values.
        tensor: The tensor.
        mirrored: True where the attribute holds the negative, too (see `linear_models`).
    """

    name: str
    path: Path
    tensor: TensorProto
    mirrored: bool = False

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Convert new values to the file's layout."""
        return mirror(values) if self.mirrored else values


def find_embedded(proto: ModelProto) -> list[EmbeddedWeight]:
    """Return the weights in Constant nodes, attributes and bodies of a model, in the order of the file.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n, 1] x) => (float[n, 2] y) {
        ...   w = Constant <value = float[1, 2] {1.0, 2.0}> ()  y = MatMul(x, w) }''')
        >>> [(item.name, item.path) for item in find_embedded(model)]
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
        found.append(EmbeddedWeight(name, path, tensor, mirrored))
    return found


def with_embedded(
    proto: ModelProto, template: Template, data: bytes | mmap.mmap
) -> tuple[Template, list[EmbeddedWeight]]:
    """Return a template that is cut at the embedded weights, too, and these weights; none if one cannot be cut.

    Args:
        proto: The model.
        template: Its bytes, cut at the initializers of the main graph.
        data: Its bytes.
    """
    embedded = find_embedded(proto)
    if not embedded:
        return template, []
    cut = Template(data, [item.path for item in embedded])
    return (cut, embedded) if all(cut.holds(item.path) for item in embedded) else (template, [])


def lift(proto: ModelProto, embedded: Sequence[EmbeddedWeight]) -> None:
    """Turn embedded weights into initializers of the main graph, in place.

    Requires: the nodes are in the order of the model whose weights were found. Ensures: values keep their names.
    """
    moved = []
    linear: dict[Path, tuple[Any, Any, dict[str, str]]] = {}
    for item in embedded:
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


def fill(proto: ModelProto, item: EmbeddedWeight, values: np.ndarray) -> None:
    """Set the values of a weight in a model, in place."""
    found = _chain(proto, item.path)[-1]
    if isinstance(found, AttributeProto):
        set_values(found, item.stored(values))
    else:
        fill_tensor(found, values)


def fill_tensor(tensor: TensorProto, values: np.ndarray) -> None:
    """Set the values of a tensor, in place; name and doc string stay."""
    full = numpy_helper.from_array(np.ascontiguousarray(values))
    for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data"):
        tensor.ClearField(field)
    tensor.ClearField("data_location")
    tensor.raw_data = full.raw_data


def _to_standard_operators(proto: ModelProto, linear: Sequence[tuple[Any, Any, dict[str, str]]]) -> None:
    """Replace linear models, and the Normalizer after them, by standard operators."""
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
    """Yield a graph and the graphs of its bodies, inner ones first."""
    for node in graph.node:
        for body in proto_subgraphs(node):
            yield from _graphs(body)
    yield graph


def _chain(proto: ModelProto, path: Path) -> list[Any]:
    """Return the messages on a path."""
    chain: list[Any] = [proto]
    for number, index in path:
        field = chain[-1].DESCRIPTOR.fields_by_number[number]
        value = getattr(chain[-1], field.name)
        chain.append(value if field.name in ("graph", "t", "g") else value[index])
    return chain


def _weights(graph: GraphProto, path: Path, *, literal: bool) -> Iterator[tuple[str, Path, TensorProto, bool]]:
    """Yield name, path, tensor and mirroring of a graph's weights, bodies included."""
    outputs = {value.name for value in graph.output}
    reads = _weight_reads(graph)
    if len(path) > 1:
        given = {value.name for value in graph.input}
        for index, tensor in enumerate(graph.initializer):
            if _is_weight(tensor) and tensor.name in reads.weights and tensor.name not in outputs | given:
                yield tensor.name, (*path, (_INITIALIZER, index)), tensor, False
    for index, node in enumerate(graph.node):
        at = (*path, (_NODE, index))
        if node.op_type == "Constant" and is_default_domain(node.domain) and node.output:
            value = node.output[0]
            is_literal = not literal and value not in reads.certain and _is_written_in_code(node)
            kept = value in outputs or value not in reads.weights or is_literal
            for index, attribute in enumerate(node.attribute):
                if not kept and attribute.HasField("t") and _is_weight(attribute.t):
                    yield node.output[0], (*at, (_ATTRIBUTE, index), (_TENSOR, 0)), attribute.t, False
        for weight in attribute_weights(node) if node.output else ():
            label = node.name or node.output[-1]
            yield f"{label}.{weight.tensor.name}", (*at, (_ATTRIBUTE, weight.position)), weight.tensor, weight.mirrored
        for index, attribute in enumerate(node.attribute):
            if attribute.HasField("g"):
                yield from _weights(attribute.g, (*at, (_ATTRIBUTE, index), (_BODY, 0)), literal=literal)
            for number, body in enumerate(attribute.graphs):
                yield from _weights(body, (*at, (_ATTRIBUTE, index), (_BODIES, number)), literal=literal)


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_type in _FLOATING and math.prod(tensor.dims) > 1 and tensor.data_location != TensorProto.EXTERNAL


def _is_written_in_code(node: NodeProto) -> bool:
    """Return whether TorchScript's exporter named the Constant as a literal in code."""
    return "Constant" in node.output[0].rsplit("/", 1)[-1] or node.output[0].isdigit()


class _Reads(NamedTuple):
    """Names of values that nodes read as weights.

    Attributes:
        weights: All of them.
        certain: Those that cannot be literals in code: weights of recurrent layers, scales of normalizations.
    """

    weights: set[str]
    certain: set[str]


def _weight_reads(graph: GraphProto) -> _Reads:
    """Return the names of values that nodes of a graph and its bodies read as weights."""
    found = _Reads(set(), set())
    _collect(graph, found, _Results(set(), set(), set(), set()))
    return found


class _Results(NamedTuple):
    """Names of values by the operation that computes them.

    Attributes:
        linear: Linear layers.
        roots: Square roots and their reciprocals: standard deviations.
        normalized: Quotients by roots, and InstanceNormalization.
        scaled: Normalized values times a scale.
    """

    linear: set[str]
    roots: set[str]
    normalized: set[str]
    scaled: set[str]


def _collect(graph: GraphProto, found: _Reads, outer: _Results) -> None:
    passed_on: list[tuple[str, str]] = []
    results = _Results(*(set(names) for names in outer))
    constants = {node.output[0] for node in graph.node if node.op_type == "Constant" and node.output}
    constants |= {tensor.name for tensor in graph.initializer}
    half_constants = {
        name for node in graph.node if node.op_type == "Constant" and _is_half(node) for name in node.output[:1]
    }
    half_constants |= {tensor.name for tensor in graph.initializer if _holds_half(tensor)}
    for node in graph.node:
        if is_default_domain(node.domain):
            places = _WEIGHTS.get(node.op_type, ())
            read = [name for index, name in enumerate(node.input) if index in places]
            found.weights.update(read)
            if node.op_type in _RECURRENT:
                found.certain.update(read)
            if node.op_type in _LINEAR:
                results.linear.update(node.output)
            elif node.op_type == "Add" and any(name in results.linear for name in node.input):
                found.weights.update(name for name in node.input if name not in results.linear)
            elif node.op_type in _PASS_THROUGH and node.input and node.output:
                sources = node.input if node.op_type == "Concat" else node.input[:1]
                passed_on += [(source, result) for source in sources for result in node.output]
                if all(name in constants for name in sources):
                    constants.update(node.output)
                for names in results[1:]:
                    if node.input[0] in names:
                        names.update(node.output)
            if node.op_type == "Pow" and any(name in half_constants for name in node.input[1:2]):
                results.roots.update(node.output)
            _collect_normalization(node, found, results, constants)
        for body in proto_subgraphs(node):
            _collect(body, found, results)
    for source, result in reversed(passed_on):
        for names in found:
            if result in names:
                names.add(source)


def _is_half(node: NodeProto) -> bool:
    """Return whether a Constant is 0.5 or -0.5, the exponent of a root."""
    return any(abs(a.f) == 0.5 or (a.HasField("t") and _holds_half(a.t)) for a in node.attribute)


def _holds_half(tensor: TensorProto) -> bool:
    if tensor.data_type not in _FLOATING or math.prod(tensor.dims) != 1 or tensor.external_data:
        return False
    try:
        return abs(float(numpy_helper.to_array(tensor).reshape(-1)[0])) == 0.5
    except ValueError:  # its data is damaged, which is reported when it is read
        return False


def _collect_normalization(node: NodeProto, found: _Reads, results: _Results, constants: Collection[str]) -> None:
    """Collect scale and bias of a normalization that is decomposed into arithmetic."""
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
    """Yield the names of all values that a graph and its bodies define."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    for node in graph.node:
        yield from node.output
        for body in proto_subgraphs(node):
            yield from _names(body)
