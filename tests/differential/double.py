"""onnxtrain's training in float64: the step graph in standard operators, run by ONNX's reference evaluator.

If it equals PyTorch's in float64, the loss, the gradients and the update are right, and differences in float32 are
rounding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

import onnxtrain
from call_arguments import arguments_of
from differential.modules import Model
from differential.reference import Plan


def train(model: Model, plan: Plan, options: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    """Train in float64; return all states by name, or nothing where this has no step graph.

    Args:
        model: The model.
        plan: The training.
        options: The arguments of the trainer.
    """
    taken = arguments_of(onnxtrain.training_model)
    sizes = {-(-len(target) // plan.cuts) for _, target, _ in plan.steps}
    padded = model.batch is not None and not options.get("dynamic_batch") and sizes != {model.batch}
    if plan.masks or padded or any(weights is not None for _, _, weights in plan.steps):
        return None  # these are of trainers, not of training models
    several = plan.cuts > 1
    own = {key: value for key, value in options.items() if key in taken} | {"accumulate": several}
    training = onnxtrain.training_model(in_double(model.file), **own)
    graphs = [training.graph, *(entry.algorithm for entry in training.training_info)]
    states = {tensor.name: numpy_helper.to_array(tensor) for graph in graphs for tensor in graph.initializer}
    entries = [_Entry(onnxtrain.lower(training, entry=number)) for number in range(1 + several)]
    names = [value.name for value in model.file.graph.input]
    for rate, (inputs, target, _) in zip(plan.rates, plan.steps, strict=True):
        last = {"learning_rate": np.float32(rate)}
        feeds = dict(zip(names, inputs, strict=True)) | {"target": target}
        feeds = {name: _wide(array) for name, array in feeds.items()}
        size = -(-len(target) // plan.cuts)
        for start in range(0, len(target), size):
            part = {name: array[start : start + size] for name, array in feeds.items()}
            entries[0].run(states, part if several else part | last)
        if several:
            entries[1].run(states, last)
    return states


class _Entry:
    """A step graph that the reference evaluator runs."""

    def __init__(self, step: onnx.ModelProto) -> None:
        metadata = {entry.key: entry.value for entry in step.metadata_props}
        self._news: dict[str, str | None] = json.loads(metadata["onnxtrain.states"])
        self._inputs = {value.name for value in step.graph.input}
        self._outputs = [value.name for value in step.graph.output]
        self._evaluator = ReferenceEvaluator(step)

    def run(self, states: dict[str, np.ndarray], feeds: Mapping[str, np.ndarray]) -> None:
        """Run one step, and replace the states by their new values."""
        given = {name: array for name, array in (states | dict(feeds)).items() if name in self._inputs}
        results = dict(zip(self._outputs, self._evaluator.run(None, given), strict=True))
        states.update({name: np.asarray(results[new]) for name, new in self._news.items() if new is not None})


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with float64 instead of float32."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    del wide.graph.value_info[:]
    for value in (*wide.graph.input, *wide.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in wide.graph.initializer:
        _widen(tensor)
    for node in wide.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen(attribute.t)
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
    return wide


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(_wide(numpy_helper.to_array(tensor)), tensor.name))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype == np.float32 else array
