"""Divide an objective where its frozen layers end, so that their outputs, the features, are computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.clone import ancestors, captured_values
from onnxtrain.graph.passes import RANDOM
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.losses.heads import LossHead
from onnxtrain.lowering.training_info.recipe import free_names
from onnxtrain.training.objective import Objective, graph_values
from onnxtrain.training.working_copy.training_modes import is_batch_norm, is_dropout


class Divided(NamedTuple):
    """An objective divided at the features."""

    sources: dict[str, str]
    trained: Objective


def divide(objective: Objective) -> Divided:
    """Divide an objective into frozen layers, which no step changes, and the trained part behind them.

    A feature has one row per example. Where a value between the two parts has not, as a mask [1, tokens], the trained
    part computes it, from values that have.
    """
    own = objective.copy()
    graph = own.model.graph
    values = graph_values(graph)
    ends = _ends(own, values)
    needed = ancestors(producer for value in ends if (producer := value.producer()) is not None)
    moving = {values[name] for name in own.parameters}
    varying = set(graph.inputs)
    trained: set[ir.Node] = set()
    frozen: set[ir.Node] = set()
    for node in graph:
        if node not in needed:
            continue
        read = _read(node)
        if any(value in moving for value in read):
            trained.add(node)
            moving.update(node.outputs)
        elif _differs_by_step(node) or any(value in varying for value in read):
            frozen.add(node)
            varying.update(node.outputs)
    symbols = {shape[0] for value in graph.inputs if (shape := dimensions(value))} - {None}
    features = _features(frozen, trained, ends, varying, symbols)
    before = ancestors(producer for value in features if (producer := value.producer()) is not None)
    if not any(_is_weight(value) and value not in varying for node in before & frozen for value in _read(node)):
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
    """Return the values of the graph that a step needs."""
    read = [value for head in objective.heads for value in (head.prediction, head.output)]
    statistics = [values[name] for name in objective.statistics.values()]
    wide = [values[name] for name in objective.wide.values()]
    return list(dict.fromkeys([*(read or [objective.prediction]), *statistics, *wide]))


def _read(node: ir.Node) -> list[ir.Value]:
    return [value for value in (*node.inputs, *captured_values(node)) if value is not None]


def _is_weight(value: ir.Value) -> bool:
    return is_float(value) and len(dimensions(value) or ()) >= 2


def _differs_by_step(node: ir.Node) -> bool:
    """Return whether a node gives other values in every step for the same inputs."""
    if is_dropout(node):
        return len(node.inputs) > 2 and node.inputs[2] is not None
    if is_batch_norm(node):
        mode = node.attributes.get("training_mode")
        return mode is not None and mode.as_int() == 1
    return node.op_type in RANDOM and not node.domain


def _features(
    frozen: set[ir.Node],
    trained: set[ir.Node],
    ends: list[ir.Value],
    varying: set[ir.Value],
    symbols: set[int | str | None],
) -> list[ir.Value]:
    """Return the values that the trained part reads, all with one row per example; move other nodes to that part."""
    waiting = [value for node in trained for value in _read(node)] + [value for value in ends if value in varying]
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
            waiting += _read(producer)
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
    kept = ancestors(producer for value in ends if (producer := value.producer()) is not None)
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
