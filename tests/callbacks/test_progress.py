"""Progress display of a training: in a terminal, in a log, in a notebook, or off."""

import io
import re
import sys
import types

import numpy as np
import pytest
from rich.console import Console

import onnxtrain
from onnxtrain import examples
from onnxtrain.training.callbacks import Callback, EarlyStopping, Progress, TrainingState, progress
from onnxtrain.training.callbacks.progress import Bar, Display, Lines, Notebook
from sentences import raises_sentence

X, Y = np.eye(4, dtype=np.float32)[np.arange(12) % 4], np.arange(12) % 3


def fit(**options):
    trainer = onnxtrain.Trainer(examples.mlp((4, 3)), loss="cross_entropy")
    return trainer.fit(X, Y, validation=(X, Y), metrics="accuracy", batch_size=5, **options)


LINE = r"epoch {}/2  loss [\d.]+  validation loss [\d.]+  validation accuracy [\d.]+  [\d,]+ examples/s"


@pytest.mark.parametrize("asked", ["auto", True, "lines"])
def test_a_log_gets_a_line_for_every_epoch(asked, capsys):
    fit(epochs=2, progress=asked)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [bool(re.fullmatch(LINE.format(i), line)) for i, line in enumerate(lines, 1)] == [True, True], lines


def test_nothing_is_shown_when_off(capsys):
    fit(epochs=2, progress=False)
    assert capsys.readouterr() == ("", "")


def test_invalid_options_are_refused():
    with raises_sentence("progress_option", what="progress", got="rich"):
        fit(progress="rich")


def terminal(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return screen


def test_a_terminal_gets_a_bar(monkeypatch):
    screen = terminal(monkeypatch)
    monkeypatch.setattr(Bar, "interval", 0.0)
    fit(epochs=2)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"epoch 2/2 .*━+.* loss [\d.]+  [\d,]+ examples/s  time left 0\.0 s", text)
    assert re.search(LINE.format(2), text)
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is visible again


