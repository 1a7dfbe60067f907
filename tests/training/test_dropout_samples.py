"""Predictions sampled by Dropout: as many as wanted, seeded, with the mean and spread of masks by hand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import layers
from onnxtrain.errors import OptionError
from onnxtrain.training.examples import mlp

X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
MODEL = onnxtrain.append(mlp((4, 16)), layers.Activation("Relu"), layers.Dropout(0.4), layers.Linear(3))


def test_samples_have_an_axis_of_their_own_and_are_the_same_again():
    trainer = onnxtrain.Trainer(MODEL, loss="cross_entropy", seed=3)
    found = trainer.predict(X, dropout=True, samples=5)
    assert found.shape == (5, 20, 3)
    assert len({sample.tobytes() for sample in found}) == 5
    np.testing.assert_array_equal(trainer.predict(X, dropout=True, samples=5), found)
    np.testing.assert_array_equal(trainer.predict(X, dropout=True), found[0])
    same = onnxtrain.Trainer(MODEL, loss="cross_entropy", seed=3)
    np.testing.assert_array_equal(same.predict(X, dropout=True, samples=2), found[:2])
    other = onnxtrain.Trainer(MODEL, loss="cross_entropy", seed=4)
    assert not np.array_equal(other.predict(X, dropout=True, samples=5), found)
    batches = trainer.predict(np.repeat(X[:1], 20, 0), dropout=True, samples=5, batch_size=5)
    assert len({row.tobytes() for row in batches.reshape(-1, 3)}) > 60  # each batch has masks of its own
    assert onnxtrain.predict(MODEL, X, dropout=True, samples=2).shape == (2, 20, 3)


def test_each_sample_is_the_model_with_a_mask():
    """Every sample of one hidden unit is 0 or 1 / (1 - ratio) times it."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[N,4] x) => (float[N,4] y, float[N,4] z)
        <float[4] w = {1,2,3,4}, float ratio = {0.25}> { z = Mul(x, w)  y = Dropout(z, ratio) }"""
    )
    found = onnxtrain.predict(model, X + 10, dropout=True, samples=400)
    np.testing.assert_array_equal(found["z"], np.broadcast_to(found["z"][:1], (400, 20, 4)))
    factors = found["y"] / found["z"]
    kept = factors != 0
    np.testing.assert_allclose(factors[kept], 1 / 0.75, rtol=1e-5)
    assert kept.mean() == pytest.approx(0.75, abs=0.01)
    assert np.abs(kept.mean(0) - 0.75).max() < 0.12


def test_samples_follow_the_training_and_the_average():
    trainer = onnxtrain.Trainer(MODEL, loss="cross_entropy", optimizer="sgd(lr=0.5)", ema=0.9)
    before = trainer.predict(X, dropout=True, samples=2)
    for _ in range(3):
        trainer.train_step(X, np.arange(20) % 3)
    after, averaged = (trainer.predict(X, dropout=True, samples=2, ema=ema) for ema in (False, True))
    assert not np.array_equal(before, after)
    assert not np.array_equal(averaged, after)
    again = onnxtrain.Trainer(trainer.model(), loss="cross_entropy").predict(X, dropout=True, samples=2)
    np.testing.assert_allclose(again, after, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (MODEL, {"samples": 3}, "samples is 3; it needs dropout=True"),
        (MODEL, {"dropout": True, "samples": 0}, "samples is 0; it needs at least 1"),
        (mlp((4, 3)), {"dropout": True, "samples": 3}, "dropout=True needs Dropout nodes, but the model has none"),
    ],
)
def test_samples_that_cannot_be(model, options, message):
    for predict in (
        onnxtrain.Trainer(model, loss="mse").predict,
        lambda x, **given: onnxtrain.predict(model, x, **given),
    ):
        with pytest.raises(OptionError, match=message):
            predict(X, **options)


def test_labels_have_no_samples():
    with pytest.raises(OptionError, match=r"predict\(labels=True\) has no samples"):
        onnxtrain.Trainer(MODEL, loss="cross_entropy").predict(X, labels=True, dropout=True)
