"""Floating tensors outside the initializers of the main graph: found in a file, and lifted in its working copy.

Tools write weights as Constant nodes (Paddle, some optimizers), as initializers of the bodies of If and Loop (voice
activity models), in functions, or as attributes: scikit-learn's converter writes ``LinearClassifier``,
``LinearRegressor`` and ``Scaler`` of ``ai.onnx.ml`` with lists of floats. In a working copy all floating tensors are
initializers of the main graph, so that one classification decides which are trained, and linear models are standard
operators that compute the results of ONNX Runtime's kernels; in the file they stay as they are.
"""

from __future__ import annotations

import itertools
import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, is_default_domain
from onnxtrain.graph.layers import orientation
from onnxtrain.model_file.external import drop_location
from onnxtrain.model_file.proto import all_nodes, default_opset, proto_subgraphs
from onnxtrain.model_file.protobuf_wire import Path, Template

EMBEDDED: Final = "onnxtrain.embedded"
"""Metadata key of an initializer of a working copy that is none of the file: its name there, if it may be a literal."""

_GRAPH, _FUNCTION, _ATTRIBUTE, _TENSOR, _BODY, _BODIES, _INITIALIZER = 7, 25, 5, 5, 6, 11, 5

_FLOATING = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


class EmbeddedWeight(NamedTuple):
    """A weight outside the initializers of the main graph."""

    name: str
    path: Path
    tensor: TensorProto
    mirrored: bool = False
    named: str = ""

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Convert new values to the file's layout."""
        return np.concatenate([-values, values]) if self.mirrored else values


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
        may_be_literal = not only and path[-2][0] not in (_BODY, _BODIES)
        found.append(EmbeddedWeight(name, path, tensor, mirrored, value if may_be_literal else ""))
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
            found.floats[:] = item.stored(values).reshape(-1).tolist()
    else:
        fill_tensor(found, values)


def fill_tensor(tensor: TensorProto, values: np.ndarray) -> None:
    """Set the values of a tensor, in place; name and doc string stay."""
    full = numpy_helper.from_array(np.ascontiguousarray(values))
    for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    drop_location(tensor)
    tensor.raw_data = full.raw_data


def _to_standard_operators(proto: ModelProto, linear: Sequence[tuple[Any, Any, dict[str, str]]]) -> None:
    """Replace linear models, and the Normalizer after them, by standard operators."""
    opset = default_opset(proto.opset_import) or 1
    if not linear:
        return
    softmax: set[str] = set()
    forms: dict[int, list[NodeProto]] = {}
    for _, node, names in linear:
        forms[id(node)] = _standard_form(node, names, opset=opset)
        softmax.update(made.output[0] for made in forms[id(node)] if made.op_type == "Softmax")
    for graph in _graphs(proto.graph):
        made: list[NodeProto] = []
        for node in graph.node:
            form = forms.get(id(node))
            if form is None and (node.domain, node.op_type) == (MACHINE_LEARNING_DOMAIN, "Normalizer"):
                one = node.input[0] in softmax and any(a.name == "norm" and a.s == b"L1" for a in node.attribute)
                same = NodeProto(op_type="Identity", input=node.input, output=node.output)
                form = [same] if one else _standard_form(node, {}, opset=opset)
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


_CLASSIFIER_ENDINGS = ("NONE", "LOGISTIC", "SOFTMAX")
"""Post transforms that standard operators can express."""


class AttributeWeight(NamedTuple):
    """An attribute of a node that is a weight."""

    position: int
    tensor: TensorProto
    mirrored: bool = False


def attribute_weights(node: NodeProto) -> list[AttributeWeight]:
    """Return the weights among a node's attributes; none if standard operators cannot express the node.

    Example:
        >>> node = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0, 2.0], scale=[0.5, 0.5])
        >>> [(weight.tensor.name, list(weight.tensor.dims)) for weight in attribute_weights(node)]
        [('offset', [2]), ('scale', [2])]
    """
    shapes = _shapes(node)
    if shapes is None:
        return []
    mirrored = _is_mirrored(node)
    found = []
    for position, attribute in enumerate(node.attribute):
        if attribute.name in shapes:
            values = np.array(attribute.floats, np.float32).reshape(shapes[attribute.name])
            tensor = numpy_helper.from_array(values[1:] if mirrored else values, attribute.name)
            found.append(AttributeWeight(position, tensor, mirrored))
    return found


def _standard_form(node: NodeProto, weights: Mapping[str, str], *, opset: int) -> list[NodeProto]:
    """Return standard operators that compute a node."""
    made = _StandardNodes(node, weights, opset)
    build = {"Scaler": made.scaler, "LinearRegressor": made.regressor, "LinearClassifier": made.classifier}
    build["Normalizer"] = made.normalizer
    build[node.op_type]()
    return made.nodes