def test_the_bar_is_removed_after_an_error(monkeypatch):
    screen = terminal(monkeypatch)

    class Breaks(Callback):
        def on_step_end(self, state):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fit(epochs=2, callbacks=[Breaks()])
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def test_a_given_display_replaces_the_default(capsys):
    lines = []
    fit(epochs=3, callbacks=[Progress(Lines(lines.append))])
    assert [line[:9] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_closed_log_does_not_stop_training(error):
    def closed(line):
        raise error

    assert len(fit(epochs=2, callbacks=[Progress(Lines(closed))]).rows) == 2


def test_without_a_standard_error_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert len(fit(epochs=2).rows) == 2


def play(display, monkeypatch, *, epochs, steps, seconds, stop_after=None):
    """Simulate a training whose steps take some seconds each, and the first one ten times as long."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    shown, state = Progress(display), TrainingState(epochs=epochs, steps_per_epoch=steps)
    shown.on_fit_begin(state)
    for epoch in range(1, epochs + 1):
        state.epoch = epoch
        shown.on_epoch_begin(state)
        for _ in range(steps):
            clock[0] += seconds * (10 if state.step == 0 else 1)
            state.note_step(step=state.step + 1, loss=0.5, learning_rate=0.1, batch_size=8)
            shown.on_step_end(state)
        if epoch == stop_after:
            state.request_stop("loss is good")
        shown.on_epoch_end(state)
        if state.stop:
            break
    shown.on_fit_end(state)
    return shown


def test_a_long_epoch_reports_once_a_minute(monkeypatch):
    lines = []
    play(Lines(lines.append), monkeypatch, epochs=2, steps=40, seconds=2.0)
    # The first step took 20 seconds, each of the 79 others takes 2.
    assert lines[0] == "epoch 1/2  step 22 of 80  loss 0.5000  3 examples/s  time left 1 min 56 s"
    assert [line.split("  ")[:2] for line in lines] == [
        ["epoch 1/2", "step 22 of 80"],
        ["epoch 1/2", "loss 0.5000"],
        ["epoch 2/2", "step 71 of 80"],
        ["epoch 2/2", "loss 0.5000"],
    ]
    assert "time left 18.0 s" in lines[2]


@pytest.mark.parametrize(
    ("epochs", "stop_after", "numbers"),
    [
        (1010, 777, [*range(1, 101), *range(110, 771, 10), 777]),
        (1234, None, [*range(1, 101), *range(110, 1001, 10), 1100, 1200, 1234]),
    ],
)
def test_only_some_of_very_many_epochs_get_a_line(epochs, stop_after, numbers, monkeypatch):
    lines = []
    play(Lines(lines.append), monkeypatch, epochs=epochs, steps=1, seconds=0.01, stop_after=stop_after)
    assert [int(re.match(r"epoch +(\d+)/", line).group(1)) for line in lines] == numbers


def test_data_of_unknown_length_show_no_time_left(monkeypatch):
    lines = []
    shown, state = Progress(Lines(lines.append)), TrainingState(epochs=1)
    monkeypatch.setattr(Lines, "interval", 0.0)
    shown.on_fit_begin(state)
    state.epoch = 1
    shown.on_epoch_begin(state)
    for step in (1, 2):
        state.note_step(step=step, loss=1.0, learning_rate=0.1, batch_size=4)
        shown.on_step_end(state)
    assert re.fullmatch(r"epoch 1/1  step 2  loss 1.0000  [\d,]+ examples/s", lines[-1])


class Handle:
    def __init__(self, shown):
        self.pictures = [shown._repr_html_()]
        self.texts = [repr(shown)]

    def update(self, shown):
        self.pictures.append(shown._repr_html_())
        self.texts.append(repr(shown))


@pytest.fixture
def handles(monkeypatch):
    """Fake the parts of IPython that the notebook display uses."""
    found = []

    def display(shown, display_id):
        assert display_id
        found.append(Handle(shown))
        return found[-1]

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    return found


def test_a_notebook_gets_a_bar_and_a_table(handles, monkeypatch, capsys):
    monkeypatch.setattr(Notebook, "interval", 0.0)
    fit(epochs=2)
    (handle,) = handles
    assert '<progress value="0" max="6"' in handle.pictures[0]
    assert any('<progress value="5" max="6"' in picture and "time left" in picture for picture in handle.pictures)
    last = handle.pictures[-1]
    assert "<progress" not in last
    assert last.count("<tr>") == 1 + 2
    assert "<th>validation accuracy</th>" in last
    assert re.search(r"<div>2 epochs, 6 steps, [\d.]+ s, [\d,]+ examples/s\.</div>", last)
    assert re.fullmatch(r"2 epochs, 6 steps, [\d.]+ s, [\d,]+ examples/s\.", handle.texts[-1])
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_why_a_training_stopped(handles, monkeypatch):
    play(Notebook(), monkeypatch, epochs=5, steps=2, seconds=0.1, stop_after=2)
    assert handles[0].texts[-1] == "2 epochs, 4 steps, 1.3 s, 25 examples/s. Stopped early: loss is good."


def test_an_ipython_terminal_gets_lines(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    fit(epochs=1)
    assert capsys.readouterr().err.startswith("epoch 1/1  loss ")


def test_progress_may_differ_when_a_training_is_resumed(tmp_path):
    fit(epochs=1, checkpoint=tmp_path, progress="lines")
    rows = fit(epochs=2, checkpoint=tmp_path, resume=True, progress=False).rows
    assert [row["epoch"] for row in rows] == [1, 2]


def test_a_display_is_updated_at_its_interval(monkeypatch):
    class Counting(Display):
        interval = 0.5

        def __init__(self):
            self.calls = []

        def step(self, status):
            self.calls.append(status.steps)

    display = Counting()
    play(display, monkeypatch, epochs=1, steps=20, seconds=0.2)
    assert display.calls == [1, 4, 7, 10, 13, 16, 19]


def test_early_stopping_shows_in_the_last_line(capsys):
    fit(epochs=50, progress="lines", callbacks=[EarlyStopping("loss", patience=1, min_delta=10.0)])
    assert [line[:12] for line in capsys.readouterr().err.splitlines()] == ["epoch  1/50 ", "epoch  2/50 "]


def test_a_given_console_is_used():
    text = io.StringIO()
    fit(epochs=1, callbacks=[Progress(Bar(Console(file=text, width=100)))])
    assert "epoch 1/1  loss" in text.getvalue()
