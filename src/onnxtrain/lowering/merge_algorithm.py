"""Merge the main graph of a training model and one algorithm graph into the graph that runs."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.graph.declared_shapes import declare_initializers
from onnxtrain.lowering.training_info.read import bindings, entry_initializers, joined_model, state_tensors
from onnxtrain.lowering.training_info.recipe import COUNTERS_KEY, StepEntry
from onnxtrain.model_file.external import set_folder
from onnxtrain.model_file.upgrade import upgrade_opset

MINIMUM_OPSET = 18
"""Oldest version of ONNX's operators that gradient rules emit; older models are upgraded for the step."""


def merge_algorithm(model: onnx.ModelProto, index: int, *, folder: str = "") -> StepEntry:
    """Merge one entry of a training model into a working graph for the list of passes.

    Requires: a training model that is valid. Ensures: one sorted graph of opset 18 or newer, whose states are inputs;
    other tensors are initializers, and the model's options of gradients are its metadata.

    Args:
        model: A training model that passed :func:`onnxtrain.lowering.training_info.check.check_training_model`.
        index: Index of the entry in ``training_info``.
        folder: Folder of the external data.
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
