"""Public names in tools: type checkers tell right calls from wrong ones, jedi completes arguments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain
import stubs

CALLS = Path(__file__).with_name("public_calls.py")
SOURCE = Path(onnxtrain.__file__).parent.parent
WRONG = {number for number, line in enumerate(CALLS.read_text().splitlines(), 1) if line.endswith("# WRONG")}


def test_the_stubs_are_up_to_date():
    for path, text in stubs.stubs().items():
        assert path.read_text() == text, f"{path} is not up to date; run python tools/stubs.py"


def test_there_are_enough_calls():
    assert len([line for line in CALLS.read_text().splitlines() if "(" in line and "import" not in line]) >= 60
    assert len(WRONG) >= 20


@pytest.mark.thorough
def test_mypy_tells_right_from_wrong(tmp_path):
    pytest.importorskip("mypy")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--ignore-missing-imports",
        "--show-error-codes",
        "--no-pretty",
    ]
    command += ["--config-file", "", "--cache-dir", str(tmp_path), "--follow-imports", "silent", str(CALLS)]
    environment = {"PATH": "/usr/bin:/bin"}
    if SOURCE.name != "site-packages":  # where mypy looks by itself, and wants no second way
        environment["MYPYPATH"] = str(SOURCE)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    found = {int(line) for line in re.findall(r"public_calls\.py:(\d+): error", done.stdout)}
    assert found == WRONG, done.stdout + done.stderr


@pytest.mark.thorough
def test_pyright_tells_right_from_wrong(tmp_path):
    pytest.importorskip("basedpyright")
    options = {"include": [str(CALLS)], "extraPaths": [str(SOURCE)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(tmp_path)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    errors = [row for row in json.loads(done.stdout)["generalDiagnostics"] if row["severity"] == "error"]
    found = {row["range"]["start"]["line"] + 1 for row in errors if row["file"].endswith(CALLS.name)}
    assert found == WRONG, [f"{row['range']['start']['line'] + 1}: {row['message']}" for row in errors]


@pytest.mark.thorough
def test_jedi_completes_the_arguments_of_fit():
    jedi = pytest.importorskip("jedi")
    text = "import onnxtrain\ntrainer = onnxtrain.Trainer('model.onnx', loss='mse')\ntrainer.fit("
    project = jedi.Project(SOURCE, sys_path=[str(SOURCE), *sys.path])
    (signature,) = jedi.Script(text, project=project).get_signatures()
    names = [parameter.name for parameter in signature.params]
    assert names[:2] == ["data", "y"]
    assert {"epochs", "batch_size", "validation", "callbacks"} <= {*names}
    assert "epochs=" in {completion.name for completion in jedi.Script(text + "ep", project=project).complete()}
