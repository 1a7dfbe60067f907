"""The training loop: bit-exact resumption, early stopping, errors with a remedy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_trainer import data, mlp, trainer, weights

import onnxtrain
from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.training.callbacks import Callback, EarlyStopping
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence
from zoo.arrays import assert_same

SETTINGS = {"batch_size": 8, "schedule": "cosine", "metrics": ["accuracy"]}


class StopAt(Callback):
    """Callback that ends a training after some steps, like a kill."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state) -> None:
        if state.step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_resumed_training_equals_the_one_that_never_stopped(stop: int, tmp_path: Path) -> None:
    x, y = data(22)
    whole = trainer()
    expected = whole.fit((x, y), validation=(x, y), epochs=4, **SETTINGS)
    checkpoints = {"checkpoint": tmp_path / "checkpoints", "checkpoint_every": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer().fit((x, y), validation=(x, y), epochs=4, callbacks=[StopAt(stop)], **checkpoints, **SETTINGS)
    resumed = trainer()
    history = resumed.fit(
        (x, y), validation=(x, y), epochs=4, resume=True, callbacks=[StopAt(1000)], **checkpoints, **SETTINGS
    )
    assert_same(weights(resumed), weights(whole))
    assert_same(dict(resumed.executor.session.state), dict(whole.executor.session.state))
    assert history.rows == expected.rows


_KILLED = """
import sys
sys.path.insert(0, {folder!r})
from test_fitting import long_training
long_training({checkpoints!r}, resume={resume})
"""


def long_training(checkpoints: str, *, resume: bool) -> Trainer:
    subject = trainer()
    subject.fit(
        data(40), epochs=40, batch_size=4, checkpoint=checkpoints, checkpoint_every=3, resume=resume, callbacks=[]
    )
    return subject


@pytest.mark.thorough
def test_killed_at_any_moment_it_resumes_to_the_same_weights(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    expected = trainer()
    expected.fit(data(40), epochs=40, batch_size=4)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])}
    rng = np.random.default_rng(0)
    for _ in range(4):
        script = _KILLED.format(folder=str(Path(__file__).parent), checkpoints=folder, resume=True)
        process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not any(Path(folder).glob("*.json")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0, 0.15)))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert any(Path(folder).glob("*.json"))
    finished = long_training(folder, resume=True)
    assert_same(weights(finished), weights(expected))


def test_resume_of_another_training_is_refused(tmp_path: Path) -> None:
    trainer().fit(data(), epochs=1, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="seed"):
        trainer(seed=5).fit(data(), epochs=2, checkpoint=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="optimizer"):
        trainer(optimizer=onnxtrain.Momentum(0.1)).fit(data(), epochs=2, checkpoint=tmp_path, resume=True)


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    trainer().fit(data(), epochs=1, checkpoint=tmp_path)
    with raises_sentence("checkpoints_of_earlier_training", what=tmp_path):
        trainer().fit(data(), epochs=1, checkpoint=tmp_path)


def test_resume_without_checkpoints_starts_at_the_beginning(tmp_path: Path) -> None:
    subject, plain = trainer(), trainer()
    subject.fit(data(), epochs=1, checkpoint=tmp_path / "new", resume=True)
    plain.fit(data(), epochs=1)
    assert_same(weights(subject), weights(plain))


def test_nan_stops_with_the_step_and_the_last_good_checkpoint(tmp_path: Path) -> None:
    subject = trainer(optimizer=onnxtrain.Momentum(1e38), loss="mean_squared_error")
    x, _ = data()
    target = np.ones((24, 3), dtype=np.float32)
    with raises_sentence(
        "loss_not_finite", where=f"The last good checkpoint is {tmp_path}/checkpoint-000001-step-1.json"
    ):
        subject.fit((x, target), epochs=3, batch_size=8, checkpoint=tmp_path, checkpoint_every=1, shuffle=False)


def test_early_stopping_restores_the_best_weights() -> None:
    x, y = data(40)
    subject = trainer(optimizer=onnxtrain.Momentum(0.5))
    stopping = EarlyStopping("val_loss", patience=2)
    history = subject.fit((x, y), validation=(x[:8], (y[:8] + 1) % 3), epochs=50, callbacks=[stopping], batch_size=8)
    losses = history.column("val_loss")
    assert len(losses) < 50
    best = int(np.argmin(losses))
    assert len(losses) == best + 3
    found = subject.evaluate((x[:8], (y[:8] + 1) % 3))["loss"]
    assert found == pytest.approx(losses[best], rel=1e-6)


def test_early_stopping_survives_a_resume(tmp_path: Path) -> None:
    x, y = data(40)
    wrong = (x[:8], (y[:8] + 1) % 3)

    def run(epochs: int, **options) -> list[float]:
        subject = trainer(optimizer=onnxtrain.Momentum(0.5))
        stopping = EarlyStopping("val_loss", patience=2)
        history = subject.fit((x, y), validation=wrong, epochs=epochs, callbacks=[stopping], batch_size=8, **options)
        return history.column("val_loss")

    expected = run(50)
    run(2, checkpoint=tmp_path)
    assert run(50, checkpoint=tmp_path, resume=True) == expected
    assert run(50, checkpoint=tmp_path, resume=True) == expected


def test_callbacks_see_every_step_and_epoch() -> None:
    seen: list[str] = []

    class Recorder(Callback):
        def on_fit_begin(self, state) -> None:
            seen.append("fit")

        def on_epoch_begin(self, state) -> None:
            seen.append(f"epoch {state.epoch}")

        def on_step_end(self, state) -> None:
            seen.append(f"step {state.step}")

        def on_epoch_end(self, state) -> None:
            seen.append(f"end {state.epoch}")

        def on_fit_end(self, state) -> None:
            seen.append("done")

    trainer().fit(data(20), epochs=2, batch_size=16, callbacks=[Recorder()])
    steps = ["fit", "epoch 1", "step 1", "step 2", "end 1", "epoch 2", "step 3", "step 4", "end 2", "done"]
    assert seen == steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs is 0; it needs a number of at least 1"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"resume": True}, "resume needs the folder of the checkpoints"),
        ({"schedule": "zigzag"}, "zigzag"),
        ({"metrics": ["beauty"], "validation": data()}, "There is no metric 'beauty'"),
    ],
)
def test_bad_options(options, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        trainer().fit(data(), **options)


def test_training_does_not_touch_the_model_given() -> None:
    model = mlp()
    before = model.SerializeToString()
    trainer(model=model).fit(data(), epochs=1)
    assert model.SerializeToString() == before
