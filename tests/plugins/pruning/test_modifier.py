"""Sparsity promotion as a modifier of an update rule, and the tensors that it applies to."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.operators import OPTIMIZERS, SSGD, Adagrad, Adam, Momentum
from onnxtrain.operators.arithmetic import Tensor
from onnxtrain.operators.sparsity import Sparsity
from sentences import raises_sentence
from zoo.arrays import copied

X = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
Y = np.arange(24) % 3
PROMOTION = Sparsity(epsilon=0.05, max_scale=6.0)


def one_step(rule, *, kernels=None, steps=1, **options):
    subject = onnxtrain.Trainer(
        onnxtrain.examples.mlp((5, 8, 3)),
        loss="softmax_cross_entropy",
        optimizer=rule,
        runtime=onnxtrain.RuntimeOptions(kernels=kernels),
        **options,
    )
    before = copied(subject.parameters)
    for _ in range(steps):
        subject.train_step(X, Y)
    return before, copied(subject.parameters)


@pytest.mark.parametrize("kernels", [None, False], ids=["kernel", "body"])
@pytest.mark.parametrize(
    "rule",
    [
        Adam(0.05, norm_coefficient=0.02),
        Momentum(0.05, norm_coefficient=0.02, beta=0.5),
        Momentum(0.05, mode="nesterov"),
    ],
    ids=str,
)
def test_the_update_is_scaled_of_weights_and_not_of_biases(rule, kernels):
    before, plain = one_step(rule, kernels=kernels)
    promoted = type(rule)(**{**vars(rule), "sparsity": PROMOTION})
    _, scaled = one_step(promoted, kernels=kernels)
    for name, x in before.items():
        step = plain[name].astype(np.float64) - x
        s = PROMOTION.resolve().squared_weight(x)
        s = np.minimum(s / s.mean(), 6.0) if x.ndim > 1 else 1.0
        np.testing.assert_allclose(scaled[name] - x, s * step, rtol=2e-4, atol=2e-7, err_msg=name)


def test_decay_after_the_step_is_not_scaled():
    before, after = one_step(Adam(0.0, norm_coefficient_post=0.1, sparsity=PROMOTION))
    for name, x in before.items():
        np.testing.assert_allclose(after[name], 0.9 * x, rtol=1e-6)


def test_momentum_with_the_modifier_is_ssgd_with_momentum():
    settings = {"epsilon": 0.05, "max_scale": 6.0}
    _, left = one_step(Momentum(0.05, alpha=0.9, norm_coefficient=0.1, sparsity=Sparsity(**settings)), steps=5)
    _, right = one_step(SSGD(0.05, alpha=0.9, norm_coefficient=0.1, **settings), steps=5)
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=1e-5, atol=1e-7)


def test_kernel_and_body_agree():
    rule = Adam(0.02, norm_coefficient=0.1, sparsity=PROMOTION)
    (_, left), (_, right) = one_step(rule, steps=5), one_step(rule, kernels=False, steps=5)
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", [SSGD(0.05, epsilon=0.05), Momentum(0.05, alpha=0.0, sparsity=PROMOTION)], ids=str)
def test_patterns_choose_what_is_sparsified(rule):
    plain_rule = rule.plain()
    assert not plain_rule.promotes_sparsity
    assert rule.promotes_sparsity
    _, plain = one_step(plain_rule)
    _, chosen = one_step(rule, sparsify=["layer2.*"])
    same = {name: np.array_equal(plain[name], chosen[name]) for name in plain}
    assert same == {
        "layer1.weight": True,
        "layer1.bias": True,
        "layer2.weight": False,
        "layer2.bias": same["layer2.bias"],
    }
    # a bias of zeros has s = 1 everywhere: chosen or not, it takes the same step, up to rounding
    np.testing.assert_allclose(plain["layer2.bias"], chosen["layer2.bias"], rtol=1e-6)


def test_a_pattern_that_matches_nothing():
    with raises_sentence("no_match", option="sparsify", pattern="'conv'", kind="parameter that is trained"):
        one_step(SSGD(), sparsify="conv")


def test_rules_without_promotion_are_their_own_plain_form():
    for entry in OPTIMIZERS.values():
        plain = entry.settings().plain()
        assert not plain.promotes_sparsity
        assert plain.plain() == plain
    assert Adagrad().plain() == Adagrad()


def test_apply_on_arrays():
    x, step = np.array([1.0, 3.0]), np.array([-1.0, 1.0])
    moved = Sparsity(measure="p-norm", p=1.0, max_scale=1.25).apply(Tensor(x), Tensor(step))
    np.testing.assert_allclose(moved.data, [0.5, 4.25])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sparsity(measure="mcp"), "'mcp' cannot be a measure: it is not strictly concave"),
        (lambda: Sparsity(epsilon=0.0), "'log-sum' has epsilon 0, but needs one above 0"),
        (lambda: Sparsity(measure="p-norm", p=3.0), "'p-norm' has p 3, but"),
        (lambda: Sparsity(reweighting="l3"), "reweighting is 'l3', but must be"),
        (lambda: Sparsity(max_scale=-1.0), "Sparsity: max_scale is -1.0, but must be a finite number"),
    ],
)
def test_parameters_out_of_range(make, message):
    with pytest.raises(OptionError, match=message):
        make()
