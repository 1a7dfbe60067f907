"""The parts of docs/how_to_add.md, followed in a copy of the repository; its native code is compiled, but not run."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough  # it takes seconds

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how_to_add.md"
BLOCK = re.compile(r"^```(py|cpp|diff)\n(?:#|//) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

TITLES = ("A rule", "A pass", "An optimizer", "A loss", "A data format", "An option", "A kernel")

QUIET = ["-q", "-p", "no:cacheprovider", "-W", "ignore:onnxtrain's native kernels cannot be loaded"]


def part(title: str) -> str:
    """The section under a heading."""
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def follow(text: str, root: Path) -> None:
    """Write the files of a part, and make its changes: each has to fit in one place."""
    for kind, path, content in BLOCK.findall(text):
        file = root / path
        if kind != "diff":
            assert not file.exists(), path
            file.write_text(content)
            continue
        lines = content.splitlines()
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert file.read_text().count(before) == 1, (path, before)
        file.write_text(file.read_text().replace(before, after))


def commands(text: str) -> list[list[str]]:
    """The lines that call Python or pytest and need no native library, as arguments of Python."""
    found = [
        shlex.split(line) for line in re.findall(r"^    ((?:pytest|python -m|python tools/).*)$", text, re.MULTILINE)
    ]
    return [
        ["-m", "pytest", *QUIET, *words[1:]] if words[0] == "pytest" else words[1:]
        for words in found
        if "tests/native" not in words
    ]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "lib")
    for folder in ("src", "native", "tools", "docs", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for folder in (
        "autodiff",
        "cli",
        "data",
        "distributed",
        "losses",
        "passes",
        "plugins",
        "operators",
        "native",
        "training",
        "weights",
        "zoo",
    ):
        shutil.copytree(ROOT / "tests" / folder, tmp_path / "tests" / folder, ignore=ignored)
    tests = (
        "call_arguments",
        "conftest",
        "public_calls",
        "sampling",
        "sentences",
        "test_names_page",
        "test_option_docs",
        "test_types",
    )
    for file in (
        "pyproject.toml",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "README.md",
        "tests/sentences.toml",
        *(f"tests/{name}.py" for name in tests),
    ):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


@pytest.mark.parametrize("title", TITLES)
def test_a_stranger_gets_through(title: str, copy: Path) -> None:
    text = part(title)
    follow(text, copy)
    environment, passed = {**os.environ, "PYTHONPATH": str(copy / "src")}, 0
    for arguments in commands(text):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        passed += sum(map(int, re.findall(r"(\d+) passed", done.stdout)))
    assert passed >= 4


@pytest.mark.parametrize("title", ["A rule", "An optimizer", "A loss", "A data format"])
def test_it_takes_two_files(title: str) -> None:
    assert len({path for _, path, _ in BLOCK.findall(part(title))}) == 2


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler for C++20")
@pytest.mark.parametrize(
    ("title", "sources"),
    [
        ("An optimizer", ["optimizers/kernels.cpp", "optimizers/optimizers.cpp"]),
        ("A kernel", ["kernels/kernels.cpp", "activations/node.cpp", "operators/register.cpp"]),
    ],
)
def test_the_native_code_compiles(title: str, sources: list[str], copy: Path) -> None:
    follow(part(title), copy)
    generated = '#pragma once\n#include "optimizers/rules/{0}.h"\n#define ONNXTRAIN_OPTIMIZER_RULES(each) each({0})\n'
    rule = "qhm" if title == "An optimizer" else "momentum"
    (copy / "optimizer_rules.h").write_text(generated.format(rule))
    options = ["-std=c++20", "-fsyntax-only", "-Wno-psabi", "-DONNXTRAIN_INSTRUCTION_SET=baseline"]
    command = ["c++", *options, "-iquote", "native", "-iquote", ".", *(f"native/{source}" for source in sources)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("ruff", "mypy"))), reason="needs the lint extra")
def test_the_files_of_the_page_are_clean(copy: Path) -> None:
    files = set()
    for title in TITLES:
        follow(part(title), copy)
        files |= {path for _, path, _ in BLOCK.findall(part(title)) if path.endswith(".py")}
    for command in (["ruff", "check", *files], ["ruff", "format", "--check", *files], ["mypy"]):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=copy, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
