"""Saving over an existing model with data files: new names, and removal of old files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_examples import external_model

import onnxtrain
from onnxtrain.model_file.file import ModelFile

ZEROS, ONES = ({"w": np.full((300, 4), value, np.float32)} for value in (0, 1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_data_that_onnxtrain_did_not_write_stays(tmp_path: Path) -> None:
    """Other models may use it."""
    path = external_model(tmp_path)
    (tmp_path / "copy.onnx").write_bytes(path.read_bytes())
    original = ModelFile.load(path).value("w").copy()
    for values in (ZEROS, ONES):
        ModelFile.load(path).save(path, values)
        assert len(names(tmp_path)) == 4  # copy.onnx, model.data, model.onnx, model.onnx.<hex>.data
        np.testing.assert_array_equal(ModelFile.load(tmp_path / "copy.onnx").value("w"), original)


def test_data_of_a_model_stays_when_its_copy_is_saved_over(tmp_path: Path) -> None:
    path, copy = external_model(tmp_path), tmp_path / "copy.onnx"
    ModelFile.load(path).save(path, ZEROS)
    copy.write_bytes(path.read_bytes())
    writing = "import sys, numpy as np; from onnxtrain.model_file.file import ModelFile\n"
    writing += "ModelFile.load(sys.argv[1]).save(sys.argv[1], {'w': np.ones((300, 4), np.float32)})"
    subprocess.run(
        [sys.executable, "-c", writing, str(copy)], check=True
    )  # another process wrote model.onnx.<hex>.data
    assert not ModelFile.load(path).value("w").any()
    np.testing.assert_array_equal(ModelFile.load(copy).value("w"), ONES["w"])
    subprocess.run([sys.executable, "-c", writing, str(path)], check=True)
    assert len(names(tmp_path)) == 5  # two models, model.data, one numbered data file each


def test_data_that_this_process_wrote_goes_by_any_name(tmp_path: Path) -> None:
    file, target = ModelFile.load(external_model(tmp_path / "a")), tmp_path / "b" / "model.onnx"
    target.parent.mkdir()
    file.save(target, ZEROS)
    assert names(target.parent) == ["model.onnx", "model.onnx.data"]
    file.save(target, ONES)
    assert len(names(target.parent)) == 2
    assert "model.onnx.data" not in names(target.parent)


def test_links_and_files_elsewhere_stay(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    (tmp_path / "model.data").rename(tmp_path / "real.data")
    (tmp_path / "model.data").symlink_to("real.data")
    ModelFile.load(path).save(path, ZEROS)
    assert {"model.data", "real.data"} < set(names(tmp_path))


def test_a_model_in_memory_keeps_its_data(tmp_path: Path) -> None:
    """Its owner goes on using it."""
    import onnx

    path = external_model(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    file = ModelFile.load(proto, folder=tmp_path)
    file.save(path, {"w": np.zeros((300, 4), np.float32)})
    assert file.value("w").any()
    assert not ModelFile.load(path).value("w").any()
    assert "model.data" in names(tmp_path)


def test_working_copies_and_copies_of_the_file_follow(tmp_path: Path) -> None:
    """Objects made from a file before it was overwritten read the new data."""
    path = external_model(tmp_path)
    file = ModelFile.load(path)
    tensor = file.training_model().graph.initializers["w"].const_value
    changed = file.changed(file.whole())
    value = np.full((300, 4), 3, np.float32)
    file.save(path, {"w": value})
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), value)
    np.testing.assert_array_equal(np.asarray(tensor), value)
    assert tensor.tobytes() == value.tobytes()
    np.testing.assert_array_equal(changed.value("w"), value)
    changed.save(path, {"w": 2 * value})
    np.testing.assert_array_equal(file.value("w"), 2 * value)
    np.testing.assert_array_equal(tensor.numpy(), 2 * value)
    assert len(names(tmp_path)) == 3  # with the first model.data


def test_another_run_has_saved_over_the_model_meanwhile(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    one, two = ModelFile.load(path), ModelFile.load(path)
    bias = two.value("b").copy()
    one.save(path, {"w": np.zeros((300, 4), np.float32), "b": np.zeros(4, np.float32)})
    two.save(path, {"w": np.ones((300, 4), np.float32)})
    again = ModelFile.load(path)
    np.testing.assert_array_equal(again.value("w"), 1)
    np.testing.assert_array_equal(again.value("b"), bias)
    assert len(names(tmp_path)) == 3  # with the first model.data


def test_the_same_result_again_gives_the_same_files(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
    file = ModelFile.load(path)
    file.save(path, {"w": file.value("w")})
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before
    file.save(path, ONES)
    after = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
    assert after != before
    file.save(path, ONES)
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == after
    file.save(path, ZEROS)
    file.save(path, ONES)
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == after


def test_only_the_location_changes(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    before = path.read_bytes()
    file = ModelFile.load(path)
    file.save(path, {"w": file.value("w") + 1})
    (data,) = tmp_path.glob("model.onnx.*.data")
    model = ModelFile.load(path)
    for tensor in model.proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                assert entry.value == data.name
                entry.value = "model.data"
    assert model.proto.SerializeToString() == before


@pytest.mark.parametrize(
    "name", ["w", "w.bin", "model.onnx.data", ".data", "x" * 250 + ".data", "a.deadbeef.bin", "ü" * 120]
)
def test_new_names(tmp_path: Path, name: str) -> None:
    path = external_model(tmp_path)
    model = ModelFile.load(path).proto
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    path.write_bytes(model.SerializeToString())
    (tmp_path / "model.data").rename(tmp_path / name)
    file = ModelFile.load(path)
    value = np.full((300, 4), 3, np.float32)
    lengths = set()
    for _ in range(3):
        file.save(path, {"w": value})
        np.testing.assert_array_equal(ModelFile.load(path).value("w"), value)
        (data,) = (item for item in tmp_path.iterdir() if item not in (path, tmp_path / name))
        lengths.add(len(data.name))
    assert len(lengths) == 1  # names do not grow


def test_one_data_file_by_two_spellings(tmp_path: Path) -> None:
    path = external_model(tmp_path / "a")
    model = ModelFile.load(path).proto
    for entry in model.graph.initializer[1].external_data:
        if entry.key == "location":
            entry.value = "./model.data"
    path.write_bytes(model.SerializeToString())
    file = ModelFile.load(path)
    values = {"w": np.full((300, 4), 3, np.float32), "b": np.full(4, 5, np.float32)}
    (tmp_path / "b").mkdir()
    for target in (tmp_path / "b" / "model.onnx", path):
        file.save(target, values)
        for name, value in values.items():
            np.testing.assert_array_equal(ModelFile.load(target).value(name), value)
        assert len([name for name in names(target.parent) if name != "model.data"]) == 2


def test_training_continues_after_a_save_over_its_model(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    trainer = onnxtrain.Trainer(path, loss="mean_squared_error")
    x, y = np.ones((4, 300), np.float32), np.ones(4, np.float32)
    trainer.train_step(x, y)
    trainer.save(path)
    assert len(names(tmp_path)) == 3  # with the first model.data
    before = trainer.evaluate((x, y))["loss"]
    np.testing.assert_allclose(onnxtrain.Trainer(path, loss="mean_squared_error").evaluate((x, y))["loss"], before)
    trainer.set_masks({"w": np.ones((300, 4), bool)})  # rebuilds the session
    trainer.train_step(x, y)
    trainer.save(path)
    assert len(names(tmp_path)) == 3
