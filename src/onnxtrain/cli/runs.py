"""``onnxtrain runs``: compare trainings that ``fit --run`` recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from onnxtrain.cli import flags, terminal
from onnxtrain.errors.formatting import count, duration, number
from onnxtrain.training.report.record import words

HELP = "Compare runs: their best values, and the settings in which they differ."

EXAMPLES = """\
Examples

    onnxtrain runs runs
    onnxtrain runs runs/first runs/second --json
"""


def command(
    folders: Annotated[
        list[Path], Parameter(group=flags.RESULTS, help="Folders that fit --run wrote, or folders of such folders.")
    ],
    /,
    *,
    json_output: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain runs``."""
    from onnxtrain.training.report.record import differences, read_runs

    runs = read_runs(folders)
    differ = differences(runs)
    if json_output:
        found = [
            {
                "run": str(run.path),
                "finished": run.finished,
                "seconds": run.seconds,
                "epochs": len(run.rows),
                "best": run.best,
                "differs": settings,
            }
            for run, settings in zip(runs, differ, strict=True)
        ]
        terminal.print_json(found)
        return
    names = list(dict.fromkeys(name for run in runs for name in run.best))
    shown = [words(name) for name in names]
    table = terminal.table("run", "epochs", "time", *shown, title="best values", right=("epochs",))
    for run in runs:
        seconds = duration(run.seconds) if run.finished else "not finished"
        best = (number(run.best[name]) if name in run.best else "not measured" for name in names)
        table.add_row(str(run.path), count(len(run.rows)), seconds, *best)
    console = terminal.console()
    console.print(table)
    if differ and differ[0]:
        settings = terminal.table("run", *differ[0], title="differences")
        for run, values in zip(runs, differ, strict=True):
            settings.add_row(str(run.path), *map(_shown, values.values()))
        console.print(settings)


def _shown(value: object) -> str:
    """A setting as the command line takes it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "not given" if value is None else str(value)
