"""Write a training model: the standard's ``TrainingInfoProto`` for a model, a loss and an optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from onnxtrain.ir.domains import ONNXTRAIN_DOMAIN, TRAINING_DOMAIN
from onnxtrain.training_info.algorithm import Algorithm, FirstValues, placeholder
from onnxtrain.training_info.entry import COUNTERS_KEY, SYNCHRONIZED_KEY, Entry
from onnxtrain.training_info.recipe import Recipe
from onnxtrain.training_info.rounding import BFLOAT16
from onnxtrain.training_info.writer import Writer, drops


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
    entry = Writer(recipe).applying(Algorithm(recipe, values, label="the update")).entry()
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
    if drops(recipe):
        several = recipe.micro_batches and not recipe.alone
        counters = [recipe.names.count, "accumulated_weight"] if several else [recipe.names.count]
        said[COUNTERS_KEY] = json.dumps(counters)
    return said


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
    writer = Writer(recipe)
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
