"""``onnxtrain prune``: make a model sparse, keep its accuracy, and report the result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, paths, terminal
from onnxtrain.cli.configuration import Config, as_toml
from onnxtrain.cli.flags import COMMON, RESULTS
from onnxtrain.cli.plugin_flags import ReaderFlags
from onnxtrain.cli.process import quiet_on_request, unattended
from onnxtrain.cli.training_flags import LossFlags, PruningOptimizer, Training, flags_class
from onnxtrain.plugins.pruning.options import PruneOptions

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

  A smaller dense model that runs twice as fast, measured on this machine:
    onnxtrain prune model.onnx --data train.npz --validation val.npz \\
        --loss softmax_cross_entropy --structure channels --speedup 2
"""

MORE_EXAMPLES = """
  Zeros in blocks of four outputs with one input:
    onnxtrain prune model.onnx --data train.npz --validation 0.1 \\
        --loss softmax_cross_entropy --sparsity 0.9 --block 4,1

  Twenty cuts over twenty epochs, and the baseline to compare with:
    onnxtrain prune model.onnx --data train.npz --validation 0.1 \\
        --loss softmax_cross_entropy --sparsity 0.98 --epochs 20 --rounds 20
    onnxtrain prune model.onnx --data train.npz --validation 0.1 \\
        --loss softmax_cross_entropy --sparsity 0.98 --epochs 20 --rounds 20 \\
        --method magnitude
"""

CONFIG = "config.toml"
REPORT_FILES = ("report.txt", "report.json", "report.png", CONFIG)


class PruneFlags:
    """Flags of the options of :func:`onnxtrain.prune`."""

    sparsity: float | None


if TYPE_CHECKING:
    Pruning = PruneFlags
else:
    Pruning = flags_class(PruneOptions, PruneFlags)


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
    pruning: Pruning = Pruning(),  # noqa: B008 - frozen
    training: Training = Training(),  # noqa: B008 - frozen
    settings: PruningOptimizer = PruningOptimizer(),  # noqa: B008 - frozen
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            group=(RESULTS, COMMON),
            metavar="FILE",
            help="The pruned model.  [default: MODEL-pruned.onnx, here]",
        ),
    ] = None,
    in_place: flags.InPlace = False,
    report: Annotated[
        Path | None,
        Parameter(
            group=(RESULTS, COMMON),
            metavar="FOLDER",
            help="Write report.txt, .json and .png to this folder, and config.toml, which repeats the command.",
        ),
    ] = None,
    json_output: flags.Json = False,
    threads: flags.Threads = None,
    provider: flags.Provider = None,
    quiet: flags.Quiet = False,
    config: Config = None,
    debug: flags.Debug = False,
) -> int:
    """Run ``onnxtrain prune``."""
    given = dict(locals())
    from onnxtrain.model_file.writing import only_warns, write_files
    from onnxtrain.plugins.pruning.prune import prune
    from onnxtrain.plugins.pruning.recipe import choose_optimizer

    console, default = terminal.console(), choose_optimizer(pruning.sparsity)
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
        save=path,
        report=report,
        progress=None if json_output else _display(console),
        runtime=flags.runtime(threads, provider),
        **flags.given(pruning, PruneOptions),
        **training.arguments(),
    )
    if report is not None:
        with only_warns("The report lacks the flags of the command"):
            write_files({report / CONFIG: as_toml(given).encode()})
    if json_output:
        terminal.print_json(result.as_dict())
        return int(bool(result.shortfall))
    console.print(result.table())
    with only_warns("The sizes are not known"):  # measured on files in the folder for temporary ones
        terminal.lines(console, result.summary().rstrip())
    terminal.lines(console, f"model: {path} ({terminal.file_size(path)})")
    if report is not None:
        terminal.lines(console, f"report: {', '.join(sorted(str(path) for path in report.glob('report.*')))}")
    return int(bool(result.shortfall))


def _display(console: Console) -> Display:
    """Return a progress bar for a terminal, below the lines of epochs and cuts; elsewhere the lines alone."""
    from onnxtrain.training.callbacks.progress import Bar, Lines

    return Bar(console) if console.is_terminal else Lines(lambda line: terminal.lines(console, line))
