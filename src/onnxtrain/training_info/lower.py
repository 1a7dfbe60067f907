"""Lower a training model to a step graph: one plain model per entry that any runtime can step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.operator import TRAINING_DOMAIN, replace_gradients
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.autodiff.recompute import check_patterns
from onnxtrain.errors import TrainingInfoError
from onnxtrain.graph.passes import clean
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.operators import lower_optimizers
from onnxtrain.training_info.attention import fuse_attention
from onnxtrain.training_info.check import check_training_model
from onnxtrain.training_info.convolution import use_convolution_kernels
from onnxtrain.training_info.fused_update import fuse_updates
from onnxtrain.training_info.fusion import fuse_activations
from onnxtrain.training_info.join import bindings, join, state_tensors
from onnxtrain.training_info.linear import fuse_linear

STATES_KEY = "onnxtrain.states"
"""Key of a step graph's metadata that holds its states as JSON: input name to output name."""


@dataclass(frozen=True)
class StepGraph:
    """A lowered entry.

    Attributes:
        model: The graph that a session runs.
        states: Names of the state inputs, to the output that holds the new value (``None``: only read).
        feeds: Names of the other inputs.
        results: Names of the outputs that are not states.
    """

    model: ir.Model
    states: dict[str, str | None]
    feeds: tuple[str, ...]
    results: tuple[str, ...]


def lower(
    training_model: onnx.ModelProto | str | os.PathLike[str],
    *,
    entry: int | None = None,
    kernels: bool = False,
    folder: str | os.PathLike[str] = "",
) -> onnx.ModelProto:
    """The step graph of a training model: a plain ONNX model that does one training step.

    Inputs: those of the model and of the algorithm (batch, target, learning rate) under their own names, then
    every state tensor (parameters, optimizer state, the update count T) under its own name. Outputs: what the
    algorithm returns beside states (the loss), then the new value of each state ``s`` as ``{s}_new``. To
    train, feed each ``{s}_new`` back as ``s``. The metadata entry ``onnxtrain.states`` holds this mapping as
    JSON. The first values of the states are the initializers of the training model.

    Args:
        training_model: A model with ``training_info``, or the path of one.
        entry: Which entry of ``training_info``, where there are several.
        kernels: Keep optimizers (and other operators with a native kernel) as nodes, for a session that
            registers :func:`onnxtrain.custom_ops_library`; by default only standard operators are used.
        folder: Where external data lies, for a model given as a proto.

    Returns:
        The step graph.

    Raises:
        TrainingInfoError: The training model is not valid, or has several entries and none is chosen.
        GradientError: A gradient cannot be built.
    """
    model, found = read_training_model(training_model)
    check_training_model(model)
    count = len(model.training_info)
    if entry is None and count > 1:
        raise TrainingInfoError(f"The training model has {count} entries; choose one with entry=0 to {count - 1}.")
    if not 0 <= (entry or 0) < count:
        raise TrainingInfoError(f"There is no entry {entry}; the training model has {count}.")
    return ir.to_proto(lower_entry(model, entry or 0, kernels=kernels, folder=found or str(folder)).model)


def read_training_model(given: onnx.ModelProto | str | os.PathLike[str]) -> tuple[onnx.ModelProto, str]:
    """A training model and the folder of its external data, from a proto or a path."""
    if isinstance(given, onnx.ModelProto):
        return given, ""
    from onnxtrain.model.file import ModelFile

    return ModelFile.load(given).whole(), str(Path(given).parent)


def lower_entry(
    training_model: onnx.ModelProto,
    index: int,
    *,
    kernels: bool,
    folder: str = "",
    results: Sequence[str] = (),
) -> StepGraph:
    """Lower one entry of a checked training model.

    Args:
        training_model: The training model.
        index: Which entry.
        kernels: Keep optimizers and fused operators as nodes, for a session that loads the native kernels.
        folder: Where external data lies.
        results: Outputs of the main graph to return, too.
    """
    info = training_model.training_info[index]
    updates = bindings(info, "update_binding")
    states = state_tensors(training_model)
    working = join(training_model, index, states, folder=folder)
    graph = working.graph
    bound = set(updates.values())
    returned = [output.name for output in info.algorithm.output if output.name not in bound]
    _choose_outputs(graph, [*returned, *results], updates)
    check_patterns(graph, GradientOptions.read(working.metadata_props).recompute)
    if kernels:
        fuse_activations(working)
        fuse_attention(working)
        fuse_linear(working)
    replace_gradients(working, kernels=kernels)
    if kernels:
        use_convolution_kernels(working)
    else:
        lower_optimizers(working)
    clean(working)
    graph.sort()
    drop_unused_inputs(graph)
    if not kernels:
        for domain in (TRAINING_DOMAIN, "onnxtrain"):
            graph.opset_imports.pop(domain, None)
    infer_shapes(working)
    if kernels:
        fuse_updates(working)
    names = {value.name for value in graph.inputs}
    state_map: dict[str, str | None] = {
        name: f"{name}_new" if name in updates else None for name in states if name in names or name in updates
    }
    working.metadata_props[STATES_KEY] = json.dumps({k: v for k, v in state_map.items() if v is not None})
    feeds = tuple(str(value.name) for value in graph.inputs if value.name not in states)
    return StepGraph(working, state_map, feeds, (*returned, *results))


def _choose_outputs(graph: ir.Graph, returned: Sequence[str], updates: Mapping[str, str]) -> None:
    """Outputs: what is returned, then ``{state}_new`` for each update (through an Identity of that name)."""
    values = {value.name: value for value in graph.outputs}
    values |= {output.name: output for node in graph for output in node.outputs}
    values |= {value.name: value for value in graph.inputs}
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


def drop_unused_inputs(graph: ir.Graph) -> None:
    """Remove the inputs that nothing reads, in place."""
    for value in list(graph.inputs):
        if not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)
