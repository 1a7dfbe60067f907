"""Compare one training step on an execution provider with the CPU, and node by node if they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from onnxtrain.data import TensorSpec
from onnxtrain.errors import DataError, OnnxTrainError, StepError
from onnxtrain.lowering.lower import lower
from onnxtrain.lowering.portable import fix_dimensions
from onnxtrain.lowering.training_info.read import state_tensors
from onnxtrain.runtime.options import CPU, Provider, RuntimeOptions, name_of
from onnxtrain.runtime.step import create_session
from onnxtrain.training.trainer import Trainer

Arrays = Mapping[str, np.ndarray]

TOLERANCE = 1e-3
"""Tolerated difference from the CPU's result, in units of its largest element."""


@dataclass(frozen=True)
class Difference:
    """A result that differs from the CPU's."""

    name: str
    operator: str
    size: float
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """Result of a step on a provider."""

    provider: str
    compared: int
    largest: float
    failure: str
    outputs: Sequence[Difference]
    nodes: Sequence[Difference]
    left_out: int

    @property
    def agrees(self) -> bool:
        """True if the step ran and its results agree with the CPU's."""
        return not self.failure and not self.outputs


def check_provider(
    trainer: Trainer,
    provider: Provider,
    data: Any = None,
    *,
    target: str | None = None,
    batch_size: int = 4,
    sizes: Mapping[str, int] | None = None,
    tolerance: float = TOLERANCE,
) -> Report:
    """Run one step of a trainer on a provider and on the CPU, in standard operators, and compare all results."""
    options = RuntimeOptions(providers=[provider], kernels=False, threads=trainer.config.runtime.threads)
    options.provider_list()
    feeds = dict(_batch(trainer, data, target, batch_size, sizes or {}))
    training = trainer.training_model()
    if sizes:
        fix_dimensions(training, sizes)
    step = lower(training, entry=0)
    feeds |= {name: np.asarray(numpy_helper.to_array(tensor)) for name, tensor in state_tensors(training).items()}
    feeds[trainer.objective.names.learning_rate] = np.asarray(trainer.learning_rate, np.float32)
    feeds = {value.name: feeds[value.name] for value in step.graph.input}
    on_cpu = RuntimeOptions(providers=[CPU], kernels=False, threads=trainer.config.runtime.threads)
    names = [value.name for value in step.graph.output]
    expected = dict(zip(names, _run(step, on_cpu, feeds), strict=True))
    failure, found = "", {}
    try:
        found = dict(zip(names, _run(step, options, feeds), strict=True))
    except OnnxTrainError as error:
        failure = str(error)
    differences = {name: difference(found[name], expected[name]) for name in found}
    outputs = [Difference(name, "", size) for name, size in differences.items() if size > tolerance]
    nodes: list[Difference] = []
    left_out = 0
    if failure or outputs:
        nodes, left_out = _node_by_node(step, options, on_cpu, feeds, tolerance)
    return Report(
        provider=name_of(options.provider_list()[0]),
        compared=len(names),
        largest=np.inf if failure else max(differences.values()),
        failure=failure,
        outputs=sorted(outputs, key=lambda each: -each.size),
        nodes=nodes,
        left_out=left_out,
    )


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of two arrays, in units of the largest finite element of the second."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return np.inf
    if found.dtype.kind in "OSU":
        return 0.0 if np.array_equal(found, expected) else np.inf
    one, other = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(one[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    unit = max(float(np.abs(other[finite]).max()), 1e-6)
    return float(np.abs(one[finite] - other[finite]).max()) / unit


def _batch(
    trainer: Trainer, data: Any, target: str | None, batch_size: int, sizes: Mapping[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    if data is None:
        generator = np.random.default_rng(0)
        specs = [*trainer.objective.inputs, *(head.spec for head in trainer.objective.heads)]
        symbols: dict[str, int] = {}
        yield from ((spec.name, _random(spec, generator, batch_size, sizes, symbols)) for spec in specs)
        return
    fixed = trainer.objective.fixed_batch
    batch = next(iter(trainer.open_data(data, target=target).batches(batch_size if fixed is None else fixed.size)))
    yield from trainer.objective.feeds(batch).items()


def _random(
    spec: TensorSpec,
    generator: np.random.Generator,
    batch_size: int,
    sizes: Mapping[str, int],
    symbols: dict[str, int],
) -> np.ndarray:
    """Return random values for an input; dynamic sizes become the batch size."""
    if spec.shape is None:
        raise DataError(f"The shape of {spec.name!r} is not known; give data.").about(spec.name)
    shape = []
    for size in spec.shape:
        if isinstance(size, str):
            shape.append(sizes.get(size, symbols.setdefault(size, batch_size)))
        else:
            shape.append(batch_size if size is None else size)
    if spec.dtype.kind == "f":
        return generator.normal(size=shape).astype(spec.dtype)
    if spec.dtype.kind in "biu":
        return generator.integers(0, 2, shape).astype(spec.dtype)
    raise DataError(f"{spec.name!r} takes {spec.dtype}, for which no random values can be generated; give data.")


def _run(model: onnx.ModelProto, options: RuntimeOptions, feeds: Arrays) -> list[np.ndarray]:
    session = create_session(ir.from_proto(model), options)
    try:
        return session.run(None, feeds)
    except Exception as error:
        raise StepError(" ".join(str(error).split())) from error


def _node_by_node(
    step: onnx.ModelProto, options: RuntimeOptions, on_cpu: RuntimeOptions, feeds: Arrays, tolerance: float
) -> tuple[list[Difference], int]:
    """Run each node on the CPU's inputs; return the nodes that differ, in graph order, and the number skipped."""
    values = {**_all_values(step, on_cpu, feeds), **feeds}
    constants = {tensor.name: tensor for tensor in step.graph.initializer}
    found: list[Difference] = []
    left_out = 0
    for node in step.graph.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            left_out += 1
            continue
        names = [name for name in dict.fromkeys(node.input) if name and name not in constants]
        if not all(isinstance(values.get(name), np.ndarray) for name in (*names, *filter(None, node.output))):
            left_out += 1  # sequences and optional values
            continue
        size, reason = _compare(step, node, {name: values[name] for name in names}, values, constants, options)
        if reason or size > tolerance:
            found.append(Difference(node.name or node.output[0], node.op_type, size, reason))
    return found, left_out


def _compare(
    step: onnx.ModelProto,
    node: onnx.NodeProto,
    feeds: Arrays,
    values: Mapping[str, Any],
    constants: Mapping[str, onnx.TensorProto],
    options: RuntimeOptions,
) -> tuple[float, str]:
    """Compare one node's results with the CPU's; return the difference, or infinity and the provider's error."""
    outputs = [name for name in node.output if name]
    graph = helper.make_graph(
        [node],
        "node",
        [_info(name, value) for name, value in feeds.items()],
        [_info(name, values[name]) for name in outputs],
        [constants[name] for name in dict.fromkeys(node.input) if name in constants],
    )
    model = helper.make_model(graph, opset_imports=step.opset_import, ir_version=step.ir_version)
    try:
        results = _run(model, options, feeds)
    except OnnxTrainError as error:
        return np.inf, str(error)
    return max(difference(result, values[name]) for result, name in zip(results, outputs, strict=True)), ""


def _all_values(step: onnx.ModelProto, options: RuntimeOptions, feeds: Arrays) -> dict[str, Any]:
    model = onnx.ModelProto()
    model.CopyFrom(step)
    del model.graph.output[:]
    names = [name for node in model.graph.node for name in node.output if name]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return dict(zip(names, _run(model, options, feeds), strict=True))


def _info(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
