"""Print what a step graph takes and gives: ``onnxtrain export --describe``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from onnxtrain.cli import terminal

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto


def describe(console: Console, step: ModelProto) -> None:
    """Print a step graph's feeds, states and results.

    Raises:
        ModelError: The model is no step graph.
    """
    from onnxtrain.passes.description import IN_PLACE_KEY, STATES_KEY, Description

    metadata = {entry.key: entry.value for entry in step.metadata_props}
    found = Description.read(metadata)
    news: dict[str, str] = json.loads(metadata[STATES_KEY])
    in_place = set(json.loads(metadata[IN_PLACE_KEY]))
    inputs = {value.name: value for value in step.graph.input}
    feeds = terminal.table("feed", "what it is", "type", "shape", title=f"step graph, version {found.version}")
    for name, role in found.feeds.items():
        feeds.add_row(name, role.replace("_", " "), *_port(inputs[name]))
    states = terminal.table("state", "what it is", "type", "shape", "new value", "in place")
    for name, role in found.states.items():
        port = _port(inputs[name]) if name in inputs else ("", "")
        place = "yes" if name in in_place else "no" if name in news else ""
        states.add_row(name, role, *port, news.get(name, "never written"), place)
    results = terminal.table("result", "what it is", "type", "shape")
    for value in step.graph.output:
        if value.name not in news.values():
            role = "loss before the update" if value.name == found.loss else ""
            results.add_row(value.name, role, *_port(value))
    for table in (feeds, states, results):
        console.print(table)


def _port(value: ValueInfoProto) -> tuple[str, str]:
    """Type and shape of an input or output."""
    from onnx import TensorProto

    tensor = value.type.tensor_type
    dims: Iterable[str] = (
        dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim
    )
    return TensorProto.DataType.Name(tensor.elem_type).lower(), f"[{', '.join(dims)}]"
