"""Convert models of sequences and optionals to tensor inputs and outputs, so that they can be differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def lift(model: onnx.ModelProto, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[onnx.ModelProto, dict, dict]:
    """Convert a model to tensors; returns it, its feeds and its expected outputs by name.

    A sequence input becomes one input per element and SequenceConstruct, a sequence output one SequenceAt per element;
    Optional wraps an optional value and OptionalGetElement unwraps it.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    feeds: dict[str, np.ndarray] = {}
    before: list[onnx.NodeProto] = []
    del graph.input[:]
    for info, given in zip(model.graph.input, inputs, strict=False):
        made = _input(info.name, info.type, given, before)
        feeds.update(made)
        for name, array in made.items():
            element, shape = helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            declared = info if info.type.HasField("tensor_type") else None
            graph.input.append(declared or helper.make_tensor_value_info(name, element, shape))
    expected: dict[str, np.ndarray] = {}
    after: list[onnx.NodeProto] = []
    del graph.output[:]
    for info, wanted in zip(model.graph.output, outputs, strict=False):
        made = _output(info.name, info.type, wanted, after)
        expected.update(made)
        for name, array in made.items():
            element = helper.np_dtype_to_tensor_dtype(array.dtype)
            declared = info if info.type.HasField("tensor_type") else None
            graph.output.append(declared or helper.make_tensor_value_info(name, element, None))
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return result, feeds, expected


def _array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _input(name: str, kind: onnx.TypeProto, given: Any, nodes: list[onnx.NodeProto]) -> Mapping[str, np.ndarray]:
    if kind.HasField("optional_type"):
        inside = kind.optional_type.elem_type
        if given is None:
            nodes.append(helper.make_node("Optional", [], [name], type=inside))
            return {}
        made = _input(f"{name}_value", inside, given, nodes)
        nodes.append(helper.make_node("Optional", [f"{name}_value"], [name]))
        return made
    if kind.HasField("sequence_type"):
        parts = {f"{name}_{index}": _array(item) for index, item in enumerate(given)}
        if parts:
            nodes.append(helper.make_node("SequenceConstruct", list(parts), [name]))
        else:
            element = kind.sequence_type.elem_type.tensor_type.elem_type
            nodes.append(helper.make_node("SequenceEmpty", [], [name], dtype=element))
        return parts
    return {name: _array(given)}


def _output(name: str, kind: onnx.TypeProto, wanted: Any, nodes: list[onnx.NodeProto]) -> Mapping[str, np.ndarray]:
    if kind.HasField("optional_type"):
        nodes.append(helper.make_node("OptionalGetElement", [name], [f"{name}_value"]))
        return _output(f"{name}_value", kind.optional_type.elem_type, wanted, nodes)
    if kind.HasField("sequence_type"):
        for index in range(len(wanted)):
            position = numpy_helper.from_array(np.array(index, np.int64))
            nodes.append(helper.make_node("Constant", [], [f"{name}_position_{index}"], value=position))
            nodes.append(helper.make_node("SequenceAt", [name, f"{name}_position_{index}"], [f"{name}_{index}"]))
        return {f"{name}_{index}": _array(item) for index, item in enumerate(wanted)}
    return {name: _array(wanted)}
