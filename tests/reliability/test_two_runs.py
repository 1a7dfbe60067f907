"""Two runs in one folder: a second training is refused, and nothing of the first is lost."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx

import onnxtrain
from onnxtrain.training.callbacks import Callback

LINE = ("--data", "train.npz", "--loss", "softmax_cross_entropy", "--threads", "1", "--batch-size", "10")
LINE += ("--epochs", "3", "--checkpoint", "kept", "--checkpoint-every", "1", "--resume")


def second_run(folder) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "onnxtrain", "fit", "model.onnx", *LINE, "--output", "second.onnx"],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_a_second_training_in_a_checkpoint_folder_is_refused(tmp_path):
    model, path = onnxtrain.examples.mlp((4, 5, 3)), tmp_path / "model.onnx"
    onnx.save(model, path)
    points = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    data = (points, points[:, :3].argmax(1))
    np.savez(tmp_path / "train.npz", input=data[0], label=data[1])
    results = []

    class Second(Callback):
        def on_step_end(self, state):
            if state.step == 3:
                results.append(second_run(tmp_path))

    def trained(folder=None, callbacks=()):
        trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", threads=1)
        trainer.fit(
            data, epochs=3, batch_size=10, checkpoint=folder, checkpoint_every=folder and 1, callbacks=callbacks
        )
        return {name: array.tobytes() for name, array in dict(trainer.weights).items()}

    alone = trained()
    assert trained(tmp_path / "kept", [Second()]) == alone
    (second,) = results
    assert second.returncode == 2
    assert second.stderr == (
        "error: 'kept' is in use: another run of onnxtrain writes there; wait until it has ended, or give another "
        "folder.\n"
    )
    assert not (tmp_path / "second.onnx").exists()
    assert sorted(path.suffix for path in (tmp_path / "kept").iterdir()) == [".json"] * 3 + [".safetensors"] * 3
