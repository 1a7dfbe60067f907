"""Write a training model: the standard's ``TrainingInfoProto`` for a model, a loss and an optimizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN, TRAINING_DOMAIN
from onnxtrain.operators.schema import State
from onnxtrain.training_info.algorithm import Algorithm, FirstValues, placeholder
from onnxtrain.training_info.entry import COUNTERS_KEY, SYNCHRONIZED_KEY, Entry
from onnxtrain.training_info.recipe import LossTerms, Recipe
from onnxtrain.training_info.rounding import BFLOAT16, Rounding, widened
from onnxtrain.training_info.update import AVERAGE, average_node, optimizer_nodes


class UnfilledModel(NamedTuple):
    """A training model whose states have no data, and the values that they start from.

    Attributes:
        proto: The training model; the initializers of states are placeholders.
        values: First values by name.
    """

    proto: onnx.ModelProto
    values: FirstValues

    def filled(self) -> onnx.ModelProto:
        """The training model with all its data."""
        result = onnx.ModelProto()
        result.CopyFrom(self.proto)
        return fill_states(result, self.values)


def fill_states(model: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Give the initializers of states these values, in place."""
    for graph in (model.graph, *(entry.algorithm for entry in model.training_info)):
        for tensor in graph.initializer:
            if tensor.name in values:
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(values[tensor.name], order="C"), tensor.name))
    return model


def build_training_model(recipe: Recipe) -> onnx.ModelProto:
    """The training model of a recipe, with all its data; see :func:`build_unfilled`."""
    return build_unfilled(recipe).filled()


def build_unfilled(recipe: Recipe) -> UnfilledModel:
    """The training model of a recipe.

    Its main graph is the model. Each algorithm graph takes the target and ``learning_rate``, reads the main
    graph, and holds the loss, one Gradient node, one optimizer node and the update count ``T``; optimizer
    states are initializers of the algorithm named ``{parameter}/{state}``. An initialization graph sets them
    and T back to their first values.

    Without accumulation there is one entry. With it the first entry adds weight * gradient and weight of a
    micro-batch to accumulators, the second divides, updates and clears them: several micro-batches make
    exactly the step of the large batch.
    """
    values = _first_values(recipe)
    proto = _main_model(recipe, values.tensors)
    proto.training_info.extend(
        build.algorithm.cut(build.name, _initialization(build.algorithm)) for build in _builds(recipe, values)
    )
    helper.set_model_props(proto, _metadata(proto) | _said(recipe))
    domains = {entry.domain for entry in proto.opset_import}
    for domain in sorted(_imported(recipe) - domains):
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    return UnfilledModel(proto, values)


def build_entries(recipe: Recipe) -> tuple[list[Entry], FirstValues]:
    """The entries of a recipe's training model as graphs, without a detour through its file; uses the recipe up.

    Returns:
        The entries, and the values that their states start from, by name.
    """
    values = _first_values(recipe)
    entries = [build.algorithm.entry() for build in _builds(recipe, values, apart=True)]
    for entry in entries:
        _finish(entry, recipe, values)
    return entries, values


def build_update(recipe: Recipe) -> tuple[Entry, FirstValues]:
    """The entry that applies what was accumulated, on a model of nothing but parameters; uses the recipe up."""
    values = _first_values(recipe)
    entry = _Writer(recipe).applying(Algorithm(recipe, values, label="the update")).entry()
    _finish(entry, recipe, values)
    return entry, values


def _finish(entry: Entry, recipe: Recipe, values: FirstValues) -> None:
    """Make the states inputs, and say what a file would say."""
    entry.states = list(values)
    model, graph = entry.model, entry.model.graph
    for name in [name for name in graph.initializers if name in values.tensors]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
    model.metadata_props.clear()
    model.metadata_props.update(_said(recipe) | ({SYNCHRONIZED_KEY: "true"} if recipe.synchronized else {}))
    for domain in sorted(_imported(recipe)):
        graph.opset_imports.setdefault(domain, 1)


def _imported(recipe: Recipe) -> set[str]:
    """The domains of the operators of algorithms."""
    own = set() if recipe.averaging is None and recipe.rounding is None and not recipe.wide else {ONNXTRAIN_DOMAIN}
    return {TRAINING_DOMAIN, recipe.optimizer.schema.domain} | own


