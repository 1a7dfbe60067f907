"""An algorithm graph under construction: loss, gradient and update beside the main graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.operator import TRAINING_DOMAIN
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.replace import set_inputs
from onnxtrain.training.losses import LossTerms
from onnxtrain.training_info.recipe import Recipe


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
    """An algorithm graph under construction, beside a copy of the main graph that it may read."""

    def __init__(self, recipe: Recipe, first_values: FirstValues, *, alone: bool = False) -> None:
        self.recipe = recipe
        self._first_values = first_values
        self.graph = recipe.model.graph
        self.op = Builder(self.graph, recipe.model.opset_imports[""])
        self.updates: dict[str, str] = {}
        self.states: dict[str, np.ndarray] = {}
        self._results: dict[ir.Value, None] = {}  # an ordered set
        self._inputs: list[ir.Value] = [] if alone or recipe.target is None else [recipe.target]
        self._before_nodes = set(self.graph)
        self._before_initializers = set(self.graph.initializers)

    def loss(self) -> LossTerms:
        """Emit the loss and give it its name."""
        self.op.scope = "loss"
        terms = self.recipe.build_loss(self.op)
        self.op.scope = ""
        return terms

    def input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> Value:
        """An input of the algorithm."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return self.op.wrap(value)

    def state(self, name: str, array: np.ndarray) -> Value:
        """A state tensor of the algorithm with its first value."""
        first = ir.Tensor(array, name=name)
        tensor = placeholder(name, first)
        value = ir.Value(name=name, const_value=tensor)
        value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
        self.graph.register_initializer(value)
        self.states[name], self._first_values.tensors[name] = array, first
        return self.op.wrap(value)

    def constant(self, name: str, array: np.ndarray) -> Value:
        """An initializer of the algorithm that nothing changes."""
        value = ir.Value(name=name, const_value=ir.Tensor(np.ascontiguousarray(array), name=name))
        assert value.const_value is not None
        value.dtype, value.shape = value.const_value.dtype, ir.Shape(array.shape)
        self.graph.register_initializer(value)
        return self.op.wrap(value)

    def update(self, state: Value, new: Value) -> None:
        """Bind a state to its next value."""
        if new.ir.producer() is None or new.ir in self._results:  # an output needs a name of its own
            new = self.op.Identity(new)
        new.ir.name = f"{state.name}_new"
        self._results[new.ir] = None
        self.updates[state.name] = new.name

    def result(self, name: str, value: Value) -> None:
        """An output that is returned, not bound."""
        value = self.op.Identity(value)
        value.ir.name = name
        value.with_shape(())
        self._results[value.ir] = None

    def gradient(self, y: Value, xs: Sequence[ir.Value]) -> list[Value]:
        """The Gradient node."""
        names = [x.name or "" for x in xs]
        y.ir.name = y.name or "objective"
        gradients = self.op.several(
            "Gradient", *map(self.op.wrap, xs), outputs=len(xs), domain=TRAINING_DOMAIN, xs=names, y=y.name
        )
        for x, gradient in zip(xs, gradients, strict=True):
            gradient.ir.type, gradient.ir.shape = x.type, x.shape
            gradient.ir.name = f"{x.name}_gradient"
        return list(gradients)

    def finish(
        self, name: str, initialization: tuple[onnx.GraphProto, dict[str, str]] | None
    ) -> onnx.TrainingInfoProto:
        """Cut what was added off the graph and return it as an entry."""
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
