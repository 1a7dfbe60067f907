"""``onnxtrain inspect``: print what can be trained in a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from onnxtrain.cli import flags, terminal
from onnxtrain.cli.messages import in_flags
from onnxtrain.errors.formatting import count

if TYPE_CHECKING:
    from onnxtrain.training.advice.inspection import Inspection

HELP = "Print the weights of a model, why some cannot be trained, its operators, and hints."

EXAMPLES = """\
Examples

    onnxtrain inspect model.onnx
    onnxtrain inspect model.onnx --train 'classifier.*'
    onnxtrain inspect model.onnx --adaptable
    onnxtrain inspect model.onnx --json
"""


def command(
    model: flags.ModelPath,
    /,
    *,
    train: Annotated[
        list[str] | None,
        Parameter(group=flags.WEIGHTS, negative=(), metavar="PATTERN", help="As in fit: train only what matches."),
    ] = None,
    freeze: Annotated[
        list[str] | None,
        Parameter(group=flags.WEIGHTS, negative=(), metavar="PATTERN", help="As in fit: keep what matches."),
    ] = None,
    prediction: flags.Prediction = None,
    adaptable: Annotated[
        bool,
        flags.SWITCH,
        Parameter(group=flags.WEIGHTS, help="List the layers that can have adapters (fit --lora) instead."),
    ] = False,
    json_output: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain inspect``."""
    if adaptable:
        _adaptable(model, as_json=json_output)
        return
    from onnxtrain.training.advice.inspection import inspect

    found = inspect(model, train=train, freeze=freeze, output=prediction)
    if json_output:
        terminal.print_json(dataclasses.asdict(found) | {"trainable_size": found.trainable_size})
        return
    console = terminal.console()
    _head(console, str(model), found)
    _initializers(console, found)
    _operators(console, found)
    for hint in found.hints:
        terminal.lines(console, f"hint: {in_flags(hint)}")


def _head(console: Console, name: str, found: Inspection) -> None:
    console.print(terminal.facts({"model": name, **found.facts()}))


def _initializers(console: Console, found: Inspection) -> None:
    table = terminal.table("name", "shape", "type", "size", "zeros", "trainable", "why not", right=("size", "zeros"))
    for row in found.initializer_rows():
        table.add_row(*(in_flags(cell) if name == "why not" else cell for name, cell in row.items()))
    console.print(table)


def _adaptable(model: Path, *, as_json: bool) -> None:
    """Print the layers that can have adapters."""
    from onnxtrain.adapters import adaptable_layers

    found = adaptable_layers(model)
    if as_json:
        terminal.print_json([dataclasses.asdict(row) for row in found])
        return
    table = terminal.table("layer", "operator", "inputs", "outputs", "bits", right=("inputs", "outputs", "bits"))
    for row in found:
        name = row.name if not row.parts else f"{row.name} ({', '.join(part.split('.')[-1] for part in row.parts)})"
        table.add_row(name, row.kind, count(row.inputs), count(row.outputs), str(row.bits))
    terminal.console().print(table)


def _operators(console: Console, found: Inspection) -> None:
    table = terminal.table("operator", "nodes", "gradient", right=("nodes",))
    for row, kind in zip(found.operator_rows(), found.operators, strict=True):
        table.add_row(*row.values(), style="bold red" if kind.gradient == "missing" else None)
    console.print(table)
    if found.missing:
        terminal.lines(
            console,
            f"Without a gradient between parameters and outputs: {'; '.join(found.missing)}. Train what comes after "
            "them (--train), or register a rule with onnxtrain.register_gradient.",
        )
