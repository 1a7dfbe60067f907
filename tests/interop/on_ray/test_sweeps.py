"""The examples of hyperparameter sweeps find a good learning rate and stop bad trials early."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

_EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "sweeps"


def _sweep(name: str, trials: int) -> tuple[float, int]:
    """Return the best loss and the number of trials that ended early."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(_EXAMPLES / name), "--trials", str(trials)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    found = re.search(r"with the validation loss ([\d.]+); (\d+) trials ended early", run.stdout)
    assert found, run.stdout[-2000:] + run.stderr[-2000:]
    return float(found[1]), int(found[2])


def test_optuna():
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install optuna")
    loss, pruned = _sweep("optuna_sweep.py", 10)
    assert loss < 0.3
    assert pruned > 0


def test_ray_tune():
    pytest.importorskip("ray.tune", reason="Ray Tune is not installed: pip install 'ray[tune]'")
    loss, pruned = _sweep("ray_tune.py", 8)
    assert loss < 0.5
    assert pruned > 0
