from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_files import examples
from mistakes import Mistake

import onnxtrain
from onnxtrain.cli import main


@dataclass(frozen=True)
class Result:
    """Result of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def success(run: Run) -> Run:
    """Runs a command that has to work."""

    def call(*arguments: object) -> Result:
        result = run(*arguments)
        assert result.code == 0, result.err
        assert result.err == ""
        return result

    return call


@pytest.fixture
def full_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A device on which no space is left, in a folder of its own."""
    path = tmp_path_factory.mktemp("device") / "full"
    try:
        os.mknod(path, 0o020600, os.makedev(1, 7))
        with path.open("wb"):
            pass
    except (AttributeError, OSError):
        pytest.skip("needs the rights to make a device, on Linux")
    return path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with ``model.onnx`` (4 features, 3 classes), ``train.npz`` and ``test.npz``."""
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **examples())
    np.savez(tmp_path / "test.npz", **examples(30, seed=1))
    return tmp_path


@pytest.fixture
def ends_in_one_sentence(files: Path, run: Run) -> Callable[[Mistake], None]:
    """Makes a mistake, and requires its sentence, exit code 2, and that all files are as they were."""

    def check(mistake: Mistake) -> None:
        mistake.spoil(files)
        before = {path: path.read_bytes() for path in files.iterdir()}
        result = run(*mistake.arguments)
        assert result.code == 2
        assert re.fullmatch(r"error: [^\n]+\.\n", result.err), result.err
        assert "Traceback" not in result.err + result.out
        assert re.search(mistake.message, result.err), result.err
        after = {path: path.read_bytes() for path in files.iterdir() if not path.is_dir()}
        assert after == before

    return check
