"""Ctrl-C while files are renamed, after the last step, and during the start of the process."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from child_processes import child_process
from onnxtrain.cli import main
from onnxtrain.cli.process import listening
from reliability.subject_interrupts import before_the_handler

FIT = ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--quiet", "-o", "out.onnx")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(
        onnxtrain.examples.mlp((4, 8, 3)),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    np.savez(tmp_path / "train.npz", input=np.ones((6, 4), np.float32), label=np.arange(6) % 3)
    return tmp_path


@pytest.mark.parametrize("count", [1, 2])
def test_renames_are_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Ctrl-C at the rename of the data file, or of the model: both take their places, and the sentence says so."""
    replace, seen = os.replace, []

    def interrupting(source: str, target: str) -> None:
        replace(source, target)
        if Path(target).name.startswith("out.onnx"):
            seen.append(target)
            if len(seen) == count:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", interrupting)
    assert main(FIT) == 130
    assert "error: Interrupted; written and whole: 'out.onnx'.\n" in capsys.readouterr().err
    onnx.load(folder / "out.onnx")
    assert sorted(path.name for path in folder.glob("out*")) == ["out.onnx", "out.onnx.data"]
    assert not list(folder.glob(".*"))


def test_every_output_is_named_and_folders_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C at the last rename, after a folder with many reports: the model is named all the same."""
    replace = os.replace

    def interrupting(source: str, target: str) -> None:
        replace(source, target)
        if Path(target).name == "rows.csv":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", interrupting)
    assert main((*FIT, "--run", "run", "--history", "rows.csv")) == 130
    count = len(list((folder / "run").iterdir()))
    said = capsys.readouterr().err
    assert count >= 3
    assert said == f"error: Interrupted; written and whole: 'out.onnx', 'rows.csv', {count} files in 'run'.\n"


def test_an_unfinished_file_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sync = os.fsync

    def interrupting(descriptor: int) -> None:
        sync(descriptor)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupting)
    assert main(("predict", "model.onnx", "--data", "train.npz", "-o", "out.npz")) == 130
    assert capsys.readouterr().err == "error: Interrupted; nothing was written.\n"
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "model.onnx.data", "train.npz"]


def test_after_the_last_step(folder: Path) -> None:
    """Ctrl-C in the last callbacks is not lost."""

    class Last(onnxtrain.callbacks.Callback):
        def on_epoch_end(self, state: onnxtrain.callbacks.TrainingState) -> None:
            signal.raise_signal(signal.SIGINT)

    trainer = onnxtrain.Trainer(folder / "model.onnx", loss="softmax_cross_entropy")
    with pytest.raises(KeyboardInterrupt, match=r"^Interrupted; "):
        trainer.fit(folder / "train.npz", epochs=1, callbacks=[Last()], progress=False)


@pytest.mark.thorough
def test_an_import_does_not_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C modules clear exceptions that come while they are imported."""
    (tmp_path / "swallowing.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    lost = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with listening(whole_process=False):
            swallowing = importlib.import_module("swallowing")
            assert not hasattr(swallowing, "lost")
            for _ in range(3000):  # a single long sleep would last until its end
                time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
@pytest.mark.parametrize("moment", [0.0, 0.03, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.6])
def test_from_the_start_of_the_process(folder: Path, moment: float) -> None:
    command = [sys.executable, "-m", "onnxtrain", *FIT, "--epochs", "100000"]
    with child_process(command, stderr=subprocess.PIPE, text=True) as process:
        while not _listens(process.pid):
            time.sleep(0.001)
        time.sleep(0.05 + moment)  # the interpreter itself starts first
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    if process.returncode != 130:  # the interpreter was still starting, and nothing of the package was there
        assert "KeyboardInterrupt" in said, (process.returncode, said)
        assert before_the_handler(said)
    else:
        assert re.search(r"^error: Interrupted; .*\.\n$", said, re.MULTILINE)
        assert not list(folder.glob("*.tmp"))


def _listens(pid: int) -> bool:
    found = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return found is not None and bool(int(found[1], 16) & 1 << (signal.SIGINT - 1))
