"""Checks, conversions and shape inferences of a model before its session: as many as the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from onnxtrain.runtime.native import kernels_available

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"


@pytest.mark.skipif(not kernels_available(), reason="the page counts with native kernels")
def test_conversions_and_inferences_equal_the_page():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "walk.py")], capture_output=True, text=True, check=True, timeout=120
    )
    counted = dict(re.findall(r"^(\D+?) +([\d,]+)$", done.stdout, re.MULTILINE))
    section = PAGE.read_text(encoding="utf-8").split("### The walk")[1].split("\n### ")[0]
    listed = dict(re.findall(r"^\| ([a-z][^|]+) \| ([\d,]+) \|$", section, re.MULTILINE))
    assert set(counted) == set(listed)
    for name in list(listed)[:4]:
        assert counted[name] == listed[name], name
