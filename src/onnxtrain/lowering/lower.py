"""Lower a training model to a step graph: one plain model per entry that any runtime can step."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import TrainingInfoError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.declared_shapes import declare_initializers
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.description import IN_PLACE_KEY, STATES_KEY, STEP_KEY, Description
from onnxtrain.lowering.memory.in_place import in_place_states
from onnxtrain.lowering.notify_gradients import notify_gradients
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.portable import Portable
from onnxtrain.lowering.training_info.read import (
    bindings,
    check_training_model,
    entry_initializers,
    joined_model,
    read_training_model,
    state_tensors,
)
from onnxtrain.lowering.training_info.recipe import COUNTERS_KEY, StepEntry
from onnxtrain.model_file.external import check_external_data, set_folder, with_external_data
from onnxtrain.model_file.upgrade import upgrade_opset
from onnxtrain.model_file.validity import refuses_invalid

MINIMUM_OPSET = 18
"""Oldest version of ONNX's operators that gradient rules emit; older models are upgraded for the step."""


class StepGraph(NamedTuple):
    """A lowered entry."""

    model: ir.Model
    states: dict[str, str | None]
    feeds: tuple[str, ...]
    results: tuple[str, ...]
    in_place: frozenset[str] = frozenset()


@checks_arguments
@refuses_invalid("training_model")
def lower(
    training_model: onnx.ModelProto | str | os.PathLike[str],
    *,
    entry: int | None = None,
    kernels: bool = False,
    portable: Portable | None = None,
    folder: str | os.PathLike[str] = "",
) -> onnx.ModelProto:
    """Lower a training model to its step graph: a plain ONNX model that does one training step.

    Inputs: those of the model and of the algorithm (batch, target, learning rate) under their own names, then
    every state tensor (parameters, optimizer state, the update count T) under its own name. Outputs: the values that
    the algorithm returns beside states (the loss), then the new value of each state ``s`` as ``{s}_new``. To
    train, feed each ``{s}_new`` back as ``s``. The metadata entry ``onnxtrain.states`` holds this mapping as
    JSON, and ``onnxtrain.in_place`` lists the states whose two values may share one buffer: those and no others. The
    entry ``onnxtrain.step`` describes every input (see :class:`~onnxtrain.lowering.description.Description`). The first
    values of the states are the initializers of the training model. A model without ``training_info`` whose graph has
    Gradient nodes becomes one that computes its outputs in standard operators.

    Args:
        training_model: A model with ``training_info`` or Gradient nodes, or the path of one.
        entry: Index in ``training_info``, where it has several entries.
        kernels: Keep optimizers (and other operators with a native kernel) as nodes, for a session that
            registers :func:`onnxtrain.custom_ops_library`; by default only standard operators are used.
        portable: "cuda" or "webgpu" for a graph that this provider of ONNX Runtime runs, "openvino" for one that
            OpenVINO itself runs: batch normalization in training mode, which they lack, is in other operators, and for
            WebGPU nothing is float64.
        folder: Folder of the external data, for a model given as a proto.

    Returns:
        The step graph, with all its data.

    Raises:
        ModelError: External data is not where it should be.
        TrainingInfoError: The training model is not valid, or has several entries and none is chosen.
        GradientError: A gradient cannot be built.
    """
    model, found = read_training_model(training_model)
    data_folder = found or str(folder)
    if not model.training_info and any(node.op_type == "Gradient" for node in model.graph.node):
        working = ir.from_proto(upgrade_opset(model, MINIMUM_OPSET))
        set_folder(working, data_folder)
        lower_graph(working, kernels=kernels, portable=portable)
        return with_external_data(ir.to_proto(infer_shapes(working)), data_folder)
    check_training_model(model)
    count = len(model.training_info)
    if entry is None and count > 1:
        raise TrainingInfoError(f"The training model has {count} entries; choose one with entry=0 to {count - 1}.")
    if not 0 <= (entry or 0) < count:
        raise TrainingInfoError(f"There is no entry {entry}; the training model has {count}.")
    check_external_data(model, data_folder)
    merged = merge_algorithm(model, entry or 0, folder=data_folder)
    description = Description.of(merged)
    step = lower_entry(merged, kernels=kernels, portable=portable)
    _write_metadata(step, description)
    return with_external_data(ir.to_proto(infer_shapes(step.model)), data_folder)  # viewers show shapes


