"""``onnxtrain inspect``: what is in a model, seen with the eyes of one who wants to train it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from onnxtrain.cli import flags, terminal
from onnxtrain.cli.wording import in_flags

if TYPE_CHECKING:
    from onnxtrain.graph.value import Dimension
    from onnxtrain.training.advice.inspection import Inspection

HELP = "Print what a model holds: which weights can be trained and why others cannot, operators, hints."

EXAMPLES = """\
Examples

    onnxtrain inspect model.onnx
    onnxtrain inspect model.onnx --train 'classifier.*'
    onnxtrain inspect model.onnx --adaptable
    onnxtrain inspect model.onnx --json
"""

_GRADIENTS = {
    "rule": "yes",
    "body": "yes, through its definition",
    "none": "none: its output does not vary smoothly",
    "missing": "MISSING",
}


def command(
    model: flags.ModelPath,
    /,
    *,
    train: Annotated[
        list[str] | None,
        Parameter(group=flags.TRAINED, negative=(), metavar="PATTERN", help="As in fit: train only what matches."),
    ] = None,
    freeze: Annotated[
        list[str] | None,
        Parameter(group=flags.TRAINED, negative=(), metavar="PATTERN", help="As in fit: keep what matches."),
    ] = None,
    prediction: flags.Prediction = None,
    adaptable: Annotated[
        bool,
        flags.SWITCH,
        Parameter(group=flags.TRAINED, help="List the layers that can have adapters (fit --lora) instead."),
    ] = False,
    json_output: Annotated[flags.Json, Parameter(name="--json")] = False,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain inspect``; the flags are described where they are declared."""
    if adaptable:
        _adaptable(model, as_json=json_output)
        return
    from onnxtrain.training.advice.inspection import inspect

    found = inspect(model, train=train, freeze=freeze, output=prediction)
    if json_output:
        print(json.dumps(dataclasses.asdict(found) | {"trainable_size": found.trainable_size}))  # noqa: T201
        return
    console = terminal.console()
    _head(console, str(model), found)
    _initializers(console, found)
    _operators(console, found)
    for hint in found.hints:
        terminal.lines(console, f"hint: {in_flags(hint)}")


def _head(console: Console, name: str, found: Inspection) -> None:
    rows = {"model": name, "format": f"opset {found.opset}, IR version {found.ir_version}"}
    for label, ports in (("inputs", found.inputs), ("outputs", found.outputs)):
        rows[label] = "\n".join(f"{port.name}: {port.dtype} {_shape(port.shape)}" for port in ports)
    everything = sum(row.size for row in found.initializers)
    rows["trainable"] = f"{terminal.count(found.trainable_size)} of {terminal.count(everything)} elements"
    console.print(terminal.facts(rows))


def _initializers(console: Console, found: Inspection) -> None:
    table = terminal.table("name", "shape", "type", "size", "zeros", "trainable", "why not", right=("size", "zeros"))
    for row in found.initializers:
        trainable = "yes" if row.trainable else "no"
        zeros = f"{row.sparsity:.1%}" if row.sparsity else ""
        size = terminal.count(row.size)
        name = row.name if not row.paths else f"{row.name} ({', '.join(row.paths)})"
        table.add_row(name, _shape(row.shape), row.dtype, size, zeros, trainable, in_flags(row.reason))
    console.print(table)


def _adaptable(model: Path, *, as_json: bool) -> None:
    """The layers that can have adapters."""
    from onnxtrain.adapters import adaptable_layers

    found = adaptable_layers(model)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in found]))  # noqa: T201
        return
    table = terminal.table("layer", "operator", "inputs", "outputs", "bits", right=("inputs", "outputs", "bits"))
    for row in found:
        name = row.name if not row.parts else f"{row.name} ({', '.join(part.split('.')[-1] for part in row.parts)})"
        table.add_row(name, row.kind, terminal.count(row.inputs), terminal.count(row.outputs), str(row.bits))
    terminal.console().print(table)


def _operators(console: Console, found: Inspection) -> None:
    table = terminal.table("operator", "nodes", "gradient", right=("nodes",))
    for row in found.operators:
        name = f"{row.domain}::{row.name}" if row.domain else row.name
        style = "bold red" if row.gradient == "missing" else None
        table.add_row(name, terminal.count(row.count), _GRADIENTS[row.gradient], style=style)
    console.print(table)
    if found.missing:
        terminal.lines(
            console,
            f"Without a gradient between parameters and outputs: {'; '.join(found.missing)}. Train what comes after "
            "them (--train), or register a rule with onnxtrain.register_gradient.",
        )


def _shape(shape: Sequence[Dimension] | None) -> str:
    if shape is None:
        return "of any shape"
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
