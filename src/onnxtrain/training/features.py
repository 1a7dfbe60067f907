"""Frozen layers computed once: divide an objective where they end, and compute their outputs, the features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.data import Batch, Dataset
from onnxtrain.data.array_dataset import ArrayDataset
from onnxtrain.data.base import share
from onnxtrain.data.conversion import Array
from onnxtrain.editing.working_copy.training_modes import is_batch_norm, is_dropout, normalizes_batches
from onnxtrain.errors import DataError, OptionError
from onnxtrain.graph.clone import needed_for, values_read
from onnxtrain.graph.passes import RANDOM
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.losses.heads import LossHead
from onnxtrain.lowering.training_info.recipe import free_names
from onnxtrain.model_file.large_data import free_memory
from onnxtrain.training.objective import Objective

Runner = Callable[[Sequence[str]], Callable[[Mapping[str, Array]], Mapping[str, Array]]]


class Divided(NamedTuple):
    """An objective divided at the features."""

    sources: dict[str, str]
    trained: Objective


def divide(objective: Objective) -> Divided:
    """Divide an objective into frozen layers and the trained part behind them, at values with one row per example."""
    own = objective.copy()
    graph = own.model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    ends = _ends(own, values)
    needed = needed_for(ends)
    moving = {values[name] for name in own.parameters}
    varying = set(graph.inputs)
    trained: set[ir.Node] = set()
    frozen: set[ir.Node] = set()
    for node in graph:
        if node not in needed:
            continue
        read = values_read(node)
        if any(value in moving for value in read):
            trained.add(node)
            moving.update(node.outputs)
        elif _differs_by_step(node) or any(value in varying for value in read):
            frozen.add(node)
            varying.update(node.outputs)
    symbols = {shape[0] for value in graph.inputs if (shape := dimensions(value))} - {None}
    features = _features(frozen, trained, ends, varying, symbols)
    before = needed_for(features)
    if not any(_is_weight(value) and value not in varying for node in before & frozen for value in values_read(node)):
        first = next((row.name for row in own.table if row.trainable), None)
        raise OptionError(
            "cache_features keeps what frozen layers compute, but no frozen layer comes before the first trained one "
            f"({first!r} is trained); freeze the first layers, or leave cache_features out."
        ).about("cache_features", got=first)
    for node in graph:
        if node in before and _differs_by_step(node):
            raise OptionError(
                f"cache_features computes the frozen layers once, but {node.name or node.outputs[0].name!r} "
                f"({node.op_type}) among them gives other values in every step; train without dropout, batch norm in "
                "training mode and random numbers there, or leave cache_features out."
            ).about("cache_features", got=node.op_type)
    return _cut(own, features, ends)


def _ends(objective: Objective, values: Mapping[str, ir.Value]) -> list[ir.Value]:
    read = [value for head in objective.heads for value in (head.prediction, head.output)]
    statistics = [values[name] for name in objective.statistics.values()]
    wide = [values[name] for name in objective.wide.values()]
    return list(dict.fromkeys([*(read or [objective.prediction]), *statistics, *wide]))


def _is_weight(value: ir.Value) -> bool:
    return is_float(value) and len(dimensions(value) or ()) >= 2


def _differs_by_step(node: ir.Node) -> bool:
    """Return whether a node gives other values in every step for the same inputs."""
    if is_dropout(node):
        return len(node.inputs) > 2 and node.inputs[2] is not None
    if is_batch_norm(node):
        return normalizes_batches(node)
    return node.op_type in RANDOM and not node.domain


def _features(
    frozen: set[ir.Node],
    trained: set[ir.Node],
    ends: list[ir.Value],
    varying: set[ir.Value],
    symbols: set[int | str | None],
) -> list[ir.Value]:
    """Return the values that the trained part reads, all with one row per example; move other nodes to that part."""
    waiting = [value for node in trained for value in values_read(node)] + [value for value in ends if value in varying]
    found: dict[ir.Value, None] = {}
    while waiting:
        value = waiting.pop()
        if value not in varying or value in found:
            continue
        shape, producer = dimensions(value), value.producer()
        if producer is None and not (shape and shape[0] in symbols):
            raise OptionError(
                f"cache_features keeps one row of every feature for each example, but the trained layers read the "
                f"input {value.name!r}, which has no axis of examples; leave cache_features out."
            ).about("cache_features", got=value.name)
        if producer is None or (shape and shape[0] in symbols and isinstance(value.type, ir.TensorType)):
            found[value] = None
        elif producer in frozen:
            frozen.remove(producer)
            waiting += values_read(producer)
    return sorted(found, key=lambda value: str(value.name))


def _cut(own: Objective, features: list[ir.Value], ends: list[ir.Value]) -> Divided:
    """Return the objective whose graph starts at the features, by changing a copy in place."""
    graph = own.model.graph
    computed = [value for value in features if value.producer() is not None]
    names = free_names(graph, [f"{value.name}/features" for value in computed])
    inputs = {str(value.name): value for value in features if value.producer() is None}
    sources = {name: name for name in inputs}
    instead: dict[ir.Value, ir.Value] = {}
    for value, name in zip(computed, names, strict=True):
        given = inputs[name] = ir.Value(name=name, type=value.type, shape=value.shape)
        sources[name] = str(value.name)
        value.replace_all_uses_with(given, replace_graph_outputs=True)
        if value in ends:  # the prediction of another head, which keeps its name
            same = ir.Node("", "Identity", [given], num_outputs=1)
            same.outputs[0].name, value.name = value.name, None
            same.outputs[0].type, same.outputs[0].shape = value.type, value.shape
            instead[value] = same.outputs[0]
            graph.append(same)
    ends = [instead.get(value, value) for value in ends]
    kept = needed_for(ends)
    graph.outputs[:] = ends
    graph.remove([node for node in graph if node not in kept], safe=True)
    graph.inputs[:] = inputs.values()
    graph.sort()

    def head_of(head: LossHead) -> LossHead:
        return replace(
            head,
            output=instead.get(head.output, head.output),
            prediction=instead.get(head.prediction, head.prediction),
            inputs=tuple(inputs.values()),
        )

    return Divided(sources, own.with_heads([head_of(head) for head in own.heads]) if own.heads else own)


_TOLERANCE = 1e-3
"""Relative difference of features that rounding explains."""


def compute_features(objective: Objective, runner: Runner, dataset: Dataset, batch_size: int) -> tuple[Dataset, str]:
    """Compute the features of all examples, batch by batch; the runner returns a function that computes values."""
    if dataset.size is None:
        raise OptionError(
            f"cache_features needs data of known length, but {dataset.name} does not say how many examples it has; "
            "give arrays or a data set with a length, or leave cache_features out."
        )
    dataset.check_cut()
    for spec in objective.inputs:
        if spec.common and spec.shape:
            raise OptionError(
                f"cache_features keeps a row for each example, but the input {spec.name!r} has one value for all of "
                "them; leave cache_features out."
            )
    sources = divide(objective).sources
    fixed = objective.fixed_batch
    inputs = {spec.name for spec in objective.inputs}
    computed = [source for source in sources.values() if source not in inputs]
    run = runner(computed)

    def features(batch: Batch) -> dict[str, Array]:
        given = {name: array for name, array in batch.inputs.items() if name in inputs}
        results = run(given if fixed is None else fixed.filled(given))
        return {
            name: given[source] if source in inputs else results[source][: batch.size]
            for name, source in sources.items()
        }

    size = batch_size if fixed is None else fixed.size
    kept: dict[str, Array] = {}
    targets: Array | None = None
    end = 0
    for batch in dataset.batches(size):
        found = features(batch) | {name: array for name, array in batch.inputs.items() if name not in inputs}
        if not end:
            _check_first(dataset, batch, found, features, size)
            _check_memory({sources[name]: found[name] for name in sources}, batch.size, dataset)
            kept = {name: np.empty((dataset.size, *array.shape[1:]), array.dtype) for name, array in found.items()}
            if batch.targets is not None:
                targets = np.empty((dataset.size, *batch.targets.shape[1:]), batch.targets.dtype)
        for name, array in found.items():
            if array.shape[1:] != kept[name].shape[1:]:
                raise OptionError(
                    f"cache_features keeps the features of all examples in one array, but {name!r} has the shape "
                    f"{kept[name].shape[1:]} for the first examples and {array.shape[1:]} for those from {end} on; "
                    "bring the examples to one size, or leave cache_features out."
                ).about(name, got=array.shape[1:], wanted=kept[name].shape[1:])
            kept[name][end : end + batch.size] = array
        if targets is not None and batch.targets is not None:
            targets[end : end + batch.size] = batch.targets
        end += batch.size
    if end != dataset.size:
        raise DataError(f"{dataset.name} has {dataset.size} examples by its length, but gave {end}.")
    bytes_kept = sum(kept[name].nbytes for name in sources)
    text = f"The features of {end:,} examples ({', '.join(sources.values())}) take {_shown(bytes_kept)} of memory."
    return ArrayDataset(kept, targets, name=dataset.name), text


def _check_first(
    dataset: Dataset,
    batch: Batch,
    found: Mapping[str, Array],
    features: Callable[[Batch], dict[str, Array]],
    batch_size: int,
) -> None:
    """Check that the first examples are the same when they are read again, and their features without the others."""
    again = next(iter(dataset.batches(batch_size)))
    for name, array in batch.inputs.items():
        if not np.array_equal(array, again.inputs[name]):
            raise OptionError(
                f"cache_features reads every example once, but {dataset.name} gives other values of {name!r} when it "
                "is read again, as with random transforms; leave them or cache_features out."
            ).about(name)
    if batch.size == 1:
        return
    alone = features(share(batch, slice(0, batch.size // 2)))
    for name, array in alone.items():
        expected = found[name][: len(array)]
        scale = np.abs(expected.astype(np.float64)).max(initial=0.0)
        if array.shape != expected.shape or not np.allclose(array, expected, _TOLERANCE, _TOLERANCE * scale):
            raise OptionError(
                f"cache_features needs features that depend on one example each, but {name!r} depends on the other "
                "examples of a batch, too; leave cache_features out."
            ).about(name)


def _check_memory(features: Mapping[str, Array], rows: int, dataset: Dataset) -> None:
    assert dataset.size is not None
    needed = sum(array.nbytes for array in features.values()) // rows * dataset.size
    free = free_memory()
    if free is not None and needed > free:
        raise OptionError(
            f"cache_features keeps {', '.join(features)} of {dataset.size:,} examples, which takes {_shown(needed)}, "
            f"but {_shown(free)} of memory are free; freeze more layers, or leave cache_features out."
        ).about("cache_features", got=free, wanted=needed)


def _shown(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
