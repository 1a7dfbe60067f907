"""A model's files are replaced all together, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_examples import external_model, small_model

from onnxtrain.errors import ModelError
from onnxtrain.model_file import writing
from onnxtrain.model_file.file import ModelFile
from sentences import raises_sentence


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = external_model(tmp_path)
    before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
    file = ModelFile.load(path)

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, call, fail)
    with raises_sentence("cannot_be_written", reason="No space left on device; save it"):
        file.save(path, {"w": np.zeros((300, 4), np.float32)})
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before


def test_data_files_take_their_place_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.load(external_model(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    order: list[str] = []
    replace: Callable[..., None] = os.replace
    monkeypatch.setattr(writing.os, "replace", lambda old, new: (order.append(Path(new).name), replace(old, new)))
    file.save(tmp_path / "b" / "m.onnx", {})
    assert order == ["m.onnx.data", "m.onnx"]


def test_permissions_of_the_replaced_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small_model().SerializeToString())
    path.chmod(0o640)
    ModelFile.load(path).save(path, {})
    assert path.stat().st_mode & 0o777 == 0o640


def test_check_writable(tmp_path: Path) -> None:
    writing.check_writable(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
    with raises_sentence("target_is_folder", what=tmp_path):
        writing.check_writable(tmp_path)
    with raises_sentence("no_folder", what=f"'{tmp_path}/missing/m.onnx'", wanted=tmp_path / "missing"):
        writing.check_writable(tmp_path / "missing" / "m.onnx")
    with raises_sentence("cannot_be_written", reason="File name too long; give a name in a"):
        writing.check_writable(tmp_path / ("m" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ModelError, match=r"cannot be written: Permission denied; give a name in a folder"):
            writing.check_writable(tmp_path / "m.onnx")
    finally:
        tmp_path.chmod(0o700)
