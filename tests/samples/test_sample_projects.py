"""The samples for devices: what can be compiled here compiles, and what can be run here runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "samples"
JAVA = SAMPLES / "java" / "src" / "main" / "java" / "samples"
KOTLIN = SAMPLES / "android" / "app" / "src" / "main" / "java" / "samples"
COMPILER = Path(os.environ.get("KOTLIN_COMPILER", ROOT / "web" / "node_modules" / "kotlin-compiler")) / "lib"
needs_java = pytest.mark.skipif(shutil.which("javac") is None, reason="there is no javac")


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The signatures of ONNX Runtime's Java API that the samples use, compiled."""
    folder = tmp_path_factory.mktemp("api")
    run("javac", "-d", folder, *sorted((Path(__file__).parent / "api").rglob("*.java")))
    return folder


@needs_java
@pytest.mark.thorough
def test_java_compiles_and_copies_states(api: Path, tmp_path: Path) -> None:
    run("javac", "-Xlint:all", "-Werror", "-cp", api, "-d", tmp_path / "classes", *sorted(JAVA.glob("*.java")))
    states = {
        "w/V": np.arange(6, dtype=np.float32).reshape(2, 3),
        "T": np.array(7),
        "empty": np.zeros((0, 2), np.float32),
        "wide": np.array([1.5, 2.5]),
    }
    save_file(states, tmp_path / "states.safetensors")
    copy = tmp_path / "copy.safetensors"
    run("java", "-cp", tmp_path / "classes", "samples.Safetensors", tmp_path / "states.safetensors", copy)
    found = load_file(copy)
    assert found.keys() == states.keys()
    for name, array in states.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@needs_java
@pytest.mark.thorough
@pytest.mark.skipif(not COMPILER.is_dir(), reason="there is no Kotlin compiler (npm install kotlin-compiler)")
def test_kotlin_compiles(api: Path, tmp_path: Path) -> None:
    library = COMPILER / "kotlin-stdlib.jar"
    compiler = [
        "java",
        "-cp",
        f"{COMPILER}/*",
        "org.jetbrains.kotlin.cli.jvm.K2JVMCompiler",
        "-no-stdlib",
        "-no-reflect",
    ]
    run(*compiler, "-Werror", "-cp", f"{library}:{api}", "-d", tmp_path / "classes", KOTLIN / "StepGraph.kt")
    assert (tmp_path / "classes" / "samples" / "StepGraph.class").is_file()


def test_the_page_says_for_every_sample_what_was_run() -> None:
    page = (SAMPLES / "README.md").read_text()
    folders = {path.name for path in SAMPLES.iterdir() if path.is_dir()}
    rows = dict(re.findall(r"^\| `(\w+)/` \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == folders
    assert all(len(row.split(" | ")) == 3 for row in rows.values())
    assert rows["ios"].endswith("| no | no")
    assert rows["csharp"].endswith("| no | no")


@pytest.mark.parametrize("name", ["java/**/*.java", "android/**/*.kt", "csharp/*.cs", "ios/**/*.swift"])
def test_every_sample_uses_the_names_of_step_graphs(name: str) -> None:
    """Each disables the optimizer that step graphs must not run with, and writes states in safetensors."""
    text = "\n".join(path.read_text() for path in sorted(SAMPLES.glob(name)))
    for part in ("EliminateDropout", "safetensors", '"loss"', "_new" if name.startswith("ios") else "onnxtrain.states"):
        assert part in text, part
