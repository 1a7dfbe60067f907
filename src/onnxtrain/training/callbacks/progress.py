"""Progress display of a training: a bar in a terminal, a table in a notebook, lines in a log."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from onnxtrain.errors import OptionError
from onnxtrain.errors.formatting import count, duration, html_table, number, plural, waiting
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.training.callbacks.base import Callback, TrainingState
from onnxtrain.training.report.record import words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichBar

ProgressLike = bool | Literal["auto", "bar", "notebook", "lines"]
"""Progress display: ``"auto"`` or ``True`` chooses by the environment, ``False`` shows nothing."""

_MINUTE = 60.0
"""Seconds between two lines in a log within a long epoch."""


@dataclass(frozen=True)
class Status:
    """Progress of a training, for display."""

    epoch: str
    parts: list[str]
    steps: int
    total: int | None

    def __str__(self) -> str:
        return "  ".join([self.epoch, *self.parts])


class Display:
    """Base of progress displays; it shows nothing."""

    interval = float("inf")
    """Seconds between two updates within an epoch."""

    def begin(self, status: Status) -> None:
        """Called before the first step."""

    def step(self, status: Status) -> None:
        """Called after a step, once per interval."""

    def epoch(self, status: Status, row: dict[str, object]) -> None:
        """Called after an epoch, with its values in words and as a row."""

    def end(self, summary: str) -> None:
        """Called after the last step."""

    def note(self, text: str) -> None:
        """Called after the last step with a further line."""

    def close(self) -> None:
        """Release the terminal; called in any case, also after an error."""


class Bar(Display):
    """Progress bar in a terminal, with a line above it for every epoch."""

    interval = 0.1

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._bar: RichBar | None = None

    def begin(self, status: Status) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichBar

        self._bar = RichBar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            transient=True,
            expand=True,
            auto_refresh=False,  # no thread
        )
        self._bar.add_task(status.epoch, total=status.total, completed=status.steps, status="")
        self._bar.start()

    def step(self, status: Status) -> None:
        """Update the bar."""
        if self._bar is not None:
            shown = "  ".join(status.parts)
            self._bar.update(
                self._bar.task_ids[0],
                completed=status.steps,
                description=status.epoch,
                status=shown,
                refresh=True,
            )

    def epoch(self, status: Status, row: dict[str, object]) -> None:
        """Print the epoch's line."""
        self._console.print(str(status))

    def note(self, text: str) -> None:
        """Print the line."""
        self._console.print(text)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Lines(Display):
    """A line for every epoch, and one a minute within long epochs."""

    interval = _MINUTE

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _write_line

    def step(self, status: Status) -> None:
        """Print the progress within the epoch."""
        of = "" if status.total is None else f" of {count(status.total)}"
        self._write(f"{status.epoch}  step {count(status.steps)}{of}  {'  '.join(status.parts)}")

    def epoch(self, status: Status, row: dict[str, object]) -> None:
        """Print the epoch's values."""
        self._write(str(status))

    def note(self, text: str) -> None:
        """Print the line."""
        self._write(text)


class StepsOf(Display):
    """A display of steps alone, for callers that report epochs themselves."""

    def __init__(self, display: Display) -> None:
        self.interval = display.interval
        self.begin, self.step, self.close = display.begin, display.step, display.close  # type: ignore[method-assign]


class Notebook(Display):
    """A bar and a table of epochs in a notebook, without widgets."""

    interval = 0.25

    def __init__(self) -> None:
        self._status: Status | None = None
        self._summary = ""
        self._rows: list[dict[str, object]] = []
        self._handle: Any = None

    def begin(self, status: Status) -> None:
        """Show the bar."""
        from IPython.display import display

        self._status = status
        self._handle = display(self, display_id=True)

    def step(self, status: Status) -> None:
        """Update the bar."""
        self._status = status
        self._update()

    def epoch(self, status: Status, row: dict[str, object]) -> None:
        """Add a row to the table."""
        self._status = status
        self._rows.append(row)
        self._update()

    def end(self, summary: str) -> None:
        """Replace the bar by the summary."""
        self._summary = summary
        self._update()

    def _update(self) -> None:
        if self._handle is not None:
            self._handle.update(self)

    def __repr__(self) -> str:
        return self._summary or str(self._status)

    def _repr_html_(self) -> str:
        shown = f"<div>{html.escape(self._summary)}</div>"
        if not self._summary and self._status is not None:
            total = "" if self._status.total is None else f' value="{self._status.steps}" max="{self._status.total}"'
            text = html.escape(str(self._status))
            shown = f'<div><progress{total} style="width: 20em"></progress> {text}</div>'
        return shown + (html_table(self._rows, most=20) if self._rows else "")