def merge_algorithm(model: onnx.ModelProto, index: int, *, folder: str = "") -> StepEntry:
    """Merge one entry of a training model into a working graph for the list of passes.

    Requires: a training model that is valid. Ensures: one sorted graph of opset 18 or newer, whose states are inputs;
    other tensors are initializers, and the model's options of gradients are its metadata.
    """
    working = ir.from_proto(upgrade_opset(joined_model(model, index), MINIMUM_OPSET))
    set_folder(working, folder)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    working.metadata_props.update(GradientOptions.read(metadata).entries())
    if COUNTERS_KEY in metadata:
        working.metadata_props[COUNTERS_KEY] = metadata[COUNTERS_KEY]
    inputs = {value.name: value for value in working.graph.inputs}
    states = state_tensors(model)
    for name, tensor in entry_initializers(model, index).items():
        if name in states:
            continue
        value = inputs[name]
        working.graph.inputs.remove(value)
        value.const_value = ir.serde.deserialize_tensor(tensor, folder)
        working.graph.register_initializer(value)
    declare_initializers(working.graph)
    info = model.training_info[index]
    updates = dict(bindings(info, "update_binding"))
    bound = set(updates.values())
    results = [output.name for output in info.algorithm.output if output.name not in bound]
    main = {item.name for item in (*model.graph.input, *model.graph.initializer)}
    return StepEntry(working, list(states), updates, results, main)


def lower_entry(
    entry: StepEntry, *, kernels: bool, portable: Portable | None = None, updates: Collection[str] = ()
) -> StepGraph:
    """Lower an entry to its step graph; the entry is changed and must not be used again."""
    graph = entry.model.graph
    _choose_outputs(graph, entry.results, entry.updates | entry.notified_only)
    lower_graph(entry.model, kernels=kernels, portable=portable, updates=updates)
    if kernels and entry.notified_groups:
        notify_gradients(graph, [[f"{state}_new" for state in group] for group in entry.notified_groups])
        not_kept = {f"{state}_new" for state in entry.notified_only}
        graph.outputs[:] = [value for value in graph.outputs if value.name not in not_kept]
    graph.inputs[:] = [value for value in graph.inputs if value.uses() or value.is_graph_output()]
    names = {value.name for value in graph.inputs}
    states: dict[str, str | None] = {
        name: f"{name}_new" if name in entry.updates else None
        for name in entry.states
        if name in names or name in entry.updates
    }
    feeds = tuple(str(value.name) for value in graph.inputs if value.name not in states)
    in_place = frozenset(in_place_states(graph, states))
    return StepGraph(entry.model, states, feeds, tuple(entry.results), in_place)


def _write_metadata(step: StepGraph, description: Description) -> None:
    """Describe the graph in its metadata for programs that train with it."""
    metadata = step.model.metadata_props
    metadata[STATES_KEY] = json.dumps({state: new for state, new in step.states.items() if new is not None})
    metadata[IN_PLACE_KEY] = json.dumps([name for name in step.states if name in step.in_place])
    metadata[STEP_KEY] = description.only(step.feeds + tuple(step.states)).to_json()


def _choose_outputs(graph: ir.Graph, returned: Sequence[str], updates: Mapping[str, str]) -> None:
    """Set the outputs: those to return, then ``{state}_new`` for each update, through an Identity."""
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    outputs = [values[name] for name in returned]
    for state, name in updates.items():
        new_name = f"{state}_new"
        if new_name in values and new_name != name:
            raise TrainingInfoError(
                f"A step graph names the new value of {state!r} {new_name!r}, but a value of that name exists."
            )
        if new_name == name:
            outputs.append(values[name])
            continue
        identity = ir.Node("", "Identity", [values[name]], num_outputs=1, name=f"new value of {state}")
        graph.append(identity)
        identity.outputs[0].name = new_name
        identity.outputs[0].type, identity.outputs[0].shape = values[state].type, values[state].shape
        outputs.append(identity.outputs[0])
    graph.outputs.clear()
    graph.outputs.extend(outputs)
