"""Masks: weights and optimizer states stay exactly zero with every optimizer."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import OptionError
from onnxtrain.operators import LAMB, OPTIMIZERS, SGD, SSGD, Adagrad, Adam, AdamW, Lion, Momentum, RMSprop
from onnxtrain.operators.sparsity import Sparsity
from onnxtrain.parameters.masks import choose_tensors
from sentences import raises_sentence
from zoo.arrays import assert_same, copied

X = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
Y = np.arange(24) % 3

RULES = [
    Adagrad(0.1, norm_coefficient=0.05),
    Adam(0.05, norm_coefficient=0.05, norm_coefficient_post=0.01),
    Adam(0.05, sparsity=Sparsity(measure="p-norm", p=0.5)),
    AdamW(0.05, weight_decay=0.5),
    Lion(0.05, weight_decay=0.5),
    LAMB(0.05),
    RMSprop(0.05, momentum=0.5),
    SGD(0.05, momentum=0.5, weight_decay=0.05),
    Momentum(0.05, norm_coefficient=0.05),
    Momentum(0.05, norm_coefficient=0.05, mode="nesterov", sparsity=Sparsity(epsilon=0.1)),
    SSGD(0.05, norm_coefficient=0.05),
    SSGD(0.05, alpha=0.9, norm_coefficient=0.05, regularization=0.01),
    SSGD(0.05, alpha=0.9, measure="p-norm", regularization=0.01, reweighting="l1"),
    SSGD(0.05, alpha=0.9, measure="tanh", epsilon=2.0, max_scale=4.0),
]
RULES += [
    entry.settings(0.05) for name, entry in OPTIMIZERS.items() if name not in {rule.schema.name for rule in RULES}
]
KERNELS = pytest.mark.parametrize("kernels", [None, False], ids=["kernel", "body"])


def trainer(rule, *, kernels=None, **options):
    return onnxtrain.Trainer(
        onnxtrain.examples.mlp((5, 8, 3)),
        loss="softmax_cross_entropy",
        optimizer=rule,
        runtime=onnxtrain.RuntimeOptions(kernels=kernels),
        **options,
    )


def some_masks(subject):
    return {
        name: np.abs(array) > np.median(np.abs(array)) for name, array in subject.parameters.items() if array.ndim > 1
    }


def assert_held(states, masks):
    for name, mask in masks.items():
        keys = [key for key in states if key == name or (key.startswith(f"{name}/") and not key.endswith("/mask"))]
        for key in keys:
            assert np.isfinite(states[key]).all(), key
            assert not states[key][~mask].any(), key
        assert np.count_nonzero(states[name]) == np.count_nonzero(mask)


def test_every_optimizer_is_covered():
    assert {rule.schema.name for rule in RULES} == set(OPTIMIZERS)


@KERNELS
@pytest.mark.sampled("kernels")
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_masked_weights_and_states_stay_exactly_zero(rule, kernels, accumulate):
    subject = trainer(rule, kernels=kernels, accumulate=accumulate, clip_norm=1.0, clip_value=0.5)
    for _ in range(3):  # nonzero states before masks are set
        subject.train_step(X, Y)
    masks = some_masks(subject)
    subject.set_masks(masks)
    assert_held(subject.executor.session.state, masks)
    before = copied(subject.parameters)
    losses = [subject.train_step(X, Y) for _ in range(20)]
    assert_held(subject.executor.session.state, masks)
    assert losses[-1] < losses[0]
    for name, mask in masks.items():
        assert (subject.parameters[name] != before[name])[mask].any()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_masks_hold_in_a_training_model_that_is_resumed(rule, tmp_path):
    subject = trainer(rule)
    masks = some_masks(subject)
    subject.set_masks(masks)
    subject.train_step(X, Y)
    subject.save_training_model(tmp_path / "training.onnx")
    onnx.checker.check_model(tmp_path / "training.onnx")
    session = onnxtrain.TrainingSession(tmp_path / "training.onnx")
    feeds = {"input": X, "target": Y, "learning_rate": np.float32(rule.learning_rate)}
    for _ in range(5):
        assert float(session.step(feeds)["loss"]) == subject.train_step(X, Y)
    assert_held(session.state, masks)
    for name in masks:
        np.testing.assert_array_equal(session.state[name], subject.parameters[name])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rule", [SGD(0.05), AdamW(0.05, weight_decay=0.5)], ids=str)
def test_masks_hold_in_a_training_model_of_their_own(rule, keep):
    """It begins at zero where a mask is false, as a trainer does."""
    model = onnxtrain.examples.mlp((5, 8, 3))
    subject = trainer(rule)
    masks = some_masks(subject)
    subject.set_masks(masks)
    given = subject.model() if keep else model
    training = onnxtrain.training_model(
        given, loss="softmax_cross_entropy", optimizer=rule, masks="keep" if keep else masks, ema=0.9
    )
    session = onnxtrain.TrainingSession(training)
    feeds = {"input": X, "target": Y, "learning_rate": np.float32(rule.learning_rate)}
    for _ in range(3):
        assert float(session.step(feeds)["loss"]) == pytest.approx(subject.train_step(X, Y), rel=1e-6)
    assert_held(session.state, masks)
    for name in masks:
        np.testing.assert_allclose(session.state[name], subject.parameters[name], rtol=1e-5, atol=1e-7)


def test_the_command_exports_masks(tmp_path):
    subject = trainer(SGD(0.05))
    masks = some_masks(subject)
    subject.set_masks(masks)
    subject.save(tmp_path / "pruned.onnx")
    flags = ["--loss", "cross_entropy", "--optimizer", "sgd", "--masks", "keep"]
    out = str(tmp_path / "training.onnx")
    assert main(["export", str(tmp_path / "pruned.onnx"), *flags, "--training-model", out]) == 0
    session = onnxtrain.TrainingSession(out)
    session.step({"input": X, "target": Y, "learning_rate": np.float32(0.05)})
    assert_held(session.state, masks)
    assert main(["export", str(tmp_path / "pruned.onnx"), *flags[:-2], "--training-model", out]) == 0


def test_masks_hold_after_resuming_from_a_checkpoint(tmp_path):
    whole = trainer(RULES[6])
    masks = some_masks(whole)
    whole.set_masks(masks)
    whole.fit((X, Y), epochs=4, batch_size=8)
    first = trainer(RULES[6], masks=masks)
    first.fit((X, Y), epochs=2, batch_size=8, checkpoint=tmp_path / "kept")
    second = trainer(RULES[6], masks=masks)
    second.fit((X, Y), epochs=4, batch_size=8, checkpoint=tmp_path / "kept", resume=True)
    assert_held(second.executor.session.state, masks)
    assert_same(whole.parameters, second.parameters)
    with pytest.raises(onnxtrain.errors.CheckpointError, match="masks"):
        trainer(RULES[6]).fit((X, Y), epochs=5, batch_size=8, checkpoint=tmp_path / "kept", resume=True)


def test_masks_apply_before_clipping():
    """Only unmasked gradients enter the norm: with one unmasked weight its step is the bound."""
    subject = trainer(Momentum(1.0, alpha=0.0), clip_norm=1e-3)
    masks = {name: np.zeros(array.shape, bool) for name, array in subject.parameters.items()}
    masks["layer2.bias"][0] = True
    subject.parameters["layer2.bias"] = np.ones(3, np.float32)
    subject.set_masks(masks)
    subject.train_step(X, Y)
    assert abs(1 - subject.parameters["layer2.bias"][0]) == pytest.approx(1e-3, rel=1e-3)


def test_new_masks_replace_the_old_ones():
    subject = trainer(Adam(0.05))
    none = np.zeros((8, 5), bool)
    subject.set_masks({"layer1.weight": none})
    assert not subject.parameters["layer1.weight"].any()
    subject.set_masks({})
    assert not subject.masks
    subject.train_step(X, Y)
    subject.parameters["layer1.weight"] = np.ones((8, 5), np.float32)
    subject.train_step(X, Y)
    assert (subject.parameters["layer1.weight"] != 1).any()


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"nothing": np.ones(3, bool)}, r"There is a mask for 'nothing', which is not trained"),
        ({"layer1.bias": np.ones(8)}, r"The mask of 'layer1.bias' is float64 of shape \(8,\); it needs to be bool"),
        ({"layer1.bias": np.ones(3, bool)}, r"is bool of shape \(3,\); it needs to be bool of shape \(8,\)"),
    ],
)
def test_bad_masks(masks, message):
    with pytest.raises(OptionError, match=message):
        trainer(Adam()).set_masks(masks)
    with pytest.raises(OptionError, match=message):
        onnxtrain.training_model(onnxtrain.examples.mlp((5, 8, 3)), loss="mse", optimizer="adam", masks=masks)


def test_an_epsilon_of_zero_is_refused():
    with raises_sentence("masked_epsilon_0", what="epsilon", got=0, optimizer="Adam"):
        trainer(Adam(epsilon=0.0), masks={"layer1.bias": np.zeros(8, bool)})


def test_choose_tensors():
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (4, 2, 1)}
    assert choose_tensors(shapes, None, "tensors") == ["a.weight", "b.weight"]
    assert choose_tensors(shapes, ["b.*", "a.b*"], "tensors") == ["a.bias", "b.weight"]
    with raises_sentence(
        "no_match", option="tensors", pattern="'c*'", kind="parameter that is trained", names="a.weight"
    ):
        choose_tensors(shapes, "c*", "tensors")
