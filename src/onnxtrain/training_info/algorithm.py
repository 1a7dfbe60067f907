"""An algorithm graph under construction: loss, gradient and update beside the main graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import TrainingInfoError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.domains import TRAINING_DOMAIN
from onnxtrain.ir.replace import set_inputs
from onnxtrain.training_info.entry import Entry
from onnxtrain.training_info.recipe import LossTerms, Recipe


def placeholder(name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    """A tensor without data, like another one: a reference to a file that nobody opens."""
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor("state", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir="")


class FirstValues(Mapping[str, np.ndarray]):
    """The values that states start from, by name; each is read when it is asked for, and not kept.

    Args:
        tensors: Where they are: in a model, in its data files, or arrays of one repeated number.
    """

    def __init__(self, tensors: Mapping[str, ir.TensorProtocol]) -> None:
        self.tensors = dict(tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[name].numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Algorithm:
    """An algorithm graph under construction, beside the main graph that it may read.

    Args:
        recipe: What the training model is made from.
        first_values: Takes the values that states start from.
        label: What errors call the algorithm.
        graph: Where the nodes go: by default beside those of the main graph.
    """

    def __init__(self, recipe: Recipe, first_values: FirstValues, *, label: str, graph: ir.Graph | None = None) -> None:
        self.graph = recipe.model.graph if graph is None else graph
        self.op = Builder(self.graph, recipe.model.opset_imports[""])
        self.parameters = {name: self.graph.initializers[name] for name in recipe.parameters}
        self.updates: dict[str, str] = {}
        self.states: dict[str, np.ndarray] = {}
        self._recipe = recipe
        self._label = label
        self._first_values = first_values
        self._results: dict[ir.Value, None] = {}  # an ordered set
        self._inputs: list[ir.Value] = []
        self._before_nodes = set(self.graph)
        self._before_initializers = set(self.graph.initializers)
        self._taken = {value.name for value in (*self.graph.inputs, *self.graph.initializers.values())}
        self._taken |= {output.name for node in self._before_nodes for output in node.outputs}

    def _name(self, value: ir.Value, name: str) -> None:
        """Give a value a name of the algorithm's own.

        Raises:
            TrainingInfoError: The main graph, or the algorithm, has given it away.
        """
        if value.name != name:
            self._take(name)
            value.name = name

    def _take(self, name: str) -> None:
        if name in self._taken:
            raise TrainingInfoError(
                f"{self._label} defines {name!r}, which the main graph or the algorithm defines already; "
                "names are unique across both."
            )
        self._taken.add(name)

    def loss(self) -> LossTerms:
        """Emit the loss and give it its name."""
        self.op.scope = "loss"
        terms = self._recipe.build_loss(self.op)
        self.op.scope = ""
        for given in (self._recipe.weights, *reversed(self._recipe.targets)):
            if given is not None:
                self._take(given.name or "")
                self._inputs.insert(0, given)
        return terms

    def input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> Value:
        """An input of the algorithm."""
        self._take(name)
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return self.op.wrap(value)

    def state(self, name: str, array: np.ndarray) -> Value:
        """A state tensor of the algorithm with its first value."""
        self._take(name)
        first = ir.Tensor(array, name=name)
        tensor = placeholder(name, first)
        value = ir.Value(name=name, const_value=tensor)
        value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
        self.graph.register_initializer(value)
        self.states[name], self._first_values.tensors[name] = array, first
        return self.op.wrap(value)

    def constant(self, name: str, array: np.ndarray) -> Value:
        """An initializer of the algorithm that nothing changes."""
        self._take(name)
        value = ir.Value(name=name, const_value=ir.Tensor(np.ascontiguousarray(array), name=name))
        assert value.const_value is not None
        value.dtype, value.shape = value.const_value.dtype, ir.Shape(array.shape)
        self.graph.register_initializer(value)
        return self.op.wrap(value)

    def update(self, state: Value, new: Value) -> None:
        """Bind a state to its next value."""
        if new.ir.producer() is None or new.ir in self._results:  # an output needs a name of its own
            new = self.op.Identity(new)
        self._name(new.ir, f"{state.name}_new")
        self._results[new.ir] = None
        self.updates[state.name] = new.name

    def result(self, name: str, value: Value) -> None:
        """An output that is returned, not bound."""
        value = self.op.Identity(value)
        self._name(value.ir, name)
        value.with_shape(())
        self._results[value.ir] = None

    def gradient(self, y: Value) -> list[Value]:
        """The Gradient node: dy/dx of all parameters, of those in bfloat16 in float32."""
        wide = self._recipe.wide
        made = {str(output.name): output for node in self.graph for output in node.outputs} if wide else {}
        xs = [made[wide[name]] if name in wide else value for name, value in self.parameters.items()]
        names = [x.name or "" for x in xs]
        y.ir.name = y.name or "objective"
        gradients = self.op.several(
            "Gradient", *map(self.op.wrap, xs), outputs=len(xs), domain=TRAINING_DOMAIN, xs=names, y=y.name
        )
        for name, x, gradient in zip(self.parameters, xs, gradients, strict=True):
            gradient.ir.type, gradient.ir.shape = x.type, x.shape
            self._name(gradient.ir, f"{name}_gradient")
        return list(gradients)

    def entry(self) -> Entry:
        """What was added, and the graph that it was added to, as an entry; its states are not inputs yet."""
        self._live_nodes()
        main = {*self._before_initializers, *(str(value.name) for value in self.graph.inputs)}
        self.graph.inputs.extend(self._inputs)
        names = [str(value.name) for value in self._results]
        bound = set(self.updates.values())
        model = self._recipe.model
        if self.graph is not model.graph:
            model = ir.Model(self.graph, ir_version=model.ir_version)
        return Entry(model, [], dict(self.updates), [name for name in names if name not in bound], main)

    def cut(self, name: str, initialization: tuple[onnx.GraphProto, dict[str, str]] | None) -> onnx.TrainingInfoProto:
        """Cut what was added off the graph and return it in the standard's form."""
        graph = self.graph
        nodes = self._live_nodes()
        added = [v for k, v in graph.initializers.items() if k not in self._before_initializers]
        algorithm = onnx.GraphProto(name=name)
        algorithm.node.extend(ir.serde.serialize_node(node) for node in nodes)
        algorithm.input.extend(_info(value) for value in self._inputs)
        algorithm.output.extend(_info(value) for value in self._results)
        algorithm.initializer.extend(ir.serde.serialize_tensor(v.const_value) for v in added if v.const_value)
        entry = onnx.TrainingInfoProto(algorithm=algorithm)
        entry.update_binding.extend(_pairs(self.updates.items()))
        if initialization is not None:
            entry.initialization.CopyFrom(initialization[0])
            entry.initialization_binding.extend(_pairs(initialization[1].items()))
        _detach(graph, nodes)
        for value in added:
            graph.initializers.pop(value.name or "")
        return entry

    def _live_nodes(self) -> list[ir.Node]:
        """What was added and leads to a result; the rest is removed."""
        results = set(self._results)
        added = [node for node in self.graph if node not in self._before_nodes]
        for node in reversed(added):
            if not any(output.uses() or output in results for output in node.outputs):
                _detach(self.graph, [node])
        return [node for node in added if node.graph is self.graph]


def _detach(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    graph.remove(nodes, safe=False)
    for node in nodes:
        set_inputs(node, [None] * len(node.inputs))


def _info(value: ir.Value) -> onnx.ValueInfoProto:
    proto = onnx.ValueInfoProto()
    ir.serde.serialize_value_into(proto, value)
    return proto


def _pairs(items: Iterable[tuple[str, str]]) -> list[onnx.StringStringEntryProto]:
    return [onnx.StringStringEntryProto(key=key, value=value) for key, value in items]
