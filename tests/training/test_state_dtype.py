"""Optimizer states in bfloat16: as good as float32, half the bytes, bit-exact resumption, refused options."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors import OptionError
from sentences import raises_sentence
from zoo.arrays import assert_same, copied
from zoo.noisy_digits import noisy_digits

LOSS = "softmax_cross_entropy"
RNG = np.random.default_rng(3)
X = RNG.standard_normal((24, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 24)
BFLOAT16 = ml_dtypes.bfloat16


def trainer(state_dtype="bfloat16", **options):
    options = {"optimizer": "adamw(lr=0.05)", **options}
    return onnxtrain.Trainer(
        examples.mlp((4, 8, 3)), loss=LOSS, precision=onnxtrain.Precision(states=state_dtype), **options
    )


def test_states_take_two_bytes_and_weights_four():
    learner = trainer()
    learner.train_step(X, Y)
    for name, array in learner.executor.states.items():
        assert array.dtype == (BFLOAT16 if name.endswith(("/V", "/H")) else np.int64 if name == "T" else np.float32)
    assert learner.executor.states["layer1.weight/H"].nbytes == 2 * learner.parameters["layer1.weight"].size


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip_norm": 0.5, "ema": 0.9}], ids=str)
def test_a_resumed_training_continues_bit_for_bit(tmp_path, options):
    whole, first, second = trainer(**options), trainer(**options), trainer(**options)
    data = X, Y
    whole.fit(data, epochs=4, batch_size=8, progress=False)
    first.fit(data, epochs=2, batch_size=8, progress=False, checkpoint=tmp_path / "run")
    second.fit(data, epochs=4, batch_size=8, progress=False, checkpoint=tmp_path / "run", resume=True)
    assert_same(whole.executor.states, second.executor.states)


def test_seeds_differ():
    one, other = trainer(seed=0), trainer(seed=1)
    for learner in (one, other):
        for _ in range(3):
            learner.train_step(X, Y)
    assert any(
        np.any(one.executor.states[name] != other.executor.states[name])
        for name in one.executor.states
        if name.endswith("/H")
    )


def test_a_training_model_saved_to_a_file_continues():
    learner = trainer()
    learner.train_step(X, Y)
    model = learner.training_model()
    onnx.checker.check_model(model)
    session = onnxtrain.TrainingSession(model)
    feeds = {"input": X, "target": Y, "learning_rate": np.float32(0.05)}
    session.step(feeds)
    learner.train_step(X, Y)
    assert_same(learner.executor.states, session.state)
    session.initialize()
    assert not np.any(session.state["layer1.weight/H"])


def test_groups_and_wide_weights():
    model = examples.mlp((4, 8, 3))
    groups = (onnxtrain.Group("*bias", weight_decay=0.0, lr_scale=0.1),)
    learner = onnxtrain.Trainer(
        model, loss=LOSS, optimizer="adamw", precision=onnxtrain.Precision(states="bfloat16"), groups=groups
    )
    before = copied(learner.executor.states)
    learner.train_step(X, Y)
    assert all(np.any(before[name] != array) for name, array in learner.parameters.items())


def ratio_of_losses(optimizer, states, *, hidden):
    """Return the validation loss with states of a type, divided by that with states in float32."""
    data, test = noisy_digits(1600, 2000)
    losses = []
    for each in (None, states):
        learner = onnxtrain.Trainer(
            examples.mlp((64, hidden, 10)),
            loss=LOSS,
            optimizer=optimizer,
            precision=onnxtrain.Precision(states=each),
            threads=1,
        )
        learner.fit(data, epochs=8, batch_size=32, progress=False)
        losses.append(learner.evaluate(test)["loss"])
    assert losses[0] < 1.0
    return losses[1] / losses[0]


@pytest.mark.parametrize("optimizer", [onnxtrain.Adam(2e-3), onnxtrain.AdamW(2e-3), onnxtrain.Momentum(0.02)], ids=repr)
def test_it_trains_as_well_as_with_float32(optimizer):
    """After 400 steps on noisy digits of ten classes, validation losses differ by less than half a percent."""
    assert abs(ratio_of_losses(optimizer, "bfloat16", hidden=32) - 1) < 0.005


def test_an_average_that_changes_by_a_thousandth_falls():
    """Rounding to nearest would not change values: half a rounding step of bfloat16 is at least 0.2%."""
    learner = trainer(optimizer=onnxtrain.Adam(0.0))
    learner.executor.states["layer1.weight/H"][...] = 1.0
    for _ in range(300):
        learner.train_step(np.zeros_like(X), Y)  # its gradient for the first weights is zero
    mean = float(learner.executor.states["layer1.weight/H"].astype(np.float64).mean())
    assert abs(mean - 0.999**300) < 0.03


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"state_dtype": "float16"},
            r"states is 'float16'; it is 'bfloat16' or '8bit', or None for",
        ),
        ({"distributed": None}, r"shard_states=True cuts states of the weights' type; leave shard_states or"),
    ],
)
def test_refusals(options, sentence):
    if "distributed" in options:
        options["distributed"] = onnxtrain.Distributed(Two(), shard_states=True)
    with pytest.raises(OptionError, match=sentence):
        trainer(**options)


class Two:
    """Stand-in for two ranks, for errors before any communication."""

    rank, size = 0, 2


def test_a_checkpoint_of_other_states_is_refused(tmp_path):
    trainer(None).fit((X, Y), epochs=1, batch_size=8, progress=False, checkpoint=tmp_path / "run")
    with raises_sentence("another_training", differences='state_dtype is missing there and "bfloat16" here'):
        trainer().fit((X, Y), epochs=2, batch_size=8, progress=False, checkpoint=tmp_path / "run", resume=True)
