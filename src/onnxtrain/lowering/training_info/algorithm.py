"""Build algorithm graphs: loss, gradient, gradient accumulation, clipping and update, beside the main graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import TrainingInfoError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.graph.replace import set_inputs
from onnxtrain.graph.value import add_initializer
from onnxtrain.lowering.training_info.recipe import MASK, LossTerms, StepEntry, StepSpec
from onnxtrain.lowering.training_info.rounding import Rounding, widened
from onnxtrain.lowering.training_info.update import AVERAGE, average_node, norm_of, optimizer_nodes, row_squares
from onnxtrain.operators.schema import State


def placeholder(name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    """Return a tensor without data, of the type and shape of another: a reference to a file that is never opened."""
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor("state", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir="")


class FirstValues(Mapping[str, np.ndarray]):
    """First values of states by name, read lazily and not cached."""

    def __init__(self, tensors: Mapping[str, ir.TensorProtocol]) -> None:
        self.tensors = dict(tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[name].numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Algorithm:
    """An algorithm graph under construction, beside the main graph that it may read."""

    def __init__(self, spec: StepSpec, first_values: FirstValues, *, label: str, graph: ir.Graph | None = None) -> None:
        self.graph = spec.model.graph if graph is None else graph
        self.op = Builder(self.graph)
        self.parameters = {name: self.graph.initializers[name] for name in spec.parameters}
        self.updates: dict[str, str] = {}
        self.states: dict[str, np.ndarray] = {}
        self._spec = spec
        self._label = label
        self._first_values = first_values
        self._results: dict[ir.Value, None] = {}  # an ordered set
        self._inputs: list[ir.Value] = []
        self._before_nodes = set(self.graph)
        self._before_initializers = set(self.graph.initializers)
        self._taken = {*ir.convenience.create_value_mapping(self.graph, include_subgraphs=False)}

    def _name(self, value: ir.Value, name: str) -> None:
        """Rename a value of the algorithm."""
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
        """Emit the loss; targets and sample weights become inputs of the algorithm."""
        self.op.scope = "loss"
        terms = self._spec.build_loss(self.op)
        self.op.scope = ""
        for given in (self._spec.weights, *reversed(self._spec.targets)):
            if given is not None:
                self._take(given.name or "")
                self._inputs.insert(0, given)
        return terms

    def input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> Value:
        """Add an input of the algorithm."""
        self._take(name)
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return self.op.wrap(value)

    def state(self, name: str, array: np.ndarray) -> Value:
        """Add a state of the algorithm with its first value."""
        self._take(name)
        first = ir.Tensor(array, name=name)
        self.states[name], self._first_values.tensors[name] = array, first
        return self.op.wrap(add_initializer(self.graph, placeholder(name, first)))

    def constant(self, name: str, array: np.ndarray) -> Value:
        """Add a constant initializer of the algorithm."""
        self._take(name)
        return self.op.wrap(add_initializer(self.graph, ir.Tensor(np.ascontiguousarray(array), name=name)))

    def update(self, state: Value, new: Value) -> None:
        """Bind a state to its next value."""
        if new.ir.producer() is None or new.ir in self._results:  # an output needs a name of its own
            new = self.op.Identity(new)
        self._name(new.ir, f"{state.name}_new")
        self._results[new.ir] = None
        self.updates[state.name] = new.name

    def result(self, name: str, value: Value) -> None:
        """Add an output without a binding, which a step returns."""
        value = self.op.Identity(value)
        self._name(value.ir, name)
        value.with_shape(())
        self._results[value.ir] = None

    def gradient(self, y: Value) -> list[Value]:
        """Emit the Gradient node: dy/dx for all parameters; in float32 for parameters in bfloat16."""
        wide = self._spec.wide
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

    def write_step(self) -> None:
        """Write loss, gradient and update."""
        terms = self.loss()
        gradients = self._masked(self.gradient(terms.loss))
        self._update(self._clip(gradients))
        self.updates.update(self._spec.statistics)
        self._return(terms)

    def _return(self, terms: LossTerms) -> None:
        self.result(self._spec.names.loss, terms.loss)
        for name, part in terms.parts.items():
            self.result(name, part)

    def write_accumulation(self) -> None:
        """Write accumulator += weight * gradient, total += weight, loss_total += weight * loss."""
        op = self.op
        if drops(self._spec):
            self._count()  # the dropout masks depend on it
        terms = self.loss()
        scaled = terms.loss if terms.sums else terms.loss * terms.weight
        weight = op.scalar(0, terms.loss) if terms.sums else terms.weight
        gradients = self._masked(self.gradient(scaled))
        for (name, value), gradient in zip(self.parameters.items(), gradients, strict=True):
            accumulator = self.state(f"{name}/accumulated", _repeated(0.0, value))
            self.update(accumulator, gradient if self._spec.alone else accumulator + gradient)
        for total_name, term in (("accumulated_weight", weight), ("accumulated_loss", scaled)):
            total, term = self.state(total_name, np.zeros((), np.float64)), op.cast(term, ir.DataType.DOUBLE)
            # A double term may be the value that the Gradient node names; Identity lets it keep its name.
            self.update(total, op.Identity(term) if self._spec.alone else total + term)
        self.updates.update(self._spec.statistics)
        self._return(terms)

    def write_application(self) -> None:
        """Write gradient = accumulator / total, the update, and, if specified, the reset of the accumulators."""
        op = self.op
        weight = self.state("accumulated_weight", np.zeros((), np.float64))
        total = self.state("accumulated_loss", np.zeros((), np.float64))
        divisor = op.Where(op.binary("Equal", weight, 0), 1, weight)  # with weight 0, sums are 0 or need no division
        accumulators = [
            self.state(f"{name}/accumulated", _repeated(0.0, value)) for name, value in self.parameters.items()
        ]
        self._update(self._clip(accumulators, 1 / divisor))
        self.result(self._spec.names.loss, op.cast(total / divisor, ir.DataType.FLOAT))
        for state in accumulators if self._spec.cleared else ():
            self.update(state, op.zeros_like(state))
        for state in (weight, total) if self._spec.cleared else ():
            self.update(state, op.scalar(0.0, state))

    def _masked(self, gradients: list[Value]) -> list[Value]:
        """Set gradients to zero where the mask is false, so that every update rule keeps zero weights and states."""
        op = self.op
        masked = []
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if name in self._spec.masks:
                mask = self.constant(f"{name}{MASK}", self._spec.masks[name])
                gradient = op.Where(mask, gradient, op.scalar(0.0, gradient)).with_shape(gradient.shape)
            masked.append(gradient)
        return masked

    def _clip(self, gradients: list[Value], scale: Value | None = None) -> list[Value]:
        """Return gradients, scaled and clipped by one multiplication, which updates can fuse."""
        op, clipping = self.op, self._spec.clipping
        if any(g.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) for g in gradients):
            gradients, scale = _scaled(op, gradients, scale), None  # squares of unscaled sums overflow float16
        if clipping.value is not None:
            bound, scale, scaled = clipping.value, None, _scaled(op, gradients, scale)
            gradients = [op.Clip(g, op.scalar(-bound, g), op.scalar(bound, g)).with_shape(g.shape) for g in scaled]
        if clipping.norm is None:
            return _scaled(op, gradients, scale)
        if self._spec.given_squares is None:
            shapes = [_shape(value) for value in self.parameters.values()]
            squares = [row_squares(op, g, shape) for g, shape in zip(gradients, shapes, strict=True)]
        else:
            squares = [self.state(*item) for item in self._spec.given_squares.items()]
        norm = norm_of(op, squares)
        if scale is not None:
            norm = norm * scale
        # min(1, bound / norm) in a form that is correct for norm = 0 and propagates NaN.
        factor = op.scalar(clipping.norm, norm) / op.Max(norm, op.scalar(clipping.norm, norm))
        return _scaled(op, gradients, factor if scale is None else factor * scale)

    def _count(self) -> Value:
        return self.state(self._spec.names.count, np.asarray(self._spec.optimizer.schema.first_count, np.int64))

    def _update(self, gradients: Sequence[Value]) -> None:
        """Write one optimizer node per update rule (two if only some parameters are sparsified), and T + 1."""
        op = self.op
        rate = self.input(self._spec.names.learning_rate, ir.DataType.FLOAT, ())
        count = self._count()
        held = {name: op.wrap(value) for name, value in self.parameters.items()}
        states: dict[str, dict[str, tuple[Value, ...]]] = {name: {} for name in held}
        rules = {name: self._spec.rule_of(name) for name in held}
        optimizers = {id(rule.optimizer): rule.optimizer for rule in rules.values()}
        used = {key: optimizer.states for key, optimizer in optimizers.items()}
        for role in self._spec.optimizer.schema.states:
            for name, value in self.parameters.items():
                if role in used[id(rules[name].optimizer)]:
                    states[name][role.name] = self._state(f"{name}/{role.name}", role, value)
        op.scope = "update"
        xs = {name: widened(op, (value,), "X") for name, value in held.items()}
        variables = {
            name: (xs[name], gradient, *(widened(op, kept, letter) for letter, kept in states[name].items()))
            for name, gradient in zip(xs, gradients, strict=True)
        }
        sparsified = self._spec.sparsified
        if sparsified is None:
            sparsified = {name: () for name, value in self.parameters.items() if len(_shape(value)) >= 2}
        news = optimizer_nodes(op, rules, rate, count, variables, sparsified)
        own_rounding = Rounding("bfloat16", self._spec.seed)
        for name, own in news.items():
            for new in own:
                new.ir.type, new.ir.shape = xs[name].ir.type, xs[name].ir.shape
            (x,) = own_rounding.rounded(op, (held[name],), "X", own[0], count)
            self.update(held[name], x)
            for (letter, kept), new in zip(states[name].items(), own[1:], strict=True):
                rounding = self._spec.rounding
                to_keep = (new,) if rounding is None else rounding.rounded(op, kept, letter, new, count)
                for old, part in zip(kept, to_keep, strict=True):
                    self.update(old, part)
        if self._spec.averaging is not None:
            self._average(count, {name: own[0] for name, own in news.items()})
        self.update(count, count + 1)
        op.scope = ""

    def _state(self, name: str, role: State, parameter: ir.Value) -> tuple[Value, ...]:
        """Return the tensors of a state of a parameter."""
        first, rounding = _repeated(role.initial, parameter), self._spec.rounding
        kept = {name: first} if rounding is None else rounding.first_values(name, first)
        return tuple(self.state(*item) for item in kept.items())

    def _average(self, count: Value, xs: Mapping[str, Value]) -> None:
        """Write the moving averages, which start at zero and equal the parameters after the first update."""
        assert self._spec.averaging is not None
        averages = {
            name: self.state(f"{name}/{AVERAGE}", _repeated(0.0, value)) for name, value in self.parameters.items()
        }
        first = self._spec.optimizer.schema.first_count
        for name, new in average_node(self.op, self._spec.averaging, count, first, averages, xs).items():
            self.update(averages[name], new)

    def entry(self) -> StepEntry:
        """Return the algorithm and its graph as an entry, whose states are not yet inputs."""
        self._live_nodes()
        main = {*self._before_initializers, *(str(value.name) for value in self.graph.inputs)}
        self.graph.inputs.extend(self._inputs)
        names = [str(value.name) for value in self._results]
        bound = set(self.updates.values())
        model = self._spec.model
        if self.graph is not model.graph:
            model = ir.Model(self.graph, ir_version=model.ir_version)
        return StepEntry(model, [], dict(self.updates), [name for name in names if name not in bound], main)

    def cut(self, name: str, initialization: tuple[onnx.GraphProto, dict[str, str]] | None) -> onnx.TrainingInfoProto:
        """Remove the algorithm from the graph and return it as a ``TrainingInfoProto``."""
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
        """Return the added nodes that lead to a result; remove the others."""
        results = set(self._results)
        added = [node for node in self.graph if node not in self._before_nodes]
        for node in reversed(added):
            if not any(output.uses() or output in results for output in node.outputs):
                _detach(self.graph, [node])
        return [node for node in added if node.graph is self.graph]


def drops(spec: StepSpec) -> bool:
    """Return whether the main graph samples dropout masks, from seeds."""
    return any(node.op_type == "Dropout" and "seed" in node.attributes for node in spec.model.graph)


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


def _scaled(op: Builder, gradients: list[Value], scale: Value | None) -> list[Value]:
    """Multiply gradients by a scalar."""
    if scale is None:
        return gradients
    scales = {dtype: op.cast(scale, dtype) for dtype in dict.fromkeys(g.dtype for g in gradients)}
    return [(g * scales[g.dtype]).with_shape(g.shape) for g in gradients]


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None
    return tuple(int(size) for size in value.shape.numpy())


def _repeated(number: float, like: ir.Value) -> np.ndarray:
    """Return a value broadcast to the type and shape of another, without allocating memory."""
    return _repeated_number(number, _dtype(like), _shape(like))


@functools.lru_cache(256)
def _repeated_number(number: float, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return a cached array; it is read-only, so that all states of a shape can share it."""
    return np.broadcast_to(np.asarray(number, dtype), shape)


def _dtype(value: ir.Value) -> np.dtype[Any]:
    """Return the type in which a value is computed."""
    assert value.dtype is not None
    return np.dtype(np.float32) if value.dtype == ir.DataType.BFLOAT16 else value.dtype.numpy()
