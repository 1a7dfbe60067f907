"""Calls of ``fit`` on one trainer count on: order, augmentation and the learning rate are those of one call."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import NumericalError, OptionError
from onnxtrain.training.callbacks import Callback

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype(np.float32)
Y = X[:, :3].argmax(1)


def make(**options) -> onnxtrain.Trainer:
    model = onnxtrain.examples.mlp((6, 5, 3))
    return onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.01)", threads=1, **options)


def noisy(inputs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return inputs + rng.normal(scale=0.1, size=inputs.shape).astype(np.float32)


def fit(trainer: onnxtrain.Trainer, epochs: int, **options) -> onnxtrain.Trainer:
    trainer.fit(X, Y, epochs=epochs, batch_size=5, progress=False, **options)
    return trainer


def same(one: onnxtrain.Trainer, other: onnxtrain.Trainer) -> bool:
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(np.array_equal(array, yours[name]) for name, array in mine.items())


@pytest.mark.parametrize("options", [{}, {"augment": noisy}], ids=["order", "augmentation"])
def test_calls_are_one_training(options):
    three, one = make(), fit(make(), 3, **options)
    for _ in range(3):
        fit(three, 1, **options)
    assert same(three, one)
    assert not same(fit(make(), 1, **options), fit(fit(make(), 1, **options), 1, **options))


def reloaded(trainer: onnxtrain.Trainer) -> onnxtrain.Trainer:
    found = make()
    found.load_state_dict(trainer.state_dict())
    return found


@pytest.mark.parametrize(
    "again",
    [reloaded, copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))],
    ids=["state", "copy", "pickle"],
)
def test_count_and_rate_go_with_the_state(again):
    trainer = fit(make(), 2, schedule="cosine")
    trainer.learning_rate = 0.003
    found = again(trainer)
    assert found.learning_rate == 0.003
    assert same(fit(found, 1), fit(trainer, 1))


def test_the_base_of_a_schedule_goes_with_the_state():
    trainer = fit(make(), 2, schedule="cosine")
    found = reloaded(trainer)
    assert found.learning_rate == trainer.learning_rate < 0.01
    assert same(fit(found, 1, schedule="linear"), fit(trainer, 1, schedule="linear"))


def test_states_of_older_versions_and_damaged_ones():
    trainer, found = fit(make(), 1), make()
    state = {name: array for name, array in trainer.state_dict().items() if not name.startswith("trainer/")}
    found.load_state_dict(state)
    assert found.learning_rate == 0.01
    with pytest.raises(OptionError, match="must be a finite number"):
        found.load_state_dict({**state, "trainer/learning_rate": np.nan})


def test_a_checkpoint_keeps_the_count(tmp_path):
    class Stop(Callback):
        def on_step_end(self, state):
            if state.step == 7:
                state.request_stop("enough")

    whole = fit(fit(make(), 2), 3)
    fit(fit(make(), 2), 3, checkpoint=tmp_path, checkpoint_every=1, callbacks=[Stop()])
    assert same(fit(make(), 3, checkpoint=tmp_path, checkpoint_every=1, resume=True), whole)
    loaded = make()
    loaded.load_checkpoint(tmp_path)
    assert loaded.state_dict()["trainer/epochs"] == 5


def test_a_stopped_epoch_is_not_repeated():
    class Seen(Callback):
        def __init__(self):
            self.batches = []

        def on_step_end(self, state):
            self.batches.append(state.batch.inputs["input"])
            state.request_stop("enough")

    trainer, seen = make(), Seen()
    for _ in range(2):
        fit(trainer, 1, callbacks=[seen])
    assert not np.array_equal(*seen.batches)


@pytest.mark.plugins
@pytest.mark.parametrize("name", ["OnnxClassifier", "OnnxRegressor"])
def test_partial_fit_counts_on(name):
    kind = getattr(onnxtrain.sklearn, name)
    targets = Y if name == "OnnxClassifier" else X[:, 0]
    first = {"classes": [0, 1, 2]} if name == "OnnxClassifier" else {}
    options = {"hidden_layer_sizes": (4,), "batch_size": 5, "random_state": 0, "threads": 1}
    one, parts = kind(epochs=2, **options).fit(X, targets), kind(**options).partial_fit(X, targets, **first)
    assert np.array_equal(parts.partial_fit(X, targets).predict(X), one.predict(X))
    assert same(parts.trainer_, one.trainer_)


def test_a_training_that_begins_with_nan_does_not_blame_its_rate():
    trainer = make()
    trainer.train_step(np.full((2, 6), 3e38, np.float32), np.zeros(2, np.int64))
    with pytest.raises(NumericalError, match="an earlier step or assignment left"):
        fit(trainer, 1)


def test_a_loss_without_an_update_does_not_blame_the_rate():
    with pytest.raises(NumericalError, match="at step 0 before the first update"):
        make().fit(np.full((2, 6), 3e38, np.float32), np.zeros(2, np.int64), progress=False)
