"""Description of a step graph in its metadata: inputs and outputs for a loop in any language."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.graph.clone import all_nodes, needed_for, values_read
from onnxtrain.graph.value import attributes_of
from onnxtrain.lowering.rewrite import gradient_nodes
from onnxtrain.lowering.training_info.recipe import StepEntry
from onnxtrain.model_file.small_files import RefusedFileError, parse_json
from onnxtrain.operators.registry import find

STATES_KEY = "onnxtrain.states"
"""Key of a step graph's metadata that holds its states as JSON: input name to output name."""

IN_PLACE_KEY = "onnxtrain.in_place"
"""Key of the metadata that lists, as JSON, the states whose new value may be written to the buffer of the old one."""

STEP_KEY = "onnxtrain.step"
"""Key of the metadata that holds a :class:`Description` as JSON."""

VERSION = 1
"""Version of the description; it grows when programs that read the present one would go wrong."""


class Description(NamedTuple):
    """Purpose of each input and output of a step graph."""

    version: int
    feeds: Mapping[str, str]
    states: Mapping[str, str]
    loss: str | None

    @classmethod
    def of(cls, entry: StepEntry) -> Description:
        """Describe an entry whose Gradient and optimizer nodes are still in the graph."""
        graph = entry.model.graph
        optimizers = [node for node in all_nodes(graph) if find(node.domain, node.op_type) is not None]
        gradients = gradient_nodes(graph)
        rates = _sources(node.inputs[0] for node in optimizers)
        counts = _sources(node.inputs[1] for node in optimizers)
        trained = {value.name for node in (*gradients, *optimizers) for value in _variables(node)}

        def feed(name: str) -> str:
            if name in entry.main:
                return "batch"
            return "learning_rate" if name in rates else "target"

        def state(name: str) -> str:
            if name in entry.main:
                return "parameter" if name in trained else "statistic"
            return "count" if name in counts else "optimizer"

        names, states = [str(value.name) for value in graph.inputs], set(entry.states)
        feeds = {name: feed(name) for name in names if name not in states}
        return cls(VERSION, feeds, {name: state(name) for name in entry.states}, _loss(entry, gradients))

    def only(self, names: Iterable[str]) -> Description:
        """Return the description without the inputs that a graph lacks."""
        kept = set(names)
        feeds = {name: role for name, role in self.feeds.items() if name in kept}
        return self._replace(feeds=feeds, states={n: r for n, r in self.states.items() if n in kept})

    def to_json(self) -> str:
        """Return the metadata entry."""
        return json.dumps(self._asdict())

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> Description:
        """Read the description of a step graph."""
        if STEP_KEY not in metadata:
            raise ModelError(f"The model is not a step graph: its metadata has no {STEP_KEY!r}; export one.").about(
                STEP_KEY
            )
        found = _read_entry(metadata, STEP_KEY)
        version, loss, roles = found.get("version"), found.get("loss"), (found.get("feeds"), found.get("states"))
        if not isinstance(version, int) or not isinstance(loss, str | None) or not all(map(_are_texts, roles)):
            raise ModelError(f"The metadata entry {STEP_KEY!r} describes no step graph; export it again.")
        if version > VERSION:
            raise ModelError(
                f"The step graph has version {version} and this onnxtrain reads version {VERSION}; "
                "use the onnxtrain that wrote it."
            ).about(got=version, wanted=VERSION)
        return cls(version, *roles, loss)


def read_states(metadata: Mapping[str, str]) -> dict[str, str]:
    """Read the states of a step graph: the output with the new value of each input."""
    found: dict[str, str] = _read_entry(metadata, STATES_KEY)
    if not _are_texts(found):
        raise ModelError(f"The metadata entry {STATES_KEY!r} names no outputs; export the step graph again.")
    return found


def _are_texts(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(text, str) for text in found.values())


def _read_entry(metadata: Mapping[str, str], key: str) -> Any:
    try:
        found = parse_json(metadata.get(key, ""))
    except RefusedFileError as error:
        raise ModelError(f"The metadata entry {key!r} is no JSON ({error}); export the step graph again.") from error
    if not isinstance(found, dict):
        raise ModelError(f"The metadata entry {key!r} is no JSON object; export the step graph again.")
    return found


def _variables(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that a Gradient or an optimizer node trains."""
    inputs = [value for value in node.inputs if value is not None]
    schema = find(node.domain, node.op_type)
    if schema is None:
        yield from inputs[: len(node.attributes["xs"].as_strings())]
        return
    states = len(schema.used_states(schema.complete(attributes_of(node))))
    yield from inputs[2 : 2 + (len(inputs) - 2) // (2 + states)]


def _sources(values: Iterable[ir.Value | None]) -> set[str]:
    """Return the names of the graph inputs that values are computed from."""
    given = [value for value in values if value is not None]
    nodes = needed_for(given)
    read = [*given, *(value for node in nodes for value in values_read(node))]
    return {str(value.name) for value in read if value.producer() is None}


def _loss(entry: StepEntry, gradients: Iterable[ir.Node]) -> str | None:
    """Return the result that is differentiated, or the only one."""
    differentiated = {node.attributes["y"].as_string() for node in gradients}
    producers = {value.name: node for node in entry.model.graph for value in node.outputs}
    for name in entry.results:
        node = producers.get(name)
        if name in differentiated:
            return name
        if node is not None and node.op_type == "Identity" and str(node.inputs[0].name) in differentiated:  # type: ignore[union-attr]
            return name
    return entry.results[0] if len(entry.results) == 1 else None
