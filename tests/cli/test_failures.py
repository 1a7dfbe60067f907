"""Failures while a command runs: defects, full disks, interrupts; and tracebacks with ``--debug``."""

from __future__ import annotations

import errno
import re
import signal

import pytest
from mistakes import FIT, fit

import onnxtrain


def test_debug_shows_where(files, run):
    result = run(*fit("--loss", "crossentropy", "--debug"))
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err
    assert "error: There is no loss 'crossentropy'" in result.err


def test_debug_shows_where_arguments_are_wrong(run):
    result = run("fit", "--debug")
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err


def test_a_defect_is_called_one(files, run, monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("onnxtrain.training.advice.inspection.inspect", broken)
    result = run("inspect", "model.onnx")
    assert result.code == 1
    assert result.err.startswith("error: This is a defect of onnxtrain (ZeroDivisionError: division by zero)")
    assert "Traceback" not in result.err


def test_a_full_disk_is_not_a_defect(files, run, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "tuned.onnx")

    monkeypatch.setattr(onnxtrain.model_file.file.ModelFile, "save", full)
    result = run(*FIT)
    assert result.code == 2
    assert result.err == "error: 'tuned.onnx': No space left on device.\n"


def test_interrupt_says_that_nothing_was_written(files, run, monkeypatch):
    interrupt_after(monkeypatch, 3)
    result = run(*fit("--epochs", "5"))
    assert result.code == 130
    assert result.err == "error: Interrupted; nothing was written.\n"
    assert not (files / "tuned.onnx").exists()


def test_interrupt_keeps_the_model_so_far(files, run, monkeypatch):
    from onnxtrain.training.executors.executor import Executor

    step_batch, done = Executor.step_batch, []

    def step(self, batch, rate):
        done.append(batch)
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)
        return step_batch(self, batch, rate)

    monkeypatch.setattr(Executor, "step_batch", step)
    result = run(*fit("--epochs", "5"))
    assert result.code == 130
    assert result.err == "error: Interrupted; the model so far is in 'tuned-interrupted.onnx'.\n"
    assert len(done) == 3
    assert not (files / "tuned.onnx").exists()
    assert (files / "tuned-interrupted.onnx").read_bytes() != (files / "model.onnx").read_bytes()


def test_interrupt_names_the_checkpoint(files, run, monkeypatch):
    interrupt_after(monkeypatch, 5)
    result = run(*fit("--epochs", "5", "--checkpoint", "kept"))
    assert result.code == 130
    assert re.search(r"Interrupted; 'kept/checkpoint-.*step-4\.json' is kept, --resume goes on", result.err)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Press Ctrl-C after some steps."""
    from onnxtrain.training.executors.executor import Executor

    step_batch, done = Executor.step_batch, []

    def step(self, batch, rate):
        done.append(batch)
        if len(done) > steps:
            raise KeyboardInterrupt
        return step_batch(self, batch, rate)

    monkeypatch.setattr(Executor, "step_batch", step)


def test_a_broken_pipe_elsewhere_is_an_error(files, run, monkeypatch):
    def closed(*arguments, **options):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("onnxtrain.training.advice.inspection.inspect", closed)
    result = run("inspect", "model.onnx")
    assert result.code == 2
    assert result.err == "error: The system refused to read or write: Broken pipe; --debug shows where.\n"


@pytest.mark.parametrize(
    ("number", "reason", "way_out"),
    [
        (errno.ENOSPC, "No space left on device", "make room on the disk, "),
        (errno.EMFILE, "Too many open files", r"raise the limit for open files \(ulimit -n\), "),
        (errno.EFBIG, "File too large", r"raise the limit for the size of a file \(ulimit -f\), "),
        (errno.ENOTDIR, "Not a directory", ""),
    ],
)
def test_a_system_error_without_a_file_says_what_to_do(number, reason, way_out, files, run, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(number, reason)

    monkeypatch.setattr("onnxtrain.training.advice.inspection.inspect", refuse)
    result = run("inspect", "model.onnx")
    assert result.code == 2
    assert re.fullmatch(
        f"error: The system refused to read or write: {reason}; {way_out}--debug shows where.\n", result.err
    )


def test_too_little_memory_is_not_a_defect(files, run, monkeypatch):
    def refuse(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("onnxtrain.training.advice.inspection.inspect", refuse)
    result = run("inspect", "model.onnx")
    assert result.code == 2
    assert result.err.startswith("error: There is not enough memory for this; take smaller batches (--batch-size)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("libonnxruntime.so: failed to map segment from shared object", "There is not enough memory"),
        ("libx.so.1: cannot open shared object file", "A library cannot be loaded"),
    ],
)
def test_a_library_that_the_system_does_not_load_is_not_a_defect(text, said, files, run, monkeypatch):
    def refuse(*arguments, **options):
        raise ImportError(text)

    monkeypatch.setattr("onnxtrain.training.advice.inspection.inspect", refuse)
    result = run("inspect", "model.onnx")
    assert result.code == 2
    assert said in result.err
