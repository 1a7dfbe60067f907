"""The public optimizer objects: defaults, ranges, states."""

from __future__ import annotations

import dataclasses

import pytest

from onnxtrain.errors import OptionError
from onnxtrain.operators import LAMB, OPTIMIZERS, SGD, SSGD, Adagrad, Adam, AdamW, Lion, Momentum, RMSprop
from sentences import raises_sentence

pytestmark = pytest.mark.sampled(1)  # each case is cheap

SETTINGS = [entry.settings for entry in OPTIMIZERS.values()]


@pytest.mark.parametrize("settings", SETTINGS)
def test_defaults_make_a_valid_node(settings):
    optimizer = settings()
    attributes = optimizer.node_attributes()
    assert optimizer.schema.complete(attributes).keys() == attributes.keys()
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.learning_rate = 1.0


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "fast", True, None])
def test_learning_rate(settings, rate):
    with raises_sentence("optimizer_learning_rate", what="learning_rate", wanted="0 or more", name=settings.__name__):
        settings(learning_rate=rate)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adam(alpha=1.0), "Adam: alpha is 1.0, but must be a finite number, 0 or more and below 1"),
        (lambda: Adam(beta=-0.1), "Adam: beta is -0.1, .* 0 or more and below 1"),
        (lambda: Adam(epsilon=-1e-6), "Adam: epsilon is -1e-06, .* 0 or more"),
        (lambda: Adam(norm_coefficient_post=1.0), "Adam: norm_coefficient_post is 1.0"),
        (lambda: Adam(alpha="0.9"), "Adam: alpha is '0.9', but must be a finite number"),
        (lambda: AdamW(betas=(1.5, 0.9)), r"AdamW: betas\[0\] is 1.5, .* 0 or more and below 1"),
        (lambda: AdamW(betas=0.9), "AdamW: betas is 0.9, but must be a pair of numbers"),
        (lambda: AdamW(eps=-1.0), "AdamW: eps is -1.0"),
        (lambda: AdamW(weight_decay=-0.1), "AdamW: weight_decay is -0.1"),
        (lambda: LAMB(epsilon=-1e-6), "LAMB: eps is -1e-06, .* 0 or more"),
        (lambda: LAMB(weight_decay=-1.0), "LAMB: weight_decay is -1.0, but must be a finite number, 0 or more"),
        (lambda: Lion(betas=(0.9,)), r"Lion: betas is \(0.9,\), but must be a pair"),
        (lambda: RMSprop(momentum=1.0), "RMSprop: momentum is 1.0"),
        (lambda: RMSprop(eps=-1.0), "RMSprop: eps is -1.0"),
        (lambda: SGD(momentum=-0.1), "SGD: momentum is -0.1"),
        (lambda: SGD(nesterov=True), "SGD: nesterov needs a momentum above 0 and no dampening, but momentum is 0.0"),
        (lambda: SGD(nesterov=1), "SGD: nesterov is 1, but must be True or False"),
        (lambda: SGD(mode="fast"), "SGD: mode is 'fast', but must be one of 'standard', 'nesterov'"),
        (lambda: Adagrad(decay_factor=-1.0), "Adagrad: decay_factor is -1.0"),
        (lambda: Adagrad(norm_coefficient=float("nan")), "Adagrad: norm_coefficient is nan"),
        (lambda: Momentum(alpha=1.5), "Momentum: alpha is 1.5"),
        (lambda: Momentum(mode="fast"), "Momentum: the attribute 'mode' is 'fast', .* 'standard', 'nesterov'"),
        (lambda: SSGD(epsilon=0.0), "SSGD: epsilon is 0.0, but must be a finite number, above 0"),
        (lambda: SSGD(p=2.5), "SSGD: p is 2.5, .* above 0 and at most 2"),
        (lambda: SSGD(measure="p-norm", reweighting="l1", p=1.5), "'p-norm' has p 1.5"),
        (lambda: SSGD(measure="scad"), "'scad' cannot be a measure"),
        (lambda: SSGD(regularization=-1.0), "SSGD: regularization is -1.0"),
        (lambda: SSGD(max_scale=-1.0), "SSGD: max_scale is -1.0"),
    ],
)
def test_ranges(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_states():
    assert [s.name for s in Adam().states] == ["V", "H"]
    assert [s.name for s in Adagrad().states] == ["H"]
    assert [s.name for s in Momentum().states] == ["V"]
    assert SSGD().states == ()
    assert [s.name for s in SSGD(alpha=0.5).states] == ["V"]
    assert all(state.initial == 0.0 for settings in SETTINGS for state in settings().states)


def test_first_update_count():
    """Adam's bias correction needs T = 1 in the first step; Momentum's beta is 1 at T = 0."""
    assert Adam.schema.first_count == AdamW.schema.first_count == 1
    assert {Adagrad.schema.first_count, Momentum.schema.first_count, SSGD.schema.first_count} == {0}


def test_plain_ssgd_keeps_rate_momentum_and_decay():
    plain = SSGD(learning_rate=0.3, alpha=0.5, norm_coefficient=0.1, regularization=0.2, max_scale=4.0).plain()
    assert (plain.learning_rate, plain.alpha, plain.norm_coefficient) == (0.3, 0.5, 0.1)
    assert (plain.measure, plain.reweighting, plain.p) == ("p-norm", "l2", 2.0)
    assert (plain.regularization, plain.max_scale) == (0.0, 0.0)
