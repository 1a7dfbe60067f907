"""Floating tensors outside the initializers of the main graph: found in a file, and lifted in its working copy.

Tools write weights as Constant nodes (Paddle, some optimizers), as initializers of the bodies of If and Loop (voice
activity models), in functions, or as attributes (linear models of scikit-learn, see `linear_models`). In a working copy
all floating tensors are initializers of the main graph, so that one classification decides which are trained; in the
file they stay where they are.
"""

from __future__ import annotations

import itertools
import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnxtrain.graph.domains import is_default_domain
from onnxtrain.model_file.linear_models import attribute_weights, is_normalizer, mirror, set_values, standard_form
from onnxtrain.model_file.proto import all_nodes, default_opset, proto_subgraphs
from onnxtrain.model_file.protobuf_wire import Path, Template
from onnxtrain.parameters.exporters.torchscript import is_literal_node

LITERAL: Final = "LITERAL"
"""Kind of a Constant node with the name that TorchScript's exporter gives to tensors in the code of a model."""

CONSTANT: Final = "CONSTANT_NODE"
"""Kind of another tensor that is no initializer of the main graph."""

_GRAPH, _FUNCTION, _ATTRIBUTE, _TENSOR, _BODY, _BODIES, _INITIALIZER = 7, 25, 5, 5, 6, 11, 5

_FLOATING = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


class EmbeddedWeight(NamedTuple):
    """A weight outside the initializers of the main graph."""

    name: str
    path: Path
    tensor: TensorProto
    mirrored: bool = False
    kind: str = CONSTANT

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
    outputs = {value.name for graph in _graphs(proto.graph) for value in graph.output}
    parts = [_in_nodes(proto.graph, ((_GRAPH, 0),))]
    parts += [_in_nodes(function, ((_FUNCTION, at),)) for at, function in enumerate(proto.functions)]
    found = []
    for value, path, tensor, mirrored in itertools.chain(*parts):
        numbered = (f"{value}_{number}" for number in itertools.count(1))
        is_free = value not in taken or (path[0][0] == _GRAPH and counts[value] == 1 and value not in outputs)
        name = value if is_free else next(name for name in numbered if name not in taken)
        taken.add(name)
        is_literal = not only and path[-2][0] not in (_BODY, _BODIES) and is_literal_node(value)
        found.append(EmbeddedWeight(name, path, tensor, mirrored, LITERAL if is_literal else CONSTANT))
    return found


def with_embedded(
    proto: ModelProto, template: Template, data: bytes | mmap.mmap
) -> tuple[Template, list[EmbeddedWeight]]:
    """Return a template that is cut at the embedded weights, too, and those of these weights that it can replace."""
    embedded = find_embedded(proto)
    if not embedded:
        return template, []
    cut = Template(data, [item.path for item in embedded])
    return cut, [item for item in embedded if cut.holds(item.path)]


def lift(proto: ModelProto, embedded: Sequence[EmbeddedWeight]) -> None:
    """Turn embedded weights into initializers of the main graph, in place.

    Requires: the nodes are in the order of the model whose weights were found. Ensures: values keep their names.
    """
    moved = []
    linear: dict[Path, tuple[Any, Any, dict[str, str]]] = {}
    for item in embedded:
        chain = _chain(proto, item.path)
        made = proto.graph.initializer.add()
        made.CopyFrom(item.tensor)
        made.name = item.name
        at = max(index for index, part in enumerate(chain) if isinstance(part, GraphProto | FunctionProto))
        if isinstance(chain[at + 1], TensorProto):
            moved.append((chain[1], chain[at], chain[at + 1], chain[at + 1].name, item.name))
        elif chain[at + 1].op_type == "Constant":
            moved.append((chain[1], chain[at], chain[at + 1], chain[at + 1].output[0], item.name))
        else:
            linear.setdefault(item.path[:-1], (chain[at], chain[at + 1], {}))[2][chain[-1].name] = item.name
    needs: dict[int, dict[str, None]] = {}
    for root, holder, origin, value, name in moved:
        is_node = isinstance(origin, NodeProto)
        if isinstance(root, FunctionProto):
            needs.setdefault(id(root), {})[name] = None
            name = _formal(name)
        if name != value:
            identity = NodeProto(op_type="Identity", input=[name], output=[value])
            if is_node:
                origin.CopyFrom(identity)
            else:
                holder.node.insert(0, identity)
        elif is_node:
            holder.node.remove(origin)
        if not is_node:
            holder.initializer.remove(origin)
    _hand_to_functions(proto, needs)
    _to_standard_operators(proto, [*linear.values()])


