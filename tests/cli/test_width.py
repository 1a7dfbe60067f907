"""Output of commands fits into 80 columns on a terminal, and is complete in a pipe."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys

import numpy as np
import onnx
import pytest
from command_files import examples

import onnxtrain

pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))

LOSS = ("--loss", "softmax_cross_entropy", "--data", "train.npz", "--validation", "0.2")
METRICS = ("--metrics", "accuracy", "--metrics", "f1", "--metrics", "average_precision", "--metrics", "top_k(2)")
COMMANDS = [
    ("inspect", "model.onnx"),
    ("fit", "model.onnx", *LOSS, *METRICS, "--epochs", "2", "--run", "run"),
    ("prune", "model.onnx", *LOSS, "--sparsity", "0.5", "--epochs", "2", "--rounds", "2", "--fine-tune-epochs", "1"),
    ("doctor", "model.onnx"),
    ("runs", "."),
]


@pytest.fixture
def folder(tmp_path):
    model = onnxtrain.examples.mlp((4, 8, 3))
    long = "model.backbone.encoder.layers.11.attention.output.dense.weight"
    for tensor in model.graph.initializer:
        if tensor.name == "layer1.weight":
            tensor.name = long
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "layer1.weight":
                node.input[index] = long
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **examples())
    return tmp_path


def in_terminal(folder, arguments):
    """Output on a terminal of 80 columns, without control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxtrain", *arguments],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={name: value for name, value in environment.items() if name not in ("COLUMNS", "FORCE_COLOR")},
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not read:
            break
        found += read
    os.close(ours)
    assert process.wait() == 0, found.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", found.decode()).replace("\r\n", "\n")


@pytest.mark.thorough
def test_everything_fits_a_terminal(folder):
    for arguments in COMMANDS:
        shown = in_terminal(folder, arguments)
        frames = re.split(r"[\r\n]", shown)
        assert max(map(len, frames)) <= 80, max(frames, key=len)
        assert "…" not in shown, f"{arguments[0]} cuts something"
    assert "━" in in_terminal(folder, (*COMMANDS[2], "-o", "again.onnx")), "prune has no bar"


def test_nothing_is_cut_in_a_pipe(folder, run):
    out = run("inspect", "model.onnx").out
    assert "model.backbone.encoder.layers.11.attention.output.dense.weight" in out
    assert "\x1b" not in out
    result = run(*COMMANDS[1])
    assert result.code == 0
    assert "\x1b" not in result.out
    assert "━" not in result.out
    line = next(line for line in result.out.splitlines() if line.startswith("epoch 2/2"))
    assert "validation average precision" in line
