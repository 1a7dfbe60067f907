"""Write a training model: ``TrainingInfoProto`` for a model, a loss and an optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN, TRAINING_DOMAIN
from onnxtrain.lowering.training_info.algorithm import Algorithm, FirstValues, drops, placeholder
from onnxtrain.lowering.training_info.recipe import COUNTERS_KEY, SYNCHRONIZED_KEY, StepEntry, StepSpec
from onnxtrain.lowering.training_info.rounding import BFLOAT16


def fill_states(model: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Set the initializers of states to these values, in place."""
    for graph in (model.graph, *(entry.algorithm for entry in model.training_info)):
        for tensor in graph.initializer:
            if tensor.name in values:
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(values[tensor.name], order="C"), tensor.name))
    return model


def build_training_model(spec: StepSpec) -> onnx.ModelProto:
    """Build the training model of a specification with all its data; see :func:`build_unfilled`."""
    proto, values = build_unfilled(spec)
    masked = {name: np.where(mask, values[name], np.zeros_like(values[name])) for name, mask in spec.masks.items()}
    return fill_states(fill_states(proto, values), masked)


def build_unfilled(spec: StepSpec) -> tuple[onnx.ModelProto, FirstValues]:
    """Build a training model with placeholders for its states; return it and the first values of the states."""
    values = _first_values(spec)
    proto = _main_model(spec, values.tensors)
    proto.training_info.extend(
        algorithm.cut(name, _initialization(algorithm)) for name, algorithm in _algorithms(spec, values)
    )
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    helper.set_model_props(proto, metadata | _options_metadata(spec))
    domains = {entry.domain for entry in proto.opset_import} | {""}
    # Besides the optimizer's and Gradient's, a loss may have StopGradient.
    used = _imported(spec) | {node.domain for info in proto.training_info for node in info.algorithm.node}
    for domain in sorted(used - domains):
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    return proto, values


def build_entries(spec: StepSpec) -> tuple[list[StepEntry], FirstValues]:
    """Build the entries of a training model as graphs, without writing protos; consume the specification's graph."""
    values = _first_values(spec)
    entries = [algorithm.entry() for _, algorithm in _algorithms(spec, values, apart=True)]
    for entry in entries:
        _finish(entry, spec, values)
    return entries, values


def build_update(spec: StepSpec) -> tuple[StepEntry, FirstValues]:
    """Build the entry that applies accumulated gradients, on a model with parameters only."""
    values = _first_values(spec)
    algorithm = Algorithm(spec, values, label="the update")
    algorithm.write_application()
    entry = algorithm.entry()
    _finish(entry, spec, values)
    return entry, values


def _finish(entry: StepEntry, spec: StepSpec, values: FirstValues) -> None:
    """Turn states into inputs, and set the metadata that a file would have."""
    entry.states = list(values)
    model, graph = entry.model, entry.model.graph
    for name in [name for name in graph.initializers if name in values.tensors]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
    model.metadata_props.clear()
    model.metadata_props.update(_options_metadata(spec) | ({SYNCHRONIZED_KEY: "true"} if spec.synchronized else {}))
    for domain in sorted(_imported(spec)):
        graph.opset_imports.setdefault(domain, 1)


def _imported(spec: StepSpec) -> set[str]:
    """Return the domains of the operators of algorithms."""
    own = set() if spec.averaging is None and spec.rounding is None and not spec.wide else {ONNXTRAIN_DOMAIN}
    return {TRAINING_DOMAIN, spec.optimizer.schema.domain} | own


def _options_metadata(spec: StepSpec) -> dict[str, str]:
    """Return the metadata for options of a step that nodes have no attributes for."""
    said = spec.options.entries()
    if drops(spec):
        several = spec.micro_batches and not spec.alone
        counters = [spec.names.count, "accumulated_weight"] if several else [spec.names.count]
        said[COUNTERS_KEY] = json.dumps(counters)
    return said


def _first_values(spec: StepSpec) -> FirstValues:
    initializers = spec.model.graph.initializers
    names = [name for name in (*spec.parameters, *spec.held, *spec.statistics) if name in initializers]
    tensors = {name: initializers[name].const_value for name in names}
    return FirstValues({name: tensor for name, tensor in tensors.items() if tensor is not None})


def _main_model(spec: StepSpec, tensors: Mapping[str, ir.TensorProtocol]) -> onnx.ModelProto:
    """Return the main graph with placeholders for its states."""
    model = spec.model
    outputs = [value.name for value in model.graph.outputs]
    by_name = {output.name: output for node in model.graph for output in node.outputs}
    for name in spec.statistics.values():
        if name not in outputs:
            model.graph.outputs.append(by_name[name])
    try:
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = placeholder(name, tensor)
        return ir.to_proto(model)
    finally:
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = tensor


def _algorithms(spec: StepSpec, first_values: FirstValues, *, apart: bool = False) -> Iterator[tuple[str, Algorithm]]:
    """Yield algorithms with their names; the caller removes each from the main graph before the next is built.

    With ``apart``, the second is built in a separate graph that has only the parameters.
    """
    first = Algorithm(spec, first_values, label="training_info[0].algorithm")
    if not spec.micro_batches:
        first.write_step()
        yield "training", first
        return
    graph = _parameters_alone(spec) if apart else None
    first.write_accumulation()
    yield "accumulate", first
    second = Algorithm(spec, first_values, label="training_info[1].algorithm", graph=graph)
    second.write_application()
    yield "apply", second


def _parameters_alone(spec: StepSpec) -> ir.Graph:
    """Return a graph with only the parameters."""
    model = spec.model
    values = [model.graph.initializers[name] for name in spec.parameters]
    copies = [ir.Value(name=v.name, type=v.type, shape=v.shape, const_value=v.const_value) for v in values]
    imports = dict(model.graph.opset_imports)
    return ir.Graph([], [], nodes=[], initializers=copies, opset_imports=imports, name="apply")


def _initialization(builder: Algorithm) -> tuple[onnx.GraphProto, dict[str, str]] | None:
    """Build a graph that resets every state of the algorithm to its first value."""
    if not builder.states:
        return None
    nodes, infos, binding = [], [], {}
    for name, array in builder.states.items():
        output = f"{name}_initial"
        first = array.flat[:1] if array.size else np.zeros(1, array.dtype)
        is_rounded = array.dtype == BFLOAT16  # ConstantOfShape supports bfloat16 only from opset 20
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