def _said(recipe: Recipe) -> dict[str, str]:
    """What the metadata says about how a step is built: the nodes have no attributes for it."""
    said = recipe.options.entries()
    if _drops(recipe):
        several = recipe.micro_batches and not recipe.alone
        counters = [recipe.names.count, "accumulated_weight"] if several else [recipe.names.count]
        said[COUNTERS_KEY] = json.dumps(counters)
    return said


def _drops(recipe: Recipe) -> bool:
    """Whether the main graph draws masks of Dropout, from seeds."""
    return any(node.op_type == "Dropout" and "seed" in node.attributes for node in recipe.model.graph)


def _first_values(recipe: Recipe) -> FirstValues:
    initializers = recipe.model.graph.initializers
    tensors = {name: initializers[name].const_value for name in (*recipe.parameters, *recipe.statistics)}
    return FirstValues({name: tensor for name, tensor in tensors.items() if tensor is not None})


def _metadata(proto: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def _main_model(recipe: Recipe, tensors: Mapping[str, ir.TensorProtocol]) -> onnx.ModelProto:
    """The main graph with placeholders for its states."""
    model = recipe.model
    outputs = [value.name for value in model.graph.outputs]
    by_name = {output.name: output for node in model.graph for output in node.outputs}
    for name in recipe.statistics.values():
        if name not in outputs:
            model.graph.outputs.append(by_name[name])
    try:
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = placeholder(name, tensor)
        return ir.to_proto(model)
    finally:
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = tensor


class _Build(NamedTuple):
    """An algorithm that is complete, and its name."""

    name: str
    algorithm: Algorithm


def _builds(recipe: Recipe, first_values: FirstValues, *, apart: bool = False) -> Iterator[_Build]:
    """Build the algorithms one after the other; each is to be cut off before the next, or ``apart`` from it."""
    writer = _Writer(recipe)
    if not recipe.micro_batches:
        yield _Build("training", writer.step(Algorithm(recipe, first_values, label="training_info[0].algorithm")))
        return
    first = Algorithm(recipe, first_values, label="training_info[0].algorithm")
    # The second reads nothing of the main graph but its parameters.
    graph = _parameters_alone(recipe) if apart else None
    yield _Build("accumulate", writer.accumulating(first))
    second = Algorithm(recipe, first_values, label="training_info[1].algorithm", graph=graph)
    yield _Build("apply", writer.applying(second))


def _parameters_alone(recipe: Recipe) -> ir.Graph:
    """A graph of nothing but the parameters."""
    model = recipe.model
    values = [model.graph.initializers[name] for name in recipe.parameters]
    copies = [ir.Value(name=v.name, type=v.type, shape=v.shape, const_value=v.const_value) for v in values]
    imports = dict(model.graph.opset_imports)
    return ir.Graph([], [], nodes=[], initializers=copies, opset_imports=imports, name="apply")


class _Writer:
    """Writes the algorithms of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.schema = recipe.optimizer.schema

    def step(self, builder: Algorithm) -> Algorithm:
        """Loss, gradient and update in one."""
        terms = builder.loss()
        gradients = self._masked(builder, builder.gradient(terms.loss))
        self._update(builder, self._clip(builder.op, gradients))
        builder.updates.update(self.recipe.statistics)
        self._return(builder, terms)
        return builder

    def _return(self, builder: Algorithm, terms: LossTerms) -> None:
        builder.result(self.recipe.names.loss, terms.loss)
        for name, part in terms.parts.items():
            builder.result(name, part)

    def accumulating(self, builder: Algorithm) -> Algorithm:
        """accumulator += weight * gradient, total += weight, loss_total += weight * loss.

        Of a loss that is a sum, gradients and losses are added as they are, and nothing is divided.
        """
        op = builder.op
        if _drops(self.recipe):
            self._count(builder)  # masks are drawn by it
        terms = builder.loss()
        scaled = terms.loss if terms.sums else terms.loss * terms.weight
        weight = op.scalar(0, terms.loss) if terms.sums else terms.weight
        gradients = self._masked(builder, builder.gradient(scaled))
        for (name, value), gradient in zip(builder.parameters.items(), gradients, strict=True):
            accumulator = builder.state(f"{name}/accumulated", _repeated(0.0, value))
            builder.update(accumulator, gradient if self.recipe.alone else accumulator + gradient)
        for total_name, term in (("accumulated_weight", weight), ("accumulated_loss", scaled)):
            total, term = builder.state(total_name, np.zeros((), np.float64)), op.cast(term, ir.DataType.DOUBLE)
            # Alone, of type double, it is what the Gradient node names, and keeps that name.
            builder.update(total, op.Identity(term) if self.recipe.alone else total + term)
        builder.updates.update(self.recipe.statistics)
        self._return(builder, terms)
        return builder

    def applying(self, builder: Algorithm) -> Algorithm:
        """gradient = accumulator / total; update; clear the accumulators, where that is asked for."""
        op = builder.op
        weight = builder.state("accumulated_weight", np.zeros((), np.float64))
        total = builder.state("accumulated_loss", np.zeros((), np.float64))
        divisor = op.Where(op.binary("Equal", weight, 0), 1, weight)  # where nothing counted, all sums are 0
        accumulators = [
            builder.state(f"{name}/accumulated", _repeated(0.0, value)) for name, value in builder.parameters.items()
        ]
        self._update(builder, self._clip(op, accumulators, 1 / divisor))
        builder.result(self.recipe.names.loss, op.cast(total / divisor, ir.DataType.FLOAT))
        for state in accumulators if self.recipe.cleared else ():
            builder.update(state, op.zeros_like(state))
        for state in (weight, total) if self.recipe.cleared else ():
            builder.update(state, op.scalar(0.0, state))
        return builder

    def _masked(self, builder: Algorithm, gradients: list[Value]) -> list[Value]:
        """Zero where the mask is false: every update rule then keeps a zero weight and its states at zero."""
        op = builder.op
        masked = []
        for name, gradient in zip(builder.parameters, gradients, strict=True):
            if name in self.recipe.masks:
                mask = builder.constant(f"{name}/mask", self.recipe.masks[name])
                gradient = op.Where(mask, gradient, op.scalar(0.0, gradient)).with_shape(gradient.shape)
            masked.append(gradient)
        return masked

    def _clip(self, op: Builder, gradients: list[Value], scale: Value | None = None) -> list[Value]:
        """Gradients, times a scale where there is one, after clipping: of all products one, which updates take in."""
        clipping = self.recipe.clipping
        if any(g.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) for g in gradients):
            gradients, scale = _scaled(op, gradients, scale), None  # squares of sums leave the range of float16
        if clipping.value is not None:
            bound, scale, scaled = clipping.value, None, _scaled(op, gradients, scale)
            gradients = [op.Clip(g, op.scalar(-bound, g), op.scalar(bound, g)).with_shape(g.shape) for g in scaled]
        if clipping.norm is None:
            return _scaled(op, gradients, scale)
        squares = [op.cast(op.ReduceSumSquare(g, keepdims=0), ir.DataType.DOUBLE) for g in gradients]
        norm = op.Sqrt(op.sum_of(squares))
        if scale is not None:
            norm = norm * scale
        # min(1, bound / norm) in a form that is right for norm = 0 and lets NaN through.
        factor = op.scalar(clipping.norm, norm) / op.Max(norm, op.scalar(clipping.norm, norm))
        return _scaled(op, gradients, factor if scale is None else factor * scale)

    def _count(self, builder: Algorithm) -> Value:
        return builder.state(self.recipe.names.count, np.asarray(self.schema.first_count, np.int64))

    def _update(self, builder: Algorithm, gradients: Sequence[Value]) -> None:
        """One optimizer node over all parameters that are updated alike, two where only some are sparsified; T + 1."""
        op = builder.op
        rate = builder.input(self.recipe.names.learning_rate, ir.DataType.FLOAT, ())
        count = self._count(builder)
        held = {name: op.wrap(value) for name, value in builder.parameters.items()}
        states: dict[str, dict[str, tuple[Value, ...]]] = {name: {} for name in held}
        rules = {name: self.recipe.rule_of(name) for name in held}
        used = {id(rule.optimizer): rule.optimizer.states for rule in rules.values()}
        for role in self.schema.states:
            for name, value in builder.parameters.items():
                if role in used[id(rules[name].optimizer)]:
                    states[name][role.name] = self._state(builder, f"{name}/{role.name}", role, value)
        op.scope = "update"
        xs = {name: widened(op, (value,), "X") for name, value in held.items()}
        variables = {
            name: (xs[name], gradient, *(widened(op, kept, letter) for letter, kept in states[name].items()))
            for name, gradient in zip(xs, gradients, strict=True)
        }
        sparsified = self.recipe.sparsified
        if sparsified is None:
            sparsified = [name for name, value in builder.parameters.items() if len(_shape(value)) >= 2]
        news = optimizer_nodes(op, rules, rate, count, variables, sparsified)
        own_rounding = Rounding("bfloat16", self.recipe.seed)
        for name, own in news.items():
            for new in own:
                new.ir.type, new.ir.shape = xs[name].ir.type, xs[name].ir.shape
            (x,) = own_rounding.rounded(op, (held[name],), "X", own[0], count)
            builder.update(held[name], x)
            for (letter, kept), new in zip(states[name].items(), own[1:], strict=True):
                rounding = self.recipe.rounding
                to_keep = (new,) if rounding is None else rounding.rounded(op, kept, letter, new, count)
                for old, part in zip(kept, to_keep, strict=True):
                    builder.update(old, part)
        if self.recipe.averaging is not None:
            self._average(builder, count, {name: own[0] for name, own in news.items()})
        builder.update(count, count + 1)
        op.scope = ""

    def _state(self, builder: Algorithm, name: str, role: State, parameter: ir.Value) -> tuple[Value, ...]:
        """The tensors of a state of a parameter."""
        first, rounding = _repeated(role.initial, parameter), self.recipe.rounding
        kept = {name: first} if rounding is None else rounding.first_values(name, first)
        return tuple(builder.state(*item) for item in kept.items())

    def _average(self, builder: Algorithm, count: Value, xs: Mapping[str, Value]) -> None:
        """The moving averages of all parameters, which start at zero and are the parameters after the first update."""
        assert self.recipe.averaging is not None
        averages = {
            name: builder.state(f"{name}/{AVERAGE}", _repeated(0.0, value))
            for name, value in builder.parameters.items()
        }
        first = self.schema.first_count
        for name, new in average_node(builder.op, self.recipe.averaging, count, first, averages, xs).items():
            builder.update(averages[name], new)


def _initialization(builder: Algorithm) -> tuple[onnx.GraphProto, dict[str, str]] | None:
    """A graph that sets every state of the algorithm to its first value."""
    if not builder.states:
        return None
    nodes, infos, binding = [], [], {}
    for name, array in builder.states.items():
        output = f"{name}_initial"
        first = array.flat[:1] if array.size else np.zeros(1, array.dtype)
        is_rounded = array.dtype == BFLOAT16  # ConstantOfShape has it from opset 20 on only
        value = numpy_helper.from_array(first.astype(np.float32) if is_rounded else first)
        shape_name = f"{name}_shape"
        shape = numpy_helper.from_array(np.asarray(array.shape, np.int64), shape_name)
        nodes.append(helper.make_node("Constant", [], [shape_name], value=shape))
        made = f"{name}_wide" if is_rounded else output
        nodes.append(helper.make_node("ConstantOfShape", [shape_name], [made], value=value))
        if is_rounded:
            nodes.append(helper.make_node("Cast", [made], [output], to=onnx.TensorProto.BFLOAT16))
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        infos.append(helper.make_tensor_value_info(output, kind, array.shape))
        binding[name] = output
    return helper.make_graph(nodes, "initialization", [], infos), binding


def _scaled(op: Builder, gradients: list[Value], scale: Value | None) -> list[Value]:
    """Gradients times a scalar."""
    if scale is None:
        return gradients
    scales = {dtype: op.cast(scale, dtype) for dtype in dict.fromkeys(g.dtype for g in gradients)}
    return [(g * scales[g.dtype]).with_shape(g.shape) for g in gradients]


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None
    return tuple(int(size) for size in value.shape.numpy())


def _repeated(number: float, like: ir.Value) -> np.ndarray:
    """One number in the type and shape of a value; takes no memory."""
    return _repeated_number(number, _dtype(like), _shape(like))


@functools.lru_cache(256)
def _repeated_number(number: float, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Read only, so that all states of a shape have the same one."""
    return np.broadcast_to(np.asarray(number, dtype), shape)


def _dtype(value: ir.Value) -> np.dtype[Any]:
    """The type that a value is computed in."""
    assert value.dtype is not None
    return np.dtype(np.float32) if value.dtype == ir.DataType.BFLOAT16 else value.dtype.numpy()
