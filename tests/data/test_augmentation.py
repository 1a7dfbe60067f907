"""Augmentation: a function of a batch and of a random generator seeded by seed, epoch and position."""

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors import DataError

X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
Y = np.arange(20) % 3


def trainer():
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", seed=5)


def noisy(x, rng):
    return x + rng.normal(size=x.shape).astype(np.float32)


def test_batches_are_changed_and_data_are_not():
    seen = []

    def double(x, rng):
        seen.append(rng.integers(1 << 30))
        x *= 2
        return x

    before = X.copy()
    rows = trainer().fit(X, Y, epochs=2, batch_size=8, augment=double).rows
    np.testing.assert_array_equal(X, before)
    assert rows == trainer().fit(2 * X, Y, epochs=2, batch_size=8).rows
    assert len(set(seen)) == 6, "random numbers are the same in two batches"


def test_validation_is_left_alone():
    ours = trainer()
    row = ours.fit(X, Y, validation=(X, Y), augment=lambda x, rng: 0 * x).rows[0]
    assert row["val_loss"] == ours.evaluate(X, Y)["loss"]


def test_a_resumed_training_draws_the_same(tmp_path):
    whole = trainer().fit(X, Y, epochs=3, batch_size=4, augment=noisy).rows
    trainer().fit(X, Y, epochs=1, batch_size=4, augment=noisy, checkpoint=tmp_path)
    resumed = trainer().fit(X, Y, epochs=3, batch_size=4, augment=noisy, checkpoint=tmp_path, resume=True).rows
    assert resumed == whole
    assert whole != trainer().fit(X, Y, epochs=3, batch_size=4).rows


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda x, rng: None, "augment returned nothing for the input 'input'"),
        (lambda x, rng: x[:, :2], r"augment returned shape \(8, 2\) for the input 'input'; it must keep \(8, 4\)"),
        (lambda x, rng: x.astype(str), "augment returned <U32 for the input 'input'; it must keep float32"),
    ],
)
def test_functions_that_do_not_fit(augment, message):
    with pytest.raises(DataError, match=message):
        trainer().fit(X, Y, batch_size=8, augment=augment)
