"""Terminal output of a training: the trainable parameters, the progress and the results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from onnxtrain.cli import terminal
from onnxtrain.cli.messages import in_flags
from onnxtrain.errors.formatting import count, duration, number, plural
from onnxtrain.training.callbacks import EarlyStopping, TrainingState, progress
from onnxtrain.training.report.record import words

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer


class Progress(progress.Progress):
    """Shows a training on the terminal."""

    def __init__(self, trainer: Trainer, *, name: str, display: str = "auto") -> None:
        self._console = terminal.console()
        self._trainer = trainer
        self._hints = trainer.hints  # later ones are printed as warnings
        self._name = name
        self._stop_reason: str | None = None
        self._written: dict[str, str] = {}
        bar = self._console.is_terminal and display == "auto"
        super().__init__(progress.Bar(self._console) if bar else progress.Lines(self._console.print))

    def on_fit_begin(self, state: TrainingState) -> None:
        """Print the trainable parameters, and start the bar."""
        trainer = self._trainer
        trained = sum(array.size for array in trainer.parameters.values())
        everything = sum(row.size for row in trainer.objective.table)
        optimizer = trainer.config.optimizer
        what = f"{count(trained)} of {count(everything)} weights"
        rule = f"{type(optimizer).__name__}, learning rate {optimizer.learning_rate:g}"
        self._console.print(Text.assemble((self._name, "bold"), f": trains {what} with {rule}"))
        for hint in self._hints:
            self._console.print(Text.assemble(("hint: ", "yellow"), in_flags(hint)))
        super().on_fit_begin(state)

    def on_fit_end(self, state: TrainingState) -> None:
        """Stop the bar."""
        super().on_fit_end(state)
        self._stop_reason = state.stop_reason

    def note_waiting(self) -> None:
        """Do nothing: the summary reports the waiting time."""

    def written(self, what: str, path: Path) -> None:
        """Remember a file for the summary."""
        self._written[what] = terminal.sized(path)

    def curve(self, rows: list[dict[str, float]], path: Path, *, title: str) -> None:
        """Write the training curve, or print it where a PNG needs matplotlib and it is missing."""
        from onnxtrain.training.callbacks.report import MISSING, save_curve, text_curve
        from onnxtrain.training.report.charts import matplotlib_available

        if path.suffix == ".svg" or matplotlib_available():
            save_curve(rows, path, title=title)
            self.written("curve", path)
        else:
            self._console.print(MISSING)
            self._console.print(text_curve(rows))

    def summary(self, rows: list[dict[str, float]]) -> None:
        """Print the final table: last and best values, the time, the files."""
        if self._stop_reason:
            self._console.print(f"Stopped early: {self._stop_reason}.")
        parts: list[Any] = [measured(rows)] if rows else []
        steps = round(rows[-1]["step"]) if rows else 0
        took = f"{plural(steps, 'step')}, {duration(self.seconds)}"
        took += f", {self.speed}" if self.speed else ""
        took += f", {self.waiting}" if self.waiting else ""
        parts.append(terminal.facts({"trained": took, **self._written}))
        self._console.print(Group(*parts))


def measured(rows: list[dict[str, float]]) -> Table:
    """Return the table of metrics in the last epoch and in the best one."""
    table = terminal.table("", "last epoch", "best", "in epoch", right=("last epoch", "best", "in epoch"))
    for name in rows[-1]:
        if name in ("epoch", "step", "learning_rate", "tokens_per_second"):  # the time says the last one
            continue
        values = [row.get(name, math.nan) for row in rows]
        known = [(value, index) for index, value in enumerate(values) if not math.isnan(value)]
        mode = max if EarlyStopping(name).mode == "max" else min
        best, index = mode(known, key=lambda pair: pair[0]) if known else (math.nan, 0)
        where = str(round(rows[index]["epoch"]))
        table.add_row(words(name), number(values[-1]), number(best), where)
    return table
