"""Ctrl-C at any moment of a command: exit code 130 with a true sentence, unless the command had ended."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from reliability.outcome import WrongError
from reliability.worker import Operations

LOSS = ("--data", "train.npz", "--loss", "softmax_cross_entropy", "--threads", "1")
LINES: tuple[tuple[str, ...], ...] = (
    ("fit", "model.onnx", *LOSS, "--epochs", "3", "-o", "out.onnx"),
    ("fit", "model.onnx", *LOSS, "--epochs", "3", "-o", "out.onnx", "--history", "rows.csv", "--run", "run"),
    ("fit", "model.onnx", *LOSS, "--epochs", "2", "-o", "out.onnx", "--checkpoint", "kept", "--checkpoint-every", "1"),
    ("prune", "model.onnx", *LOSS, "--sparsity", "0.5", "--epochs", "1", "--fine-tune-epochs", "1", "-o", "out.onnx"),
    ("predict", "model.onnx", "--data", "train.npz", "-o", "out.npz"),
    ("inspect", "model.onnx"),
    ("export", "model.onnx", "--loss", "softmax_cross_entropy", "--step-graph", "out.onnx"),
)


class Subject:
    """One command per case, in a separate process."""

    def __init__(self, shared: Path) -> None:
        import onnx

        import onnxtrain

        onnx.save(
            onnxtrain.examples.mlp((4, 5, 3)), shared / "model.onnx", save_as_external_data=True,
            location="model.onnx.data", size_threshold=0,
        )  # fmt: skip
        points = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
        np.savez(shared / "train.npz", input=points, label=points[:, :3].argmax(1))
        self._shared = shared
        self._seconds: dict[int, float] = {}

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Start a command and press Ctrl-C."""
        generator = random.Random(f"interrupts {seed} {index}")
        number = generator.randrange(len(LINES))
        if number not in self._seconds:
            folder = case.with_name("undisturbed")
            shutil.rmtree(folder, ignore_errors=True)
            self._seconds[number] = self._interrupt(LINES[number], folder, None)
        moment = generator.uniform(0.0, self._seconds[number])
        operations.run(LINES[number][0], lambda: self._interrupt(LINES[number], case / "run", moment))

    def _interrupt(self, line: tuple[str, ...], folder: Path, moment: float | None) -> float:
        folder.mkdir(parents=True)
        for name in ("model.onnx", "model.onnx.data", "train.npz"):
            shutil.copy(self._shared / name, folder / name)
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "onnxtrain", *line], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )  # fmt: skip
        if moment is not None:
            _wait_for_handler(process.pid)
            time.sleep(moment)
            process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=150)
        check(process.returncode, output, folder)
        return time.monotonic() - began


def _wait_for_handler(pid: int) -> None:
    """Wait until the interpreter has started: before, the system ends the process."""
    while True:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        found = re.search(r"SigCgt:\s*([0-9a-f]+)", text)
        if "State:\tZ" in text or found is None or int(found[1], 16) & 1 << signal.SIGINT - 1:
            return
        time.sleep(0.001)


def before_the_handler(output: str) -> bool:
    """Return whether the stack shows the start of the interpreter, or the import of the handler itself."""
    ours = re.findall(r'File "[^"]*/onnxtrain/([^"]+)", line \d+, in (\S+)', output)
    first = {("__init__.py", "<module>"), ("start.py", "<module>"), ("start.py", "catch_early_interrupt")}
    return set(ours) <= first and "lazy_loader" not in output


def check(code: int, output: str, folder: Path) -> None:
    """Raise if the exit code or the output of the process is wrong.

    Raises:
        WrongError: It is not.
    """
    if code in (-signal.SIGINT, 1) and "KeyboardInterrupt" in output and before_the_handler(output):
        return
    lines = [line for line in output.splitlines() if not line.startswith(("hint: ", "warning: "))]
    if code == 0:
        return
    if code != 130 or len(lines) != 1 or not re.fullmatch(r"error: Interrupted; .*\.", lines[0]):
        raise WrongError(f"ended with {code} and printed {output!r}", f"code {code}")
    made = [path.name for path in folder.iterdir() if path.name not in ("model.onnx", "model.onnx.data", "train.npz")]
    if "nothing was written" in output and [name for name in made if name not in ("kept", "run")]:
        raise WrongError(f"said that nothing was written, but there is {made}", "written")
    for name in ("out.onnx", "out.npz"):
        if name in made and repr(name) not in output:
            raise WrongError(f"did not say that {name} is written: {output!r}", "not said")
    left = [path.name for path in folder.rglob("*") if path.name.endswith(".tmp")]
    if left:
        raise WrongError(f"left {left}", "left")