@checks_arguments
class Progress(Callback):
    """Display the progress of a training.

    Args:
        display: The display.
    """

    writes_only = True

    def __init__(self, display: Display) -> None:
        self._display = display
        self._began = self._steady_since = self._epoch_began = self._looked = 0.0
        self._first_step = self._epoch_steps = self._epoch_examples = self._epoch_tokens = self._tokens = 0
        self._of_tokens = False
        self._total_loss = 0.0
        self.examples = 0
        """Number of examples trained on so far."""
        self.seconds = 0.0
        """Duration of the training in seconds, once it has ended."""
        self.waiting = ""
        """Time spent waiting for data, in words; empty where it was short."""

    def on_fit_begin(self, state: TrainingState) -> None:
        """Start the display."""
        self._began = self._looked = time.perf_counter()
        self._first_step, self.examples, self._tokens = state.step, 0, 0
        self._of_tokens = state.of_tokens
        self._show(lambda: self._display.begin(self._status(state, [])))

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Reset the counters of the epoch."""
        self._epoch_began = time.perf_counter()
        self._total_loss, self._epoch_steps, self._epoch_examples, self._epoch_tokens = 0.0, 0, 0, 0

    def on_step_end(self, state: TrainingState) -> None:
        """Show the step, at most once per interval."""
        self._total_loss += state.loss
        self._epoch_steps += 1
        self._epoch_examples += state.batch_size
        if self._of_tokens and state.batch is not None:
            self._epoch_tokens += state.batch.tokens
        now = time.perf_counter()
        if state.step == self._first_step + 1:
            self._steady_since = now  # the first step compiles the session
        if now - self._looked > self._display.interval:
            self._looked = now
            parts = [f"loss {number(self._total_loss / self._epoch_steps)}", self._speed(now - self._epoch_began)]
            self._show(lambda: self._display.step(self._status(state, parts + self._time_left(state, now))))

    def on_epoch_end(self, state: TrainingState) -> None:
        """Show the values of the epoch."""
        now = time.perf_counter()
        self.examples += self._epoch_examples
        self._tokens += self._epoch_tokens
        self._looked = now
        if not _is_shown(state):
            return
        values = {"loss": state.loss, **state.metrics}
        shown = {words(name): number(value) for name, value in values.items()}
        speed = self._speed(now - self._epoch_began)
        status = self._status(state, [*(f"{name} {value}" for name, value in shown.items()), speed])
        rate, _, unit = speed.partition(" ")
        row = {"epoch": state.epoch, **shown, unit: rate}
        self._show(lambda: self._display.epoch(status, row))

    def on_fit_end(self, state: TrainingState) -> None:
        """Show the summary."""
        self.seconds = time.perf_counter() - self._began
        parts = [plural(state.epoch, "epoch"), plural(state.step, "step"), duration(self.seconds)]
        if self.speed:
            parts.append(self.speed)
        self.waiting = waiting(state.waited, self.seconds, state.data)
        if self.waiting:
            parts.append(self.waiting)
            self.note_waiting()
        stopped = f". Stopped early: {state.stop_reason}" if state.stop_reason else ""
        self._show(lambda: self._display.end(", ".join(parts) + stopped + "."))
        self.close()

    def note(self, text: str) -> None:
        """Show a further line."""
        self._show(lambda: self._display.note(text))

    def note_waiting(self) -> None:
        """Show the time spent waiting for data."""
        self._show(lambda: self._display.note(self.waiting))

    def close(self) -> None:
        """Release the terminal, also after an error."""
        self._show(self._display.close)

    def _status(self, state: TrainingState, parts: list[str]) -> Status:
        steps = state.steps_per_epoch
        total = None if steps is None or state.epochs is None else steps * state.epochs
        return Status(_epoch(state), parts, state.step, total)

    @property
    def speed(self) -> str:
        """Speed of the training that has ended, in words; empty where nothing was trained."""
        return self._rate(self.examples, self._tokens, self.seconds) if self.examples and self.seconds else ""

    def _speed(self, seconds: float) -> str:
        return self._rate(self._epoch_examples, self._epoch_tokens, seconds)

    def _rate(self, examples: int, tokens: int, seconds: float) -> str:
        number, unit = (tokens, "tokens/s") if self._of_tokens else (examples, "examples/s")
        return f"{count(number / max(seconds, 1e-9))} {unit}"

    def _time_left(self, state: TrainingState, now: float) -> list[str]:
        """Estimate the time left from the steps after the first, which compiles the session."""
        timed = state.step - self._first_step - 1
        if timed < 1 or state.steps_per_epoch is None or state.epochs is None:
            return []
        left = state.steps_per_epoch * state.epochs - state.step
        return [f"time left {duration(left * (now - self._steady_since) / timed)}"]

    def _show(self, call: Callable[[], object]) -> None:
        """Call the display; drop it if it cannot be written to, and go on training."""
        try:
            call()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._display = Display()


def _is_shown(state: TrainingState) -> bool:
    """Return whether an epoch gets a line: the first 100, then every 10th, after 1,000 every 100th; and the last."""
    every = 10 ** max(len(str(state.epoch - 1)) - 2, 0)
    return state.epoch % every == 0 or state.epoch == state.epochs or state.stop


def _epoch(state: TrainingState) -> str:
    total = "" if state.epochs is None else f"/{state.epochs}"
    width = len(total) - 1
    return f"epoch {state.epoch:{max(width, 1)}d}{total}"


def _write_line(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def display_for(progress: ProgressLike) -> Display | None:
    """Return the display for the option of `fit`; None for no display."""
    if progress is False:
        return None
    if progress is True or progress == "auto":
        progress = "notebook" if _in_notebook() else "bar" if _in_terminal() else "lines"
    if progress == "bar":
        return Bar()
    if progress == "lines":
        return Lines()
    if progress == "notebook":
        return Notebook()
    raise OptionError(f"progress is {progress!r}; it needs 'auto', 'bar', 'notebook', 'lines', True or False.").about(
        "progress", got=progress
    )


def _in_notebook() -> bool:
    interactive = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _in_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (OSError, ValueError):  # closed
        return False
