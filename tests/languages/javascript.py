"""The package in ``web/``: its path, and whether the requirements of its tests are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_packages = pytest.mark.skipif(
    shutil.which("node") is None or not (WEB / "node_modules" / "onnxruntime-web").is_dir(),
    reason="there is no Node, or its packages are not installed (npm ci --ignore-scripts in web/)",
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def node(*arguments: object, timeout: float = 240) -> str:
    """Run Node in ``web/``; return its output."""
    command = ["node", *map(str, arguments)]
    done = subprocess.run(command, cwd=WEB, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def last_json(text: str) -> dict:
    """The last line of an output, which is JSON."""
    return json.loads(text.splitlines()[-1])
