"""A failed save loses nothing: the trainer stays usable, and the error suggests a writable path."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from sentences import raises_sentence

X = np.eye(4, dtype=np.float32)
Y = np.arange(4) % 3


@pytest.mark.parametrize("external", [False, True])
def test_the_trainer_stays_usable(tmp_path: Path, external: bool) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), model, save_as_external_data=external, location="d", size_threshold=0)
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.SGD(0.1))
    trainer.train_step(X, Y)
    before = trainer.get_weights()
    (tmp_path / "folder").mkdir()
    for wrong in (tmp_path / "missing" / "tuned.onnx", tmp_path / "folder"):
        with raises_sentence("cannot_be_written", reason="the trainer keeps its weights") as caught:
            trainer.save(wrong)
        named = re.search(r"to another path, such as '(.*)'\.$", str(caught.value))
        assert named is not None
        assert Path(named[1]).parent.is_dir()
    np.testing.assert_equal(trainer.get_weights(), before)
    trainer.save(tmp_path / "tuned.onnx")
    trainer.train_step(X, Y)
    saved = onnx.load(tmp_path / "tuned.onnx")
    for tensor in saved.graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), before[tensor.name])


@pytest.mark.parametrize("name", ["metrics.csv", "curves.svg", "report.html", "run.json"])
def test_a_run_folder_is_looked_at_before(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
    before = trainer.get_weights()
    with pytest.raises(OnnxTrainError, match=r"is a folder|holds an earlier run"):
        trainer.fit((X, Y), epochs=1, run=tmp_path / "run")
    np.testing.assert_equal(trainer.get_weights(), before)


def test_the_best_model_is_looked_at_before(tmp_path: Path) -> None:
    (tmp_path / "kept" / "best.onnx").mkdir(parents=True)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
    before = trainer.get_weights()
    with raises_sentence("target_is_folder", what=tmp_path / "kept/best.onnx"):
        trainer.fit((X, Y), validation=(X, Y), epochs=1, checkpoint=tmp_path / "kept", save_best="val_loss")
    np.testing.assert_equal(trainer.get_weights(), before)


@pytest.mark.plugins
def test_a_pruned_model_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder becomes a file while the model is pruned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()

    def progress(line: str) -> None:
        if (tmp_path / "out").is_dir():
            (tmp_path / "out").rmdir()
            (tmp_path / "out").touch()

    with raises_sentence("cannot_be_written", reason="the trained weights are in '") as caught:
        onnxtrain.prune(
            onnxtrain.examples.mlp((4, 8, 3)),
            (X, Y),
            loss="softmax_cross_entropy",
            sparsity=0.5,
            epochs=1,
            fine_tune_epochs=0,
            save=tmp_path / "out" / "pruned.onnx",
            progress=progress,
        )
    found = re.search(r"are in '(.*)'\.$", str(caught.value))
    assert found is not None
    onnx.load(found[1])