def _formal(name: str) -> str:
    """Return the name of an initializer among the inputs of a function."""
    return f"{name}/lifted"


def _hand_to_functions(proto: ModelProto, needs: dict[int, dict[str, None]]) -> None:
    """Add initializers to the inputs of functions and to their calls, in place."""
    functions = {(each.domain, each.name, each.overload): each for each in proto.functions}
    sizes = {id(each): len(each.input) for each in proto.functions}

    def calls(holder: GraphProto | FunctionProto) -> list[tuple[NodeProto, Any]]:
        found = ((node, functions.get((node.domain, node.op_type, node.overload))) for node in all_nodes(holder))
        return [(node, function) for node, function in found if function is not None]

    for _ in proto.functions if needs else ():  # functions may call others, but not themselves
        for function in proto.functions:
            for _, called in calls(function):
                if id(called) in needs:
                    needs.setdefault(id(function), {}).update(needs[id(called)])
    for holder in (proto.graph, *proto.functions) if needs else ():
        for node, called in calls(holder):
            names = needs.get(id(called), {})
            node.input.extend([""] * (sizes[id(called)] - len(node.input)) if names else [])
            node.input.extend(map(_formal, names) if isinstance(holder, FunctionProto) else names)
    for function in proto.functions:
        function.input.extend(map(_formal, needs.get(id(function), {})))


def fill(proto: ModelProto, item: EmbeddedWeight, values: np.ndarray) -> None:
    """Set the values of a weight in a model, in place."""
    found = _chain(proto, item.path)[-1]
    if isinstance(found, AttributeProto):
        if found.type == AttributeProto.FLOAT:
            found.f = float(values)
        else:
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


_Found = Iterator[tuple[str, Path, TensorProto, bool]]
"""Name, path, tensor and mirroring of weights."""


def _in_body(graph: GraphProto, path: Path) -> _Found:
    """Yield the weights of a body."""
    given = {value.name for value in graph.input}
    for index, tensor in enumerate(graph.initializer):
        if _is_weight(tensor) and tensor.name not in given:
            yield tensor.name, (*path, (_INITIALIZER, index)), tensor, False
    yield from _in_nodes(graph, path)


def _in_nodes(holder: GraphProto | FunctionProto, path: Path) -> _Found:
    """Yield the weights in the nodes of a graph or function, bodies included."""
    number = holder.DESCRIPTOR.fields_by_name["node"].number
    for index, node in enumerate(holder.node):
        at = (*path, (number, index))
        if node.op_type == "Constant" and is_default_domain(node.domain) and node.output:
            for position, attribute in enumerate(node.attribute):
                where = (*at, (_ATTRIBUTE, position))
                if attribute.HasField("t") and _is_weight(attribute.t):
                    yield node.output[0], (*where, (_TENSOR, 0)), attribute.t, False
                elif attribute.name in ("value_float", "value_floats") and not attribute.ref_attr_name:
                    values = attribute.f if attribute.type == AttributeProto.FLOAT else list(attribute.floats)
                    yield node.output[0], where, numpy_helper.from_array(np.array(values, np.float32)), False
        is_linear = node.output and isinstance(holder, GraphProto)
        for weight in attribute_weights(node) if is_linear else ():
            label = node.name or node.output[-1]
            yield f"{label}.{weight.tensor.name}", (*at, (_ATTRIBUTE, weight.position)), weight.tensor, weight.mirrored
        for position, attribute in enumerate(node.attribute):
            where = (*at, (_ATTRIBUTE, position))
            if attribute.HasField("g"):
                yield from _in_body(attribute.g, (*where, (_BODY, 0)))
            for place, body in enumerate(attribute.graphs):
                yield from _in_body(body, (*where, (_BODIES, place)))


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_type in _FLOATING and tensor.data_location != TensorProto.EXTERNAL


def _names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values that a graph and its bodies define."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    for node in graph.node:
        yield from node.output
        for body in proto_subgraphs(node):
            yield from _names(body)
