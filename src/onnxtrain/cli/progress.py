"""What a training shows: a bar for those who watch, a line per epoch, the results at the end."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from onnxtrain.cli import terminal
from onnxtrain.cli.wording import in_flags
from onnxtrain.training.callbacks import Callback, EarlyStopping, TrainingState

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

_REFRESH = 0.1
"""Seconds between two looks at the bar."""


class Progress(Callback):
    """Shows a training on the terminal.

    Args:
        trainer: What is trained.
        name: What to call the model.
        quiet: Show nothing but the results.
    """

    def __init__(self, trainer: Trainer, *, name: str, quiet: bool = False) -> None:
        self._trainer = trainer
        self._name = name
        self._quiet = quiet
        self._console = terminal.console()
        self._bar: Bar | None = None
        self._began = self._epoch_began = self._looked = 0.0
        self._seconds = 0.0
        self._total = 0.0
        self._steps = self._epoch_examples = self._examples = 0
        self._stop_reason: str | None = None
        self._written: dict[str, str] = {}

    def on_fit_begin(self, state: TrainingState) -> None:
        """Say what is trained, and put up the bar."""
        self._began = time.perf_counter()
        if self._quiet:
            return
        self._introduce()
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                transient=True,
                expand=True,
            )
            steps = state.steps_per_epoch
            total = None if steps is None or state.epochs is None else steps * state.epochs
            self._bar.add_task("", total=total, completed=state.step, status="")
            self._bar.start()

    def _introduce(self) -> None:
        trainer = self._trainer
        trained = sum(array.size for array in trainer.parameters.values())
        everything = sum(row.size for row in trainer.table)
        optimizer = trainer.optimizer
        what = f"{terminal.count(trained)} of {terminal.count(everything)} weights"
        rule = f"{type(optimizer).__name__}, learning rate {optimizer.learning_rate:g}"
        self._console.print(Text.assemble((self._name, "bold"), f": trains {what} with {rule}"))
        for hint in trainer.hints:
            self._console.print(Text.assemble(("hint: ", "yellow"), in_flags(hint)))

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Start counting."""
        self._epoch_began = time.perf_counter()
        self._total, self._steps, self._epoch_examples = 0.0, 0, 0

    def on_step_end(self, state: TrainingState) -> None:
        """Move the bar, at most ten times a second."""
        self._total += state.loss
        self._steps += 1
        self._epoch_examples += state.batch_size
        now = time.perf_counter()
        if self._bar is not None and now - self._looked > _REFRESH:
            self._looked = now
            speed = self._epoch_examples / (now - self._epoch_began)
            self._bar.update(
                self._bar.task_ids[0],
                completed=state.step,
                description=_epoch(state),
                status=f"loss {terminal.number(self._total / self._steps)}  {terminal.count(speed)} examples/s",
            )

    def on_epoch_end(self, state: TrainingState) -> None:
        """Add the epoch's line."""
        seconds = time.perf_counter() - self._epoch_began
        self._examples += self._epoch_examples
        self._stop_reason = state.stop_reason
        if self._quiet:
            return
        values = {"loss": state.loss, **state.metrics}
        parts = [f"{_words(name)} {terminal.number(value)}" for name, value in values.items()]
        speed = f"{terminal.count(self._epoch_examples / seconds)} examples/s"
        self._console.print("  ".join([_epoch(state), *parts, speed]))

    def on_fit_end(self, state: TrainingState) -> None:
        """Take the bar down."""
        self._stop_reason = state.stop_reason or self._stop_reason
        self._seconds = time.perf_counter() - self._began
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def written(self, what: str, path: Path) -> None:
        """Remember a file for the summary."""
        self._written[what] = f"{path} ({terminal.file_size(path)})"

    def curve(self, rows: list[dict[str, float]], path: Path, *, title: str) -> None:
        """Write the training curve, or print it where matplotlib is missing."""
        from onnxtrain.training.report import MISSING, matplotlib_available, save_curve, text_curve

        if matplotlib_available():
            save_curve(rows, path, title=title)
            self.written("curve", path)
        else:
            self._console.print(MISSING)
            self._console.print(text_curve(rows))

    def summary(self, rows: list[dict[str, float]]) -> None:
        """The final table: last and best values, the time, the files."""
        if self._stop_reason:
            self._console.print(f"Stopped early: {self._stop_reason}.")
        parts: list[Any] = [measured(rows)] if rows else []
        steps = round(rows[-1]["step"]) if rows else 0
        took = f"{terminal.plural(steps, 'step')}, {terminal.duration(self._seconds)}"
        if self._seconds and self._examples:
            took += f", {terminal.count(self._examples / self._seconds)} examples/s"
        parts.append(terminal.facts({"trained": took, **self._written}))
        self._console.print(Group(*parts))


def measured(rows: list[dict[str, float]]) -> Table:
    """Every measured value: in the last epoch, and in its best one."""
    table = terminal.table("", "last epoch", "best", "in epoch", right=("last epoch", "best", "in epoch"))
    for name in rows[-1]:
        if name in ("epoch", "step", "learning_rate"):
            continue
        values = [row.get(name, math.nan) for row in rows]
        known = [(value, index) for index, value in enumerate(values) if not math.isnan(value)]
        mode = max if EarlyStopping(name).mode == "max" else min
        best, index = mode(known, key=lambda pair: pair[0]) if known else (math.nan, 0)
        where = str(round(rows[index]["epoch"]))
        table.add_row(_words(name), terminal.number(values[-1]), terminal.number(best), where)
    return table


def _epoch(state: TrainingState) -> str:
    total = "" if state.epochs is None else f"/{state.epochs}"
    width = len(total) - 1
    return f"epoch {state.epoch:{max(width, 1)}d}{total}"


def _words(name: str) -> str:
    return name.replace("_", " ")
