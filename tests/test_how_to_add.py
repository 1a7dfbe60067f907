"""The parts of docs/how_to_add.md on a rule and a pass, followed in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how_to_add.md"
BLOCK = re.compile(r"^```(py|diff)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def part(title: str) -> str:
    """The section under a heading."""
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def follow(text: str, root: Path) -> None:
    """Write the files of a part, and make its changes: each has to fit in one place."""
    for kind, path, content in BLOCK.findall(text):
        file = root / path
        if kind == "py":
            assert not file.exists(), path
            file.write_text(content)
            continue
        lines = content.splitlines()
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert file.read_text().count(before) == 1, (path, before)
        file.write_text(file.read_text().replace(before, after))


def commands(text: str) -> list[list[str]]:
    """The lines that call pytest, as arguments."""
    return [line.split()[1:] for line in text.splitlines() if line.startswith("    pytest ")]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "lib")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    for folder in ("autodiff", "lowering"):
        shutil.copytree(ROOT / "tests" / folder, tmp_path / "tests" / folder, ignore=ignored)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "architecture.md", tmp_path / "docs")
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    return tmp_path


@pytest.mark.parametrize("title", ["A rule", "A pass"])
def test_a_stranger_gets_through(title: str, copy: Path) -> None:
    text = part(title)
    follow(text, copy)
    (arguments,) = commands(text)
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 4
