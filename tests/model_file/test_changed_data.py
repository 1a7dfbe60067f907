"""Data files that change while a model is trained: the values that were read are trained and saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import ModelError
from onnxtrain.model_file import external
from onnxtrain.model_file.file import ModelFile

WIDTH = 600
"""Of layers whose weights are larger than a megabyte."""

X, Y = np.ones((4, WIDTH), np.float32), np.array([0, 1, 2, 0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.onnx"
    model = onnxtrain.examples.mlp((WIDTH, WIDTH, 3))
    onnx.save(model, found, save_as_external_data=True, location="d", size_threshold=0)
    return found


def replace(data: Path) -> None:
    other = data.with_name("other")
    other.write_bytes(bytes(data.stat().st_size))
    os.replace(other, data)


def rewrite(data: Path, *, forge_time: bool = True) -> None:
    before = data.stat()
    data.write_bytes(bytes(before.st_size))
    if forge_time:
        os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(data: Path) -> None:
    os.truncate(data, 0)


CHANGES = pytest.mark.parametrize("change", [replace, rewrite, truncate, Path.unlink])
OPTIONS = pytest.mark.parametrize(
    "options", [{"train": "layer2.weight"}, {"lora": onnxtrain.Lora(rank=2)}, {}], ids=["head", "lora", "all"]
)


@CHANGES
@OPTIONS
def test_training_and_saving_take_what_was_read(path: Path, change: Callable[[Path], None], options: dict) -> None:
    def trained() -> onnxtrain.Trainer:
        return onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer="sgd(lr=0.1)", **options)

    undisturbed, trainer = trained(), trained()
    for each in (undisturbed, trainer):
        each.train_step(X, Y)
    change(path.with_name("d"))
    losses = [[each.train_step(X, Y), each.evaluate((X[:3], Y[:3]))["loss"]] for each in (undisturbed, trainer)]
    assert losses[0] == losses[1]
    tuned = path.with_name("tuned.onnx")
    trainer.save(tuned)
    saved, expected = (
        ModelFile.load(tuned),
        {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in undisturbed.model().graph.initializer},
    )
    for name in saved.names():
        np.testing.assert_array_equal(saved.value(name), expected[name])


def test_a_mapped_file_that_is_replaced_is_read_on_and_a_changed_one_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that would fill the memory is mapped."""
    monkeypatch.setattr(external, "free_memory", lambda: 0)
    monkeypatch.setattr(external, "_SURELY", 0)
    before = ModelFile.load(path).value("layer1.weight").copy()
    trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", train="layer2.weight")
    trainer.train_step(X, Y)
    replace(path.with_name("d"))
    trainer.save(path.with_name("tuned.onnx"))
    np.testing.assert_array_equal(ModelFile.load(path.with_name("tuned.onnx")).value("layer1.weight"), before)
    trainer = onnxtrain.Trainer(path.with_name("tuned.onnx"), loss="softmax_cross_entropy", train="layer2.weight")
    rewrite(path.with_name("tuned.onnx.data"), forge_time=False)
    with pytest.raises(ModelError, match="was changed since the model was read"):
        trainer.save(path.with_name("again.onnx"))


def test_a_command_that_does_not_train_reads_no_changed_file(path: Path) -> None:
    file = ModelFile.load(path)
    rewrite(path.with_name("d"), forge_time=False)
    for use in (lambda: file.value("layer1.weight"), lambda: file.save(path.with_name("tuned.onnx"), {}), file.inlined):
        with pytest.raises(ModelError, match="was changed since the model was read"):
            use()
