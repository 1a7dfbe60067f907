"""A closed terminal or pipe never stops a training: it writes its files."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from onnxtrain.cli.process import QuietStream

FIT = (
    *("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--threads", "1"),
    *("--epochs", "40", "--output", "tuned.onnx", "--history", "rows.csv", "--checkpoint", "kept", "--keep", "1"),
)
PRUNE = (
    *("prune", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--threads", "1"),
    *("--sparsity", "0.5", "--epochs", "4", "--fine-tune-epochs", "4", "--output", "tuned.onnx", "--report", "report"),
)
ONNXTRAIN = (sys.executable, "-m", "onnxtrain")


def start(folder: Path, arguments: tuple[str, ...], **options) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([*ONNXTRAIN, *arguments], cwd=folder, env=environment, **options)


def check_finished(folder: Path, arguments: tuple[str, ...] = FIT) -> None:
    onnx.checker.check_model(onnx.load(folder / "tuned.onnx"))
    if arguments[0] == "fit":
        assert len((folder / "rows.csv").read_text().splitlines()) == 41
        assert [path.name for path in (folder / "kept").glob("*.json")] == ["checkpoint-000040-step-80.json"]
    else:
        assert (folder / "report" / "report.json").is_file()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "first"),
    [(FIT, b"model.onnx: trains 67 of 67 weights"), (PRUNE, b"training: epoch 1 of ")],
    ids=["fit", "prune"],
)
def test_a_pipe_whose_reader_has_seen_enough(files, arguments, first) -> None:
    with start(files, arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(first)
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0
    check_finished(files, arguments)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_streams_that_are_closed_from_the_start(files, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    process = start(files, FIT, preexec_fn=close)
    assert process.wait() == 0
    check_finished(files)


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [("inspect", "model.onnx"), ("fit", "nothing.onnx")])
def test_other_commands_with_closed_streams(files, arguments: tuple[str, ...]) -> None:
    def close() -> None:
        os.close(1)

    process = start(files, arguments, preexec_fn=close, stderr=subprocess.PIPE)
    error = process.communicate()[1].decode()
    assert "defect" not in error
    assert process.returncode == (2 if arguments[0] == "fit" else 0)


@pytest.mark.thorough
def test_a_full_disk_under_the_messages(files, full_device) -> None:
    with full_device.open("wb") as full:
        process = start(files, FIT, stdout=full, stderr=subprocess.PIPE)
        error = process.communicate()[1]
    assert process.returncode == 2
    assert b"What was printed is incomplete" in error
    check_finished(files)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arguments", [FIT, PRUNE], ids=lambda arguments: arguments[0])
def test_a_terminal_that_is_closed(files, arguments) -> None:
    """Its processes get SIGHUP, and every write fails from then on."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(files)
        os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [*ONNXTRAIN, *arguments])
    seen = b""
    while b"trains 67" not in seen and b"epoch" not in seen:
        seen += os.read(terminal, 1024)
    os.close(terminal)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("the training did not end")
    assert os.waitstatus_to_exitcode(status) == 0
    check_finished(files, arguments)


def test_the_signal_means_what_it_meant_before_and_after_a_training(files, success) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: heard.append(number))
    try:
        success(*FIT)
        os.kill(os.getpid(), signal.SIGHUP)
        assert heard == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


class Failing:
    """A stream that fails in its own way."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise self.error

    flush = isatty = lambda self: self.write("")


@pytest.mark.parametrize(
    ("error", "quiet"),
    [(BrokenPipeError(), True), (OSError(5, "EIO"), True), (OSError(28, "ENOSPC"), True), (BlockingIOError(), False),
     (ValueError("I/O operation on closed file"), True)],
)  # fmt: skip
def test_a_stream_that_fails_is_left_alone(error: Exception, quiet: bool) -> None:
    stream = Failing(error)
    output = QuietStream(stream)
    for _ in range(3):
        assert output.write("text") == 4
        output.flush()
    assert not output.isatty()
    assert (output.failure is not None) == quiet
    assert stream.tries == (1 if quiet else 6) + 1


def test_characters_that_the_terminal_does_not_have_are_written_as_escapes() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    output = QuietStream(stream)
    output.write("a \N{GREEK SMALL LETTER ALPHA}")
    output.flush()
    assert output.failure is None
    assert stream.buffer.getvalue() == b"a \\u03b1"
    stream.close()


def test_a_defect_while_writing_is_not_a_closed_stream() -> None:
    with pytest.raises(ZeroDivisionError):
        QuietStream(Failing(ZeroDivisionError())).write("text")


@pytest.mark.thorough
def test_the_weights_are_those_of_a_training_that_somebody_watched(files, success) -> None:
    success(*FIT[: FIT.index("--output")], "--output", "watched.onnx")
    with start(files, FIT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 0
    assert (files / "watched.onnx").read_bytes() == (files / "tuned.onnx").read_bytes()
