"""A killed save leaves the old model or the new one, and the next save removes its leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_kill_point() -> None:
    """Each file operation of each case of ``kill_points.py``: half a write, fsync, rename, removal."""
    program = Path(__file__).with_name("kill_points.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300  # points in all
