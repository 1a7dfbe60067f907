"""Entries that plugins may register, and the ways in which the core finds them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.errors import OptionError, registries
from onnxtrain.losses import Huber
from onnxtrain.metrics import resolve_metric
from onnxtrain.training.callbacks import CALLBACKS, Callback
from sentences import raises_sentence

pytestmark = pytest.mark.sampled(1)  # each case is cheap

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
LABELS = np.arange(12) % 3


@pytest.fixture(autouse=True)
def own_entries(monkeypatch):
    """Entries of a test are gone after it."""
    registries.added("loss")  # all plugins are there
    copied = {kind: dict(entries) for kind, entries in registries._entries.items()}
    monkeypatch.setattr(registries, "_entries", copied)


@dataclasses.dataclass(frozen=True)
class Doubled(Huber):
    name: ClassVar[str] = "doubled"


class Noted(Callback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, state):
        self.steps += 1


def trainer(loss="cross_entropy"):
    return onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss=loss)


def test_a_loss():
    onnxtrain.register_loss("doubled", Doubled)
    assert onnxtrain.losses.Doubled is Doubled
    assert "Doubled" in dir(onnxtrain.losses)
    assert trainer("doubled(weight=2)").objective.loss == Doubled(weight=2.0)


def test_a_metric():
    onnxtrain.register_metric("worst", lambda y_true, y_pred: float(y_pred.max()))
    found = trainer().evaluate(X, LABELS, metrics="worst")
    assert found["worst"] == resolve_metric("worst")(LABELS, trainer().predict(X))


def test_a_reader():
    seen = []

    def numbered(source, reading):
        seen.append(reading)
        return (X[:source], LABELS[:source]) if isinstance(source, int) else source

    onnxtrain.register_reader("numbers", numbered)
    subject = trainer()
    subject.fit(6, progress=False)
    assert subject.predict(5).shape == (5, 3)
    assert [reading.config is None for reading in seen] == [False, True]
    assert seen[0].loss == subject.objective.loss


def test_a_callback():
    onnxtrain.register_callback("noted", Noted)
    assert onnxtrain.callbacks.Noted is Noted
    assert "noted" in CALLBACKS
    noted = onnxtrain.callbacks.Noted()
    trainer().fit(X, LABELS, batch_size=4, callbacks=[noted], progress=False)
    assert noted.steps == 3


def test_a_pass():
    seen = []
    onnxtrain.register_pass("seen", seen.append)
    trainer().train_step(X, LABELS)
    assert any(isinstance(model, ir.Model) for model in seen)


def test_names_are_unique():
    onnxtrain.register_loss("doubled", Doubled)
    onnxtrain.register_loss("doubled", Doubled)
    with pytest.raises(OptionError, match="Two plugins register the loss 'doubled'"):
        onnxtrain.register_loss("doubled", Huber)
    onnxtrain.register_loss("huber", Doubled)
    with pytest.raises(OptionError, match="which onnxtrain has already"):
        trainer("doubled")


@pytest.mark.parametrize("name", ["", "a b", "a(b)", "a:b", 3])
def test_names_can_be_written(name):
    with pytest.raises(OptionError, match="of a metric needs to be a text"):
        onnxtrain.register_metric(name, max)


def test_an_entry_of_another_kind_is_refused():
    onnxtrain.register_loss("wrong", "math:sqrt")
    with raises_sentence("plugin_registers", kind="loss", name="'wrong'", needs="a class derived from Loss"):
        trainer("wrong")


def test_names_that_no_plugin_has():
    for module in (onnxtrain.losses, onnxtrain.callbacks):
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            module.Nothing  # noqa: B018
