"""The site builds without a warning, has every page, and its search works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import site_hooks

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_becomes_the_first_page():
    text = "[a](docs/training.md#data) [b](CONTRIBUTING.md) [c](https://onnx.ai/x.md)"
    assert site_hooks.first_page(text) == "[a](training.md#data) [b](../CONTRIBUTING.md) [c](https://onnx.ai/x.md)"


def test_links_out_of_the_site_become_words():
    text = "[in](../training.md#data) [out](../../README.md) [web](https://onnx.ai) ![picture](../pictures/pruning.png)"
    expected = "[in](../training.md#data) out [web](https://onnx.ai) ![picture](../pictures/pruning.png)"
    assert site_hooks.without_outer_links(text, Path("benchmarks")) == expected


def test_the_navigation_has_four_kinds_of_pages():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert re.findall(r"^  - (.+):$", navigation, re.MULTILINE) == ["First steps", "How to", "Reference", "Why"]


@pytest.mark.thorough
def test_the_site_builds(tmp_path):
    """Strictly: a page that the navigation lacks, a link or an anchor that leads nowhere are errors."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    missing = [page for page in pages if not (tmp_path / "site" / page).is_file()]
    assert missing == []
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    found = {entry["location"].split("#")[0] for entry in index["docs"] if "weight decay" in entry["text"].lower()}
    assert {"training.html", "weight_decay.html"} & found
    first = (tmp_path / "site" / "index.html").read_text()
    assert "The training half of ONNX" in first
    assert not re.findall(r"""(?:src|@import)\s*[=(]?\s*["']?https?://""", first)  # nothing is fetched from elsewhere
