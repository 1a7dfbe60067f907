"""Join the main graph of a training model and one algorithm graph to the graph that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import TrainingInfoError
from onnxtrain.model.upgrade import upgrade_opset

MINIMUM_OPSET = 18
"""The oldest version of ONNX's operators that gradient rules emit; older models are upgraded for the step."""


def joined_model(model: onnx.ModelProto, index: int) -> onnx.ModelProto:
    """Main graph and the algorithm of entry ``index`` concatenated, with all tensors as typed graph inputs.

    No tensor data is copied. The outputs are those of the algorithm, then those of the main graph.
    """
    algorithm = model.training_info[index].algorithm
    joined = onnx.ModelProto(
        ir_version=max(8, model.ir_version), opset_import=model.opset_import, functions=model.functions
    )
    joined.graph.name = algorithm.name or model.graph.name or "training"
    initializers = _initializers(model, index)
    for graph in (model.graph, algorithm):
        joined.graph.node.extend(graph.node)
        joined.graph.value_info.extend(graph.value_info)
        joined.graph.input.extend(info for info in graph.input if info.name not in initializers)
    joined.graph.input.extend(_tensor_info(tensor) for tensor in initializers.values())
    joined.graph.output.extend(algorithm.output)
    names = {info.name for info in algorithm.output}
    joined.graph.output.extend(info for info in model.graph.output if info.name not in names)
    return joined


def join(model: onnx.ModelProto, index: int, states: Iterable[str], *, folder: str = "") -> ir.Model:
    """The same as a working graph: states are graph inputs, the other tensors initializers.

    Args:
        model: A training model that passed :func:`onnxtrain.training_info.check.check_training_model`.
        index: Which entry of ``training_info``.
        states: Names of the initializers that training changes.
        folder: Where external data lies.
    """
    working = ir.from_proto(upgrade_opset(joined_model(model, index), MINIMUM_OPSET))
    options = GradientOptions.read({entry.key: entry.value for entry in model.metadata_props})
    working.metadata_props.update(options.entries())
    inputs = {value.name: value for value in working.graph.inputs}
    changing = set(states)
    for name, tensor in _initializers(model, index).items():
        if name in changing:
            continue
        value = inputs[name]
        working.graph.inputs.remove(value)
        value.const_value = ir.serde.deserialize_tensor(tensor, folder)
        working.graph.register_initializer(value)
    return working


def _initializers(model: onnx.ModelProto, index: int) -> dict[str, onnx.TensorProto]:
    algorithm = model.training_info[index].algorithm
    return {tensor.name: tensor for graph in (model.graph, algorithm) for tensor in graph.initializer}


def _tensor_info(tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))


def state_tensors(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The initializers that binding keys name, over all entries: what training changes.

    Raises:
        TrainingInfoError: A key names no initializer of the main graph or of its algorithm.
    """
    found: dict[str, onnx.TensorProto] = {}
    everywhere: dict[str, onnx.TensorProto] = {tensor.name: tensor for tensor in model.graph.initializer}
    for entry in model.training_info:
        everywhere.update((tensor.name, tensor) for tensor in entry.algorithm.initializer)
    for index, entry in enumerate(model.training_info):
        for field in ("initialization_binding", "update_binding"):
            for key in bindings(entry, field):
                if key not in everywhere:
                    raise TrainingInfoError(
                        f"training_info[{index}].{field} has the key {key!r}, which is no initializer of the main "
                        "graph or of the algorithm; only initializers hold state."
                    )
                found[key] = everywhere[key]
    return found


def bindings(entry: onnx.TrainingInfoProto, field: str) -> Mapping[str, str]:
    """One of an entry's two binding fields as a mapping."""
    return {pair.key: pair.value for pair in getattr(entry, field)}
