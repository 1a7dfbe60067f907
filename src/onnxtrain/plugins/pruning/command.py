"""``onnxtrain prune``: make a model sparse, keep its accuracy, and report the result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.configuration import Config, as_toml
from onnxtrain.cli.flags import LOOP, RESULTS, SWITCH
from onnxtrain.cli.loss_flags import LossFlags
from onnxtrain.cli.optimizer_flags import IntegerPair, PruningOptimizer
from onnxtrain.cli.plugin_flags import ReaderFlags
from onnxtrain.cli.process import quiet_on_request, unattended
from onnxtrain.cli.training_flags import Training

if TYPE_CHECKING:
    from rich.console import Console

    from onnxtrain.training.callbacks.progress import Display

HELP = "Train, cut and fine-tune a model; the result differs from it in its weights, of which many are zero."

EXAMPLES = """\
The exit status is 1 if the pruned model lost what the given one had learned.

Examples

  Train with SSGD, remove 95 % of the weights, fine-tune the others:
    onnxtrain prune model.onnx --data train.npz --validation val.npz \\
        --loss softmax_cross_entropy --sparsity 0.95 -o pruned.onnx \\
        --report report

  As many weights as cost at most one point of accuracy; a sparse file:
    onnxtrain prune model.onnx --data train.npz --validation val.npz \\
        --loss softmax_cross_entropy --accuracy-drop 0.01 --storage sparse

  Zeros in blocks of four outputs with one input:
    onnxtrain prune model.onnx --data train.npz --validation 0.1 \\
        --loss softmax_cross_entropy --sparsity 0.9 --block 4,1

  A smaller dense model that runs twice as fast, measured on this machine:
    onnxtrain prune model.onnx --data train.npz --validation val.npz \\
        --loss softmax_cross_entropy --structure channels --speedup 2

  Twenty cuts over twenty epochs, and the baseline to compare with:
    onnxtrain prune model.onnx --data train.npz --validation 0.1 \\
        --loss softmax_cross_entropy --sparsity 0.98 --epochs 20 --rounds 20
    onnxtrain prune model.onnx --data train.npz --validation 0.1 \\
        --loss softmax_cross_entropy --sparsity 0.98 --epochs 20 --rounds 20 \\
        --method magnitude
