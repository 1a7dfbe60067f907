"""Training modes of batch normalization and dropout in a working copy.

A working copy runs in inference mode, whatever its file declares, unless the caller requests training mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.expand import expand
from onnxtrain.errors import OptionError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.clone import all_nodes, subgraphs
from onnxtrain.graph.passes import RANDOM
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import constant_array
from onnxtrain.parameters.readers import behind_identity, read_through_identity

_STATISTICS = {3: "mean", 4: "var"}
"""Inputs of BatchNormalization that are running statistics."""


@dataclass(frozen=True)
class Modes:
    """Modes of layers that behave differently in training."""

    batch_norm: str = "frozen"
    dropout: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_norm not in ("frozen", "train", "sync"):
            raise OptionError(f"batch_norm is {self.batch_norm!r}; it is 'frozen', 'train' or 'sync'.")

    @property
    def training(self) -> bool:
        """True where a layer differs from inference."""
        return self.batch_norm != "frozen" or self.dropout


class LayerCounts(NamedTuple):
    """Counts of layers that behave differently in training, as declared by the file."""

    dropouts: int = 0
    dropping: int = 0
    undecided: int = 0
    nested_dropouts: int = 0
    batch_norms: int = 0
    normalizing_batches: int = 0
    nested_batch_norms: int = 0
    trained_batch_norms: int = 0  # with batch_norm="train"
    random: tuple[str, ...] = ()


def set_modes(model: ir.Model, modes: Modes) -> dict[str, str]:
    """Set the modes of a working copy, in place; return running statistics with the values that replace them."""
    nodes = list(model.graph)
    if modes.training:
        expand_calls_of_layers(model)
    norms = _norms_to_train(model.graph)  # before the file's modes are gone
    set_inference(model)
    statistics = train_batch_norm(norms) if modes.batch_norm != "frozen" else {}
    if modes.dropout:
        train_dropout(model, modes.seed)
    if statistics or list(model.graph) != nodes:
        infer_shapes(model)
    return statistics


def find_layers(model: ir.Model) -> LayerCounts:
    """Count the layers of a model, including bodies and every call of a function."""
    found = list(_applied(model, model.graph, nested=False))
    dropouts = [(node, nested) for node, nested in found if is_dropout(node) and _setting(node, 1, 0.5) != 0]
    norms = [(node, nested) for node, nested in found if is_batch_norm(node) and not computes_statistics(node)]
    dropping = [_setting(node, 2, False) for node, _ in dropouts]
    return LayerCounts(
        dropouts=len(dropouts),
        dropping=dropping.count(True),
        undecided=dropping.count(None),
        nested_dropouts=sum(nested for _, nested in dropouts),
        batch_norms=len(norms),
        normalizing_batches=sum(normalizes_batches(node) for node, _ in norms),
        nested_batch_norms=sum(nested for _, nested in norms),
        trained_batch_norms=len(_norms_to_train(node for node, nested in norms if not nested)),
        random=tuple(dict.fromkeys(node.op_type for node, _ in found if node.op_type in RANDOM and not node.domain)),
    )


def is_dropout(node: ir.Node) -> bool:
    """Return whether a node is ONNX's Dropout."""
    return node.op_type == "Dropout" and not node.domain


def is_batch_norm(node: ir.Node) -> bool:
    """Return whether a node is ONNX's BatchNormalization."""
    return node.op_type == "BatchNormalization" and not node.domain


def computes_statistics(node: ir.Node) -> bool:
    """Return whether nodes compute the mean of a BatchNormalization, as of PyTorch's without running statistics."""
    mean = behind_identity(node.inputs[3])
    return mean is not None and mean.producer() is not None and constant_array(mean) is None


def _applied(model: ir.Model, graph: ir.Graph | ir.Function, *, nested: bool) -> Iterator[tuple[ir.Node, bool]]:
    """Yield all executed nodes and whether they are in a body; the nodes of a function once per call."""
    for node in graph:
        function = model.functions.get(node.op_identifier())
        if function is not None:
            yield from _applied(model, function, nested=nested)
            continue
        yield node, nested
        for inner in subgraphs(node):
            yield from _applied(model, inner, nested=True)


def _setting(node: ir.Node, slot: int, default: float) -> float | None:
    """Return the number that a node reads; ``None`` where it is not known."""
    value = node.inputs[slot] if len(node.inputs) > slot else None
    array = constant_array(behind_identity(value)) if value is not None else np.array(default)
    return None if array is None else float(array.reshape(-1)[0])


def normalizes_batches(node: ir.Node) -> bool:
    """Return whether a BatchNormalization is in training mode."""
    mode = node.attributes.get("training_mode")
    if mode is None:
        return len(node.outputs) > 1  # below opset 14
    return mode.is_ref() or mode.as_int() == 1  # in a function it may refer to the call's


