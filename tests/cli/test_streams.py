"""Output streams: closed streams, closed readers, full devices, limited encodings."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EVALUATE = ("evaluate", "model.onnx", "--data", "test.npz", "--loss", "softmax_cross_entropy")
EXPORT = ("export", "model.onnx", "--loss", "softmax_cross_entropy", "--step-graph", "written.onnx")
COMMANDS = {
    "inspect": ("inspect", "model.onnx"),
    "json": ("inspect", "model.onnx", "--json"),
    "evaluate": EVALUATE,
    "predict": ("predict", "model.onnx", "--data", "test.npz", "--output", "written.npz"),
    "export": EXPORT,
    "help": ("fit", "--help"),
}


@pytest.fixture
def start(files: Path):
    """Run a command in a separate process."""

    def call(
        *arguments: str, python: tuple[str, ...] = (), shell: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, *python, "-m", "onnxtrain", *arguments]
        if shell:
            line = ["bash", "-c", f'set -o pipefail; "$@" {shell}', "bash", *line]
        return subprocess.run(
            line, cwd=files, env=os.environ | environment, text=True, capture_output=True, timeout=60, check=False
        )

    return call


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_output_is_not_an_error(command, start, files):
    result = start(*COMMANDS[command], shell=">&-")
    assert (result.returncode, result.stderr) == (0, "")
    assert command not in ("predict", "export") or list(files.glob("written.*"))


def test_a_reader_that_exits_is_not_an_error(start):
    result = start(*EVALUATE, shell="| true")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.thorough
def test_nothing_is_written_into_files_when_all_streams_are_closed(start, files):
    assert start(*EXPORT).returncode == 0
    expected = (files / "written.onnx").read_bytes()
    (files / "written.onnx").unlink()
    assert start(*EXPORT, shell="<&- >&- 2>&-").returncode == 0
    assert (files / "written.onnx").read_bytes() == expected


def test_without_an_error_stream_the_exit_code_tells(start):
    result = start("inspect", "missing.onnx", shell="2>&-")
    assert (result.returncode, result.stdout) == (2, "")


def test_on_a_full_error_stream_the_exit_code_tells(start, full_device):
    assert start("inspect", "missing.onnx", shell=f"2>{shlex.quote(str(full_device))}").returncode == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["inspect", "json"])
def test_a_full_device_is_reported(command, start, full_device):
    result = start(*COMMANDS[command], shell=f"> {shlex.quote(str(full_device))}")
    assert result.returncode == 2
    assert result.stderr == (
        "error: What was printed is incomplete, since the standard output could not be written: "
        "No space left on device.\n"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=str)
def test_characters_that_the_encoding_lacks_become_escapes(environment, start):
    result = start("prune", "--help-all", PYTHONCOERCECLOCALE="0", **environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert r"Weight \u03bb of the measure" in result.stdout
    assert result.stdout.isascii()


@pytest.mark.thorough
def test_names_that_are_not_text_are_shown(start, files):
    name = os.fsdecode(b"caf\xe9.onnx")
    (files / "model.onnx").rename(files / name)
    result = start("inspect", name)
    assert (result.returncode, result.stderr) == (0, "")
    assert r"caf\udce9.onnx" in result.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [("--help",), ("fit", "--help"), ("inspect", "model.onnx"), EXPORT], ids=str)
def test_without_docstrings_and_assertions(arguments, start):
    optimised, plain = (start(*arguments, python=options) for options in (("-OO",), ()))
    assert (optimised.returncode, optimised.stderr) == (0, "")
    assert optimised.stdout == plain.stdout


# In the middle of the import of each: first and last ones, modules in Python and in C.
IMPORTED = ("onnxtrain.cli.configuration", "onnxtrain.cli.app", "cyclopts", "rich", "numpy._core._multiarray_umath")
LATER = ("onnx.checker", "onnx_ir._core", "onnxtrain.model_file.file", "onnxruntime.capi.onnxruntime_pybind11_state")
PRESS = """
import sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Press())
from onnxtrain.cli import main

sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("module", [*IMPORTED, *LATER])
def test_interrupt_while_starting(module, files):
    result = subprocess.run(
        [sys.executable, "-c", PRESS, module, *EVALUATE],
        cwd=files,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "error: Interrupted; nothing was written.\n")