"""

CONFIG = "config.toml"
REPORT_FILES = ("report.txt", "report.json", "report.png", CONFIG)
PRUNING = Group("Pruning", sort_key=2.5)


@Parameter(name="*", group=PRUNING)
@dataclass(frozen=True)
class Pruning:
    """Settings of the pruning: arguments of :func:`onnxtrain.prune`."""

    sparsity: Annotated[float | None, Parameter(help="The fraction of weights to remove, at least 0 and below 1.")] = (
        None
    )
    structure: Annotated[
        list[Literal["channels", "heads", "hidden"]] | None,
        Parameter(
            negative=(),
            help="Remove whole channels, attention heads or hidden units: a smaller dense model. May be repeated.",
        ),
    ] = None
    flops: Annotated[
        float | None,
        Parameter(help="With --structure, instead of --sparsity: the fraction of multiply-adds to remove."),
    ] = None
    speedup: Annotated[
        float | None,
        Parameter(
            help="With --structure, instead of --sparsity: times as fast as before, measured here with one thread."
        ),
    ] = None
    accuracy_drop: Annotated[
        float | None,
        Parameter(help="Instead of --sparsity: the validation accuracy to lose at most (0.01 is one point)."),
    ] = None
    method: Annotated[
        Literal["ssgd", "magnitude", "random"],
        Parameter(help="ssgd trains with sparsity promotion; the baselines cut the smallest weights, or random ones."),
    ] = "ssgd"
    block: Annotated[
        IntegerPair,
        Parameter(metavar="OUT,IN", help="Cut blocks of so many outputs and inputs of a layer: 4,1.  [default: 1,1]"),
    ] = None
    n_m: Annotated[
        IntegerPair,
        Parameter(metavar="N,M", help="Keep n of each m successive inputs of an output: 2,4; instead of --sparsity."),
    ] = None
    allocation: Annotated[
        Literal["uniform", "global", "flops"],
        Parameter(
            help="Give each tensor the same sparsity, rank all weights together, or remove more where a weight costs "
            "more multiplications."
        ),
    ] = "global"
    tensors: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            metavar="PATTERN",
            help="Parameters to prune. May be repeated.  [default: weights and embeddings]",
        ),
    ] = None
    rounds: Annotated[
        int | None, Parameter(help="Number of cuts, spread over the training on a cubic schedule.  [default: epochs]")
    ] = None
    fresh: Annotated[bool, SWITCH, Parameter(help="Initialize the weights anew before the training.")] = False


@Parameter(name="*", group=LOOP)
@dataclass(frozen=True)
class LoopFlags:
    """Settings of the training loops: arguments of :func:`onnxtrain.prune`."""

    epochs: Annotated[
        int | None,
        Parameter(
            help="Epochs of the training; 0 cuts the model as it is.  [default: chosen by data and sparsity, in stages]"
        ),
    ] = None
    fine_tune_epochs: Annotated[
        int | None, Parameter(help="Epochs of fine-tuning under the last mask.  [default: likewise]")
    ] = None
    batch_size: Annotated[
        int | None, Parameter(help="Examples per step.  [default: 64, for fewer than 10,000 examples 32]")
    ] = None
    schedule: Annotated[
        str | None, Parameter(help="Learning rates of the training, as in fit.  [default: constant after a warm-up]")
    ] = None
    fine_tune_schedule: Annotated[
        str | None, Parameter(help="Learning rates of the fine-tuning, as in fit.  [default: cosine after a warm-up]")
    ] = None


@unattended()
@quiet_on_request
def command(
    model: flags.TunedModelPath,
    /,
    *,
    data: flags.Data,
    loss: flags.Loss,
    loss_flags: LossFlags = LossFlags(),  # noqa: B008 - frozen
    validation: flags.Validation = None,
    target: flags.Target = None,
    reading: ReaderFlags = ReaderFlags(),  # noqa: B008 - frozen
    pruning: Pruning = Pruning(),
    training: Training = Training(),  # noqa: B008 - frozen
    settings: PruningOptimizer = PruningOptimizer(),  # noqa: B008 - frozen
    loop: LoopFlags = LoopFlags(),
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            group=RESULTS,
            metavar="FILE",
            help="The pruned model.  [default: MODEL-pruned.onnx, here]",
        ),
    ] = None,
    in_place: flags.InPlace = False,
    storage: Annotated[
        Literal["dense", "sparse"],
        Parameter(group=RESULTS, help="Write zeros, or sparse_initializer where that takes fewer bytes."),
    ] = "dense",
    report: Annotated[
        Path | None,
        Parameter(
            group=RESULTS,
            metavar="FOLDER",
            help="Write report.txt, .json and .png to this folder, and config.toml, which repeats the command.",
        ),
    ] = None,
    json_output: Annotated[flags.Json, Parameter(name="--json")] = False,
    threads: flags.Threads = None,
    provider: flags.Provider = None,
    quiet: flags.Quiet = False,
    config: Config = None,
    debug: flags.Debug = False,
) -> int:
    """Run ``onnxtrain prune``."""
    given = dict(locals())
    from onnxtrain.model_file.writing import only_warns
    from onnxtrain.plugins.pruning.prune import prune
    from onnxtrain.plugins.pruning.recipe import choose_optimizer

    console, default = terminal.console(), choose_optimizer(pruning.sparsity)
    arguments: dict[str, Any] = dataclasses.asdict(pruning) | dataclasses.asdict(loop)
    defaults = ("block",)
    arguments = {name: value for name, value in arguments.items() if value is not None or name not in defaults}
    path = paths.output_of(model, output, f"{model.stem}-pruned.onnx", in_place=in_place)
    paths.check_paths(
        {
            paths.MODEL: paths.model(model),
            "--data": paths.data(data),
            "--validation": paths.data(validation),
            "--loss": paths.loss(loss),
            "--output": paths.output(path, is_model=True),
            "--report": paths.Given(report, written=True, files=REPORT_FILES),
        },
        in_place=in_place,
    )
    result = prune(
        model,
        reading.source(data, loss),
        loss=loss_flags.of(loss),
        validation=reading.held_out(validation, loss),
        target=target,
        optimizer=None if (rule := settings.build(default)) == default else rule,
        storage=storage,
        save=path,
        report=report,
        progress=None if json_output else _display(console),
        runtime=flags.runtime(threads, provider),
        **arguments,
        **training.arguments(),
    )
    if report is not None:
        with only_warns("The report lacks the flags of the command"):
            _write_config(report / CONFIG, given)
    if json_output:
        print(json.dumps(result.as_dict()))  # noqa: T201
        return int(bool(result.shortfall))
    console.print(result.table())
    with only_warns("The sizes are not known"):  # measured on files in the folder for temporary ones
        terminal.lines(console, result.summary().rstrip())
    terminal.lines(console, f"model: {path} ({terminal.file_size(path)})")
    if report is not None:
        terminal.lines(console, f"report: {', '.join(sorted(str(path) for path in report.glob('report.*')))}")
    return int(bool(result.shortfall))


def _write_config(path: Path, given: Mapping[str, Any]) -> None:
    """Write the flags that repeat the command."""
    from onnxtrain.model_file.writing import AtomicFiles

    with AtomicFiles() as files, files.create(path) as file:
        file.write(as_toml(given).encode())


def _display(console: Console) -> Display:
    """Return a progress bar for a terminal, below the lines of epochs and cuts; elsewhere the lines alone."""
    from onnxtrain.training.callbacks.progress import Bar, Lines

    return Bar(console) if console.is_terminal else Lines(lambda line: terminal.lines(console, line))