def _attributes(node: NodeProto) -> dict[str, AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _shapes(node: NodeProto) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the weights by attribute; None for another or an invalid node."""
    if node.domain != MACHINE_LEARNING_DOMAIN:
        return None
    given = _attributes(node)
    if node.op_type == "Scaler":
        sizes: dict[str, tuple[int, ...]] = {
            name: (len(given[name].floats),) for name in ("offset", "scale") if name in given
        }
        return sizes if len(sizes) == 2 and (0,) not in sizes.values() else None
    if node.op_type not in ("LinearClassifier", "LinearRegressor") or "coefficients" not in given:
        return None
    count = len(given["coefficients"].floats)
    shifts = len(given["intercepts"].floats) if "intercepts" in given else None
    ending = given["post_transform"].s.decode(errors="replace") if "post_transform" in given else "NONE"
    if node.op_type == "LinearRegressor":
        rows = given["targets"].i if "targets" in given else 1
        fits = ending == "NONE" and shifts in (None, rows)
    else:
        rows, classes = shifts or 0, _class_count(given)
        fits = ending in _CLASSIFIER_ENDINGS and (rows == classes > 1 or (rows, classes) == (1, 2))
    if not fits or rows < 1 or count == 0 or count % rows:
        return None
    return {"coefficients": (rows, count // rows)} | ({} if shifts is None else {"intercepts": (rows,)})


def _class_count(given: Mapping[str, AttributeProto]) -> int:
    labels = [given[name] for name in ("classlabels_ints", "classlabels_strings") if name in given]
    return max((len(attribute.ints) + len(attribute.strings) for attribute in labels), default=0)


def _is_mirrored(node: NodeProto) -> bool:
    """Return whether a binary classifier has one score, and its negative as the other, before the logistic function."""
    given = _attributes(node)
    if "intercepts" not in given or len(given["intercepts"].floats) != 2:
        return False
    if "post_transform" not in given or given["post_transform"].s != b"LOGISTIC":
        return False
    pairs = [np.array(given[name].floats, np.float32).reshape(2, -1) for name in ("coefficients", "intercepts")]
    return all(np.array_equal(pair[0], -pair[1]) for pair in pairs)


class _StandardNodes:
    """Builder of the standard operators for one node."""

    def __init__(self, node: NodeProto, weights: Mapping[str, str], opset: int) -> None:
        self.nodes: list[NodeProto] = []
        self._node, self._weights, self._opset = node, weights, opset
        self._given = _attributes(node)
        self._prefix = f"{node.output[-1]}.{node.op_type}"

    def scaler(self) -> None:
        """y = (x - offset) scale."""
        shifted = self._add("Sub", self._floats(), self._weights["offset"])
        self._add("Mul", shifted, self._weights["scale"], output=self._node.output[0])

    def regressor(self) -> None:
        """y = x coefficients^T + intercepts."""
        self._scores(self._node.output[0])

    def classifier(self) -> None:
        """Scores, and the label of the largest one."""
        scores = self._scores()
        label, result = self._node.output
        ending = self._given["post_transform"].s if "post_transform" in self._given else b"NONE"
        single = len(self._given["intercepts"].floats) == 1
        if single or _is_mirrored(self._node):
            zero = self._constant("zero", np.zeros((1, 1), np.float32))
            above = self._add("Greater", scores, zero)
            row = self._add("Reshape", above, self._constant("rows", np.array([-1])))  # [N, 1] as [N]
            index = self._add("Cast", row, to=TensorProto.INT64)
            if ending == b"LOGISTIC":  # the final Concat marks probabilities
                pair = [self._add("Sigmoid", score) for score in (self._add("Neg", scores), scores)]
                self._add("Concat", *pair, output=result, axis=1)
            else:  # (1 - s, s), which are no probabilities
                signs = self._constant("signs", np.array([[-1, 1]], np.float32))
                shift = self._constant("shift of two", np.array([[1, 0]], np.float32))
                self._add("Add", self._add("Mul", scores, signs), shift, output=result)
        else:
            index = self._add("ArgMax", scores, axis=1, keepdims=0)
            operator = {b"NONE": "Identity", b"LOGISTIC": "Sigmoid", b"SOFTMAX": "Softmax"}[ending]
            self._add(operator, scores, output=result, **({"axis": 1} if operator == "Softmax" else {}))
        self._add("Gather", self._labels(), index, output=label)

    def normalizer(self) -> None:
        """y = x / |x| by rows, in any norm; a row of zeros is kept."""
        x, norm = self._floats(), self._given["norm"].s if "norm" in self._given else b"MAX"
        if norm == b"MAX":
            size = self._reduce("ReduceMax", x, since=18)
        else:
            size = self._reduce("ReduceSum", self._add("Abs", x) if norm == b"L1" else self._add("Mul", x, x), since=13)
        some = self._add("Cast", size, to=TensorProto.BOOL)
        one = self._add("Cast", self._add("Not", some), to=TensorProto.FLOAT)
        size = self._add("Add", size, one)  # avoids the infinite slope of the root at 0
        self._add("Div", x, self._add("Sqrt", size) if norm == b"L2" else size, output=self._node.output[0])

    def _scores(self, output: str | None = None) -> str:
        coefficients = self._weights["coefficients"]
        rows, columns = _shapes(self._node)["coefficients"]  # type: ignore[index]
        shape = self._constant("shape", np.array([-1, columns]))
        x = self._add("Reshape", self._floats(), shape)
        shift = self._weights.get("intercepts") or self._constant("shift", np.zeros(rows, np.float32))
        return self._add("Gemm", x, coefficients, shift, output=output, **orientation())

    def _floats(self) -> str:
        return self._add("Cast", self._node.input[0], to=TensorProto.FLOAT)

    def _labels(self) -> str:
        texts = self._given["classlabels_strings"].strings if "classlabels_strings" in self._given else ()
        if texts:
            return self._constant("labels", np.array([text.decode() for text in texts], object))
        return self._constant("labels", np.array(self._given["classlabels_ints"].ints, np.int64))

    def _reduce(self, operator: str, value: str, *, since: int) -> str:
        if self._opset < since:
            return self._add(operator, value, axes=[1], keepdims=1)
        return self._add(operator, value, self._constant("axis", np.array([1])), keepdims=1)

    def _constant(self, name: str, values: np.ndarray) -> str:
        tensor = numpy_helper.from_array(values)
        return self._add("Constant", output=f"{self._prefix}.{name}", value=tensor)

    def _add(self, operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name
