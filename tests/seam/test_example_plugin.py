"""The package of examples/plugin, installed into a folder of its own, adds what docs/plugins.md says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the example, as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    source = tmp_path_factory.mktemp("source") / "plugin"  # a build writes beside the sources
    shutil.copytree(EXAMPLE, source)
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"pip cannot build the example here: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture
def run(installed, tmp_path):
    """Runs Python in a process that finds the example."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(
            [sys.executable, "-W", "error", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


PROGRAM = """
import numpy as np
import onnxtrain

assert "charbonnier" in onnxtrain.losses.LOSSES and "Charbonnier" in dir(onnxtrain.losses)
trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((2, 1)), loss="charbonnier", optimizer="adam(lr=0.1)")
history = trainer.fit("train.points", epochs=40, batch_size=16, validation="train.points", metrics="largest_error")
rows = np.loadtxt("train.points", np.float32)
difference = (trainer.predict(rows[:, :-1]) - rows[:, -1:]).astype(np.float64)
found = trainer.evaluate("train.points", metrics="largest_error")
np.testing.assert_allclose(found["loss"], (np.sqrt(difference**2 + 1) - 1).mean(), rtol=1e-4, atol=1e-6)
np.testing.assert_allclose(found["largest_error"], np.abs(difference).max(), rtol=1e-5)
print(history.rows[0]["loss"], history.rows[-1]["loss"])
"""


def test_loss_metric_and_reader(run, tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 2))
    np.savetxt(tmp_path / "train.points", np.column_stack([x, x @ [2.0, -1.0]]))
    done = run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    first, last = map(float, done.stdout.split())
    assert last < first / 20


def test_command_and_loss_of_the_command_line(run, tmp_path):
    np.savetxt(tmp_path / "a.points", np.ones((3, 3)))
    assert run("-m", "onnxtrain", "points", "a.points").stdout == "3 points of 2 numbers\n"
    assert "│ points " in run("-m", "onnxtrain", "--help").stdout
    assert "charbonnier" in run("-m", "onnxtrain", "fit", "--help-all").stdout


def test_a_plugin_that_fails_is_named_and_left_out(run, installed, tmp_path):
    information = tmp_path / "broken-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[onnxtrain.plugins]\nbroken = nowhere:register\n")
    program = """
import warnings, onnxtrain
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert "huber" in onnxtrain.losses.LOSSES and "charbonnier" in onnxtrain.losses.LOSSES
(warning,) = caught
print(warning.message)
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "The plugin 'broken' (nowhere:register) cannot be loaded: ModuleNotFoundError: No module named 'nowhere'. "
        "Update or uninstall its package.\n"
    )
