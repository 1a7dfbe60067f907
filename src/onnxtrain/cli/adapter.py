"""``onnxtrain adapter``: merge, convert, add and inspect adapters, and give models slots for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.commands import COMMANDS
from onnxtrain.cli.flags import ADAPTERS, MODEL, RESULTS, flag, grouped
from onnxtrain.errors import OptionError
from onnxtrain.errors.formatting import count

HELP = "Merge adapters into a model, convert, add or inspect them, or give a model slots for them."

EXAMPLES = """\
Examples

  A model that computes the same alone, or a checkpoint of transformers:
    onnxtrain adapter merge model.onnx tuned.onnx_adapter -o merged.onnx
    onnxtrain adapter merge model.onnx tuned.onnx_adapter -o checkpoint

  A model that takes adapters at run time:
    onnxtrain adapter slots model.onnx -o slots.onnx
    onnxtrain adapter slots model.onnx tuned.onnx_adapter -o slots.onnx
    onnxtrain adapter slots model.onnx songs poems -o slots.onnx

  To PEFT and back:
    onnxtrain adapter to-peft model.onnx tuned.onnx_adapter -o tuned
    onnxtrain adapter to-peft model.onnx a.onnx_adapter -o a --base-model bert
    onnxtrain adapter from-peft model.onnx tuned -o tuned.onnx_adapter

  The weighted sum of several adapters of a model:
    onnxtrain adapter add model.onnx songs poems --weights 0.7,0.3 -o both

  The contents of an adapter, and whether it fits a model:
    onnxtrain adapter inspect tuned.onnx_adapter
    onnxtrain adapter inspect model.onnx tuned.onnx_adapter
"""

Action = Literal["merge", "slots", "to-peft", "from-peft", "add", "inspect"]
Combination = Literal["cat", "svd", "linear"]


@grouped(ADAPTERS)
@dataclass(frozen=True)
class AdapterFlags:
    """The output, and settings of single actions."""

    output: Path | None = flag(
        None, "The file, or the folder of PEFT, to write.", group=RESULTS, name=("--output", "-o"), metavar="PATH"
    )
    targets: list[str] | None = flag(
        None,
        "slots: the layers that get slots. May be repeated.  [default: attention's, else all-linear]",
        metavar="PATTERN",
    )
    dora: bool = flag(False, "slots: also take magnitudes (DoRA).")
    requantize: bool = flag(False, "merge: quantize quantized weights again, with new scales; reports the loss.")
    base_model: str | None = flag(
        None,
        "to-peft, merge into a folder: the PyTorch model, a folder (or for to-peft a name on the Hugging Face Hub)."
        "  [default: by config.json beside the model]",
        metavar="NAME",
    )
    weights: str | None = flag(
        None, "add: the weight of each adapter, such as 0.7,0.3; negative ones subtract.", metavar="W,..."
    )
    combination: Combination | None = flag(
        None,
        "add: the exact sum with the sum of the ranks (cat), its best approximation of --rank (svd), or sums "
        "of A and of B (linear).  [default: cat]",
    )
    rank: int | None = flag(None, "add: the rank of svd.  [default: the largest of the adapters]")

    def check(self, action: Action, adapter: Path | None, more: Sequence[Path]) -> None:
        """Raise OptionError for flags and paths that the action does not take, and for missing ones."""
        output = self.output
        if adapter is None and action not in ("slots", "inspect"):
            raise OptionError(f"{action} needs a model and an adapter: onnxtrain adapter {action} MODEL ADAPTER.")
        if output is None and action != "inspect":
            raise OptionError(f"{action} writes a result; give --output.")
        if output is not None and action == "inspect":
            raise OptionError(f"inspect writes nothing, but --output is {str(output)!r}; leave it out.")
        if action == "to-peft" and output is not None and output.suffix == ".onnx_adapter":
            raise OptionError(f"to-peft writes a folder, but --output is {str(output)!r}; give the name of a folder.")
        if action == "from-peft" and output is not None and output.suffix != ".onnx_adapter":
            raise OptionError(
                f"from-peft writes an .onnx_adapter file, but --output is {str(output)!r}; let it end so."
            )
        folder = action == "merge" and output is not None and not output.suffix  # a checkpoint, in float32
        done = "merge into a folder" if folder else action
        for name, taker in _TAKERS.items():
            value = getattr(self, name)
            if value is None or value is False or (folder and name == "base_model"):
                continue
            if done != taker:
                raise OptionError(f"{flags.flag_of(name)} is for {taker}, not for {done}; leave it out.")
            if taker == "slots" and adapter is not None:
                raise OptionError(
                    f"{flags.flag_of(name)} determines the slots, and so does the adapter; leave one of them out."
                )
        if more and action not in ("add", "slots"):
            raise OptionError(f"{action} takes one adapter, but {str(more[0])!r} is another; leave it out.")


_TAKERS: Mapping[str, Action] = {
    **dict.fromkeys(("targets", "dora"), "slots"),
    **{"requantize": "merge", "base_model": "to-peft"},
    **dict.fromkeys(("weights", "combination", "rank"), "add"),
}
"""The action that takes a flag."""


def command(
    action: Annotated[
        Action,
        Parameter(
            group=MODEL,
            help="merge, to-peft and from-peft take MODEL ADAPTER; add MODEL and several ADAPTERs; slots a MODEL, or "
            "MODEL ADAPTER; inspect an ADAPTER, or MODEL ADAPTER.",
        ),
    ],
    model: Annotated[Path, Parameter(group=MODEL, help="The ONNX model. It is never changed.")],
    adapter: Annotated[
        Path | None, Parameter(group=MODEL, help="An .onnx_adapter file, or a folder of PEFT.", show_default=False)
    ] = None,
    /,
    *more: Annotated[Path, Parameter(group=MODEL, help="add, slots: further adapters.", show_default=False)],
    settings: AdapterFlags = AdapterFlags(),
    json_output: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain adapter``."""
    settings.check(action, adapter, more)
    if action == "inspect":
        _inspect(model, adapter, as_json=json_output)
        return
    output = settings.output
    assert output is not None
    if action == "merge" and not output.suffix:
        base = settings.base_model
        COMMANDS["checkpoint"].command(model, adapter, output=output, base_model=base, json_output=json_output)
        return
    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "ADAPTER": paths.Given(adapter),
            **{f"ADAPTER {place}": paths.Given(other) for place, other in enumerate(more, 2)},
            "--output": paths.output(output, is_model=action in ("merge", "slots")),
        },
        in_place=False,
    )
    from onnxtrain.adapters import add_slots, convert_adapter
    from onnxtrain.adapters.layers import AUTO

    adapters = [] if adapter is None else [adapter, *more]
    rows: dict[str, Any] = {}
    if action == "slots":
        names = add_slots(model, output, targets=settings.targets or AUTO, dora=settings.dora, adapter=adapters or None)
        rows = {"slots": names}
    elif action == "merge":
        rows = _merge(model, adapters[0], output, requantize=settings.requantize)
    elif action == "add":
        _add(model, adapters, output, settings)
    else:
        convert_adapter(model, adapters[0], output, base_model=settings.base_model)
    if json_output:
        terminal.print_json(rows)
        return
    written = terminal.sized(output) if output.is_file() else str(output)
    terminal.print_facts({"written": written, **{name: _text(value) for name, value in rows.items()}})


