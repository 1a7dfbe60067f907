"""The learning-rate finder: its losses are those of the steps, its suggestion is fastai's, the trainer stays."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.training.examples import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 4)).astype(np.float32)
Y = (X @ RNG.normal(size=(4, 3)) + RNG.normal(size=(96, 3))).argmax(1)


def make(**options) -> onnxtrain.Trainer:
    return onnxtrain.Trainer(mlp((4, 16, 3)), loss="cross_entropy", optimizer="momentum", **options)


def valley(losses: list[float]) -> int:
    """fastai's ``valley``, as it is written there."""
    count, start, end = len(losses), 0, 0
    longest = [1] * count
    for i in range(1, count):
        for j in range(i):
            if losses[i] < losses[j] and longest[i] < longest[j] + 1:
                longest[i] = longest[j] + 1
            if longest[end] < longest[i]:
                end = i
                start = end - longest[end]
    section = (end - start) / 3
    return start + int(section) + int(section / 2)


def test_losses_and_suggestion_are_those_of_steps_by_hand():
    trainer = make()
    before = trainer.state_dict()
    found = onnxtrain.find_learning_rate(trainer, X, Y, batch_size=96, steps=60)
    assert all(np.array_equal(value, before[name]) for name, value in trainer.state_dict().items())
    assert trainer.learning_rate == make().learning_rate
    other, mean, losses = make(), 0.0, []
    for step, rate in enumerate(found.rates, 1):
        other.learning_rate = rate
        mean = 0.98 * mean + 0.02 * other.train_step(X, Y)
        losses.append(mean / (1 - 0.98**step))
    np.testing.assert_allclose(found.losses, losses, rtol=1e-5)  # fit shuffles the sums
    np.testing.assert_allclose(found.rates, np.geomspace(1e-7, 10, 60)[: len(losses)])
    assert found.suggestion == found.rates[valley(list(found.losses))]


def test_the_suggested_rate_trains():
    trainer = make()
    trainer.learning_rate = onnxtrain.find_learning_rate(trainer, (X, Y)).suggestion
    trainer.fit(X, Y, epochs=10, progress=False)
    assert trainer.evaluate((X, Y))["loss"] < 0.8 * make().evaluate((X, Y))["loss"]


def test_a_table_names_its_target(tmp_path):
    path = tmp_path / "table.csv"
    rows = [",".join(map(str, [*row, label])) for row, label in zip(X, Y, strict=True)]
    path.write_text("\n".join(["a,b,c,d,kind", *rows]))
    found = onnxtrain.find_learning_rate(make(), path, target="kind", steps=20)
    np.testing.assert_array_equal(found.losses, onnxtrain.find_learning_rate(make(), X, Y, steps=20).losses)


def test_a_model_is_no_trainer():
    with pytest.raises(OptionError, match=r"trainer is a ModelProto; find_learning_rate needs an onnxtrain\.Trainer"):
        onnxtrain.find_learning_rate(mlp((4, 3)), X, Y)


def test_diverged_losses_end_it():
    found = onnxtrain.find_learning_rate(make(), X, Y, lowest=1e-3, highest=1e6, steps=60)
    assert len(found.losses) < 60
    assert found.suggestion < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowest": 1.0, "highest": 0.1}, "lowest is 1, highest 0.1, steps 100; it needs rates above 0 that rise"),
        ({"steps": 5}, "at least 20 steps"),
        ({"lowest": 1e5, "highest": 1e9}, r"diverged after \d steps, at the learning rate .*; give lowest= below"),
    ],
)
def test_rates_that_cannot_be_measured(options, message):
    with pytest.raises(OptionError, match=message):
        onnxtrain.find_learning_rate(make(), X, Y, **options)