def set_inference(model: ir.Model) -> None:
    """Set a working copy to inference mode, in place: no dropout, running statistics in batch normalization.

    This includes bodies and functions. The mask of a Dropout becomes all true; the further outputs of a
    BatchNormalization become its input statistics. A model input that only sets the mode is removed.
    """
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in graphs:
        for node in list(all_nodes(graph)):
            if is_dropout(node) and len(node.inputs) > 2:
                mode = node.inputs[2]
                node.resize_inputs(2)
                _remove_unused(mode, model.graph)
            elif is_batch_norm(node) and normalizes_batches(node):
                _use_running_statistics(node)


def _remove_unused(value: ir.Value | None, main: ir.Graph) -> None:
    """Remove an unused value: its producers, or its input of the main graph."""
    if value is None or value.uses() or value.is_graph_output():
        return
    producer = value.producer()
    if producer is None:
        if value in main.inputs:
            main.inputs.remove(value)
        return
    if subgraphs(producer) or any(output.uses() or output.is_graph_output() for output in producer.outputs):
        return
    sources = list(producer.inputs)
    assert producer.graph is not None
    producer.graph.remove(producer, safe=True)
    for source in sources:
        _remove_unused(source, main)


def _use_running_statistics(node: ir.Node) -> None:
    node.attributes.pop("training_mode", None)
    graph = node.graph
    assert graph is not None
    for output, source in zip(node.outputs[1:], node.inputs[3:], strict=False):
        if not output.uses() and not output.is_graph_output():
            continue
        name, output.name = output.name, None
        copy = ir.Node("", "Identity", [source], num_outputs=1)
        copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = name, output.type, output.shape
        graph.insert_after(node, copy)
        output.replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)
    node.resize_outputs(1)


def expand_calls_of_layers(model: ir.Model) -> None:
    """Inline functions with dropout or batch normalization in the main graph, in place."""
    while True:
        calls = [
            node
            for node in model.graph
            if (function := model.functions.get(node.op_identifier())) is not None
            and any(is_dropout(inner) or is_batch_norm(inner) for inner, _ in _applied(model, function, nested=False))
        ]
        if not calls:
            return
        for node in calls:
            expand(node, model.functions[node.op_identifier()], {}, model.functions)


def _norms_to_train(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """Return the batch normalization that the file sets to training mode; all of it where the file sets none."""
    norms = [node for node in nodes if is_batch_norm(node)]
    return [node for node in norms if normalizes_batches(node)] or norms


def train_batch_norm(norms: Iterable[ir.Node]) -> dict[str, str]:
    """Set batch normalization to training mode, with batch statistics and updated running ones, in place."""
    statistics: dict[str, str] = {}
    for node in norms:
        node.attributes.add(ir.AttrInt64("training_mode", 1))
        node.resize_outputs(3)
        for position, (index, kind) in enumerate(_STATISTICS.items(), start=1):
            source = behind_identity(node.inputs[index])
            if source is None or not source.is_initializer() or not source.name:
                raise OptionError(
                    f"batch_norm='train' needs the running {kind} of {node.name!r} as an initializer; it is computed."
                )
            _check_own(source, node, index)
            output = node.outputs[position]
            if not output.name:
                output.name = f"{source.name}_running"
            output.type, output.shape = source.type, source.shape
            statistics[source.name] = output.name
    return statistics


def _check_own(source: ir.Value, node: ir.Node, index: int) -> None:
    """Refuse running statistics with other readers, which the update would change, too."""
    others = [(reader, at) for reader, at in read_through_identity(source) if (reader, at) != (node, index)]
    if not others:
        return
    kind = _STATISTICS[index]
    if all(is_batch_norm(reader) and at in _STATISTICS for reader, at in others):
        what = f"several BatchNormalization nodes share the running {kind} {source.name!r}"
    else:
        readers = ", ".join(dict.fromkeys(repr(reader.name or reader.op_type) for reader, _ in others))
        what = f"the running {kind} {source.name!r} of {node.name!r} is also a weight of {readers}"
    raise OptionError(
        f"batch_norm='train': {what} (exporters merge equal initializers); untie=True gives each its own."
    )


def train_dropout(model: ir.Model, seed: int) -> int:
    """Activate the Dropout nodes of the main graph, in place, each with its own seed; return their number.

    Dropout in bodies of If, Loop and Scan stays inactive: gradients recompute the body and would sample another mask.
    """
    graph = model.graph
    nodes = [node for node in graph if is_dropout(node)]
    op = Builder(graph, model.opset_imports[""])
    true = op.constant(True).ir if nodes else None
    for position, node in enumerate(nodes):
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        node.replace_input_with(2, true)
        node.attributes.add(ir.AttrInt64("seed", seed_of_node(seed, position)))
    return len(nodes)


def seed_of_node(seed: int, position: int) -> int:
    """Return the seed of one Dropout node."""
    drawn = np.random.SeedSequence((seed % (1 << 63), position)).generate_state(1)[0]
    return int(drawn) % ((1 << 31) - 2) + 1