def _add(model: Path, adapters: Sequence[Path], output: Path, settings: AdapterFlags) -> None:
    """Write the weighted sum of adapters."""
    from onnxtrain.adapters import add_weighted

    if settings.weights is None:
        raise OptionError(f"add needs a weight for each of the {len(adapters)} adapters; give --weights 0.7,0.3.")
    numbers = flags.read_numbers("--weights", settings.weights, "numbers such as 0.7,0.3")
    if len(numbers) != len(adapters):
        raise OptionError(f"--weights has {len(numbers)} numbers for {len(adapters)} adapters; give one for each.")
    weighted = list(zip(adapters, numbers, strict=True))
    add_weighted(weighted, output, combination=settings.combination or "cat", rank=settings.rank, model=model)


def _merge(model: Path, adapter: Path, output: Path, *, requantize: bool) -> dict[str, Any]:
    """Write the merged model; return what merging costs where weights are quantized."""
    from onnxtrain.adapters import merge_adapter

    costs = merge_adapter(model, adapter, output, requantize=requantize)
    beside, high = [cost.layer for cost in costs if cost.beside], sum(cost.is_high for cost in costs)
    rows: dict[str, Any] = {"lost": {cost.layer: cost.lost for cost in costs}} if costs else {}
    if beside:
        rows["beside"] = beside
        rows["note"] = [
            f"{len(beside)} of {len(costs)} layers keep their adapter beside the weight, which could not hold half of "
            "its change"
        ]
    if high:
        rows["warning"] = (
            f"{high} of {len(costs)} layers lose more than a tenth of the adapter's change: evaluate the merged model, "
            "or run the model with slots"
        )
    return rows


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {lost:.1%} of the adapter's change" for name, lost in value.items())
    names = value if isinstance(value, list) else [str(value)]
    return "\n".join(names)


def _inspect(model: Path, adapter: Path | None, *, as_json: bool) -> None:
    from onnxtrain.adapters import describe_adapter

    found = describe_adapter(adapter or model, model=None if adapter is None else model)
    if as_json:
        terminal.print_json(found)
        return
    layers = found.pop("layers")
    terminal.print_facts({name.replace("_", " "): str(value) for name, value in found.items()})
    table = terminal.table("layer", "rank", "inputs", "outputs", "scale", right=("rank", "inputs", "outputs", "scale"))
    for row in layers:
        sizes = (count(row[name]) for name in ("rank", "inputs", "outputs"))
        table.add_row(row["name"], *sizes, f"{row['scale']:g}")
    terminal.console().print(table)
