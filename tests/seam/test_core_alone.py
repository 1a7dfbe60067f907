"""Without the folders plugins/ and interop/ the core works, and its tests pass."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain

TESTS = Path(__file__).resolve().parents[1]
CORE = (
    *("adapters", "autodiff", "callbacks", "data", "edit", "ir", "losses", "metrics", "model_file", "native"),
    *("operators", "passes", "report", "runtime", "schedules", "training", "training_info", "weights", "working_copy"),
    *("cli/test_demo.py", "cli/test_fit.py", "cli/test_run_folder.py", "cli/test_terminal.py"),
)
"""The core's tests, but for those marked ``plugins``."""

NEED_SPARSE = ("native/test_native_sparse.py", "native/test_tuning.py")
"""Kernels of plugins/sparse."""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A folder with the package, but without its plugins."""
    folder = tmp_path_factory.mktemp("core")
    package = Path(onnxtrain.__file__).parent
    left_out = {str(package / name) for name in ("plugins", "interop")}

    def ignored(parent: str, names: list[str]) -> list[str]:
        return [name for name in names if os.path.join(parent, name) in left_out or name == "__pycache__"]

    shutil.copytree(package, folder / "onnxtrain", ignore=ignored)
    return folder


def run(core: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        check=False,
    )


def passed(core: Path, tests: tuple[str, ...]) -> int:
    """Run tests with the core alone; return how many passed."""
    paths = [str(TESTS / name) for name in tests]
    ignored = [f"--ignore={TESTS / name}" for name in NEED_SPARSE]
    marks = "not plugins and not slow and not thorough and not reliability and not browser"
    options = ("-q", "-p", "no:cacheprovider", "-m", marks, *ignored)
    done = run(core, "-m", "pytest", *options, *paths, folder=TESTS.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def test_the_core_imports_neither(core, tmp_path):
    program = """
import importlib, pkgutil, onnxtrain
for module in pkgutil.walk_packages(onnxtrain.__path__, "onnxtrain."):
    if not module.name.endswith(("__main__", "_worker")):
        importlib.import_module(module.name)
print(onnxtrain.__file__)
"""
    done = run(core, "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(core / "onnxtrain" / "__init__.py")


@pytest.mark.thorough
def test_the_demo(core, tmp_path):
    pytest.importorskip("sklearn")
    done = run(core, "-m", "onnxtrain", "demo", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 8 trained initializers changed, and nothing else in the file" in done.stdout


def test_what_is_not_there_is_said(core, tmp_path):
    program = """
import onnxtrain
from onnxtrain.cli.commands import COMMANDS
assert "prune" not in COMMANDS
for attempt in (lambda: onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="dpo"), lambda: onnxtrain.losses.DPO):
    try:
        attempt()
    except (onnxtrain.errors.OptionError, AttributeError) as error:
        print(error)
"""
    done = run(core, "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "There is no loss 'dpo'" in done.stdout
    assert "module 'onnxtrain.losses' has no attribute 'DPO'" in done.stdout


def test_tests_of_the_core_import_neither():
    """Those marked ``plugins`` import them in their bodies."""
    files = [file for name in CORE for file in sorted((TESTS / name).rglob("*.py") or [TESTS / name])]
    found = []
    for file in files:
        text = file.read_text()
        top = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
        if any(re.match(r"onnxtrain\.(plugins|interop)\b", node.module or "") for node in top):
            found.append(str(file.relative_to(TESTS)))
    assert [name for name in found if name not in NEED_SPARSE] == []


@pytest.mark.thorough
def test_tests_of_schedules(core):
    assert passed(core, ("schedules",)) > 10


@pytest.mark.slow  # minutes
@pytest.mark.timeout(3600)
def test_tests_of_the_core(core):
    assert passed(core, CORE) > 2000
