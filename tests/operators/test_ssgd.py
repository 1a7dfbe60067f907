"""Properties of SSGD: fixed points, scale, related optimizers."""

from __future__ import annotations

import math

import numpy as np
import operator_pages as pages
import pytest
from operator_cases import MEASURES

from onnxtrain import operators
from onnxtrain.operators import SSGD
from onnxtrain.operators.arithmetic import Tensor, Wide
from onnxtrain.operators.measures import measure
from onnxtrain.operators.rules.momentum import rule as momentum_rule
from onnxtrain.operators.sparsity import Layer

EVERY = [(name, reweighting) for name in MEASURES for reweighting in ("l1", "l2")]


def layer(seed: int = 0, shape: tuple[int, ...] = (8, 5), dtype=np.float64):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape).astype(dtype)


def scale_of(x: np.ndarray, max_scale: float = 0.0, **parameters) -> np.ndarray:
    """s, read off a step with R = -1 and G = 1."""
    (x_new,) = operators.ssgd(-1.0, 0, x, np.ones_like(x), max_scale=max_scale, **parameters)
    return x_new - x


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("reweighting", "p"), [("l2", 2.0), ("l1", 1.0)])
def test_the_largest_p_is_gradient_descent_to_the_last_bit(reweighting, p, dtype):
    x, g = layer(dtype=dtype)
    x[0] = 0  # zeros move, too
    (x_new,) = operators.ssgd(0.1, 0, x, g, measure="p-norm", reweighting=reweighting, p=p)
    np.testing.assert_array_equal(x_new, x - dtype(0.1) * g)


def test_plain_settings_are_momentum_to_the_last_bit():
    x, g = layer(dtype=np.float32)
    v = g * 3
    plain = SSGD(alpha=0.9, norm_coefficient=0.01, regularization=0.1).plain()
    got = operators.ssgd(0.1, 1, x, g, v, **plain.node_attributes())
    want = operators.momentum(0.1, 1, x, g, v, alpha=0.9, beta=1.0, mode="standard", norm_coefficient=0.01)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 4.0])
def test_powerpropagation_without_the_layer_mean(power):
    """Weights phi |phi|^(power-1): the gradient step on phi, to first order, is SSGD with p = 2 / power.

    d theta / d phi = power |phi|^(power-1), and the step on theta is its square times the gradient.
    """
    x, g = layer()
    phi = np.sign(x) * np.abs(x) ** (1 / power)
    slope = power * np.abs(phi) ** (power - 1)
    direction = slope**2 * g
    (x_new,) = operators.ssgd(0.1, 0, x, g, measure="p-norm", p=2 / power)
    ratio = (x - x_new) / direction
    np.testing.assert_allclose(ratio, ratio.flat[0], rtol=1e-5)  # one factor per layer, its mean
    np.testing.assert_allclose(ratio.flat[0], 0.1 / np.mean(slope**2), rtol=1e-5)


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
def test_l1_with_p_is_l2_with_twice_p(p):
    x, g = layer()
    one = operators.ssgd(0.1, 0, x, g, measure="p-norm", reweighting="l1", p=p)[0]
    two = operators.ssgd(0.1, 0, x, g, measure="p-norm", reweighting="l2", p=2 * p)[0]
    np.testing.assert_allclose(one, two, rtol=1e-12)


@pytest.mark.parametrize(("name", "reweighting"), EVERY)
def test_fixed_points_are_those_of_the_loss(name, reweighting):
    """Without regularization: a zero gradient stays where it is, and only it does."""
    x, g = layer(shape=(40,))
    parameters = {"measure": name, "reweighting": reweighting, "epsilon": 0.5, "p": 0.8}
    np.testing.assert_array_equal(operators.ssgd(0.1, 0, x, 0 * g, **parameters)[0], x)
    assert np.all(np.sign(x - operators.ssgd(0.1, 0, x, g, **parameters)[0]) == np.sign(g))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "reweighting"), EVERY)
def test_descends_to_the_minimum_of_the_loss(name, reweighting):
    """J = |x - target|² / 2 ends at the target, however the steps are scaled."""
    target = np.asarray([1.0, -0.8, 0.6, 0.9])
    x = np.asarray([0.3, -0.2, 1.5, 0.7])
    for _ in range(3000):
        (x,) = operators.ssgd(
            0.3, 0, x, x - target, measure=name, reweighting=reweighting, epsilon=1.5, p=0.9, max_scale=2.0
        )
    np.testing.assert_allclose(x, target, atol=1e-6)


@pytest.mark.parametrize(("name", "reweighting"), EVERY)
@pytest.mark.parametrize("momentum", [False, True])
def test_the_affine_scaling_terms(name, reweighting, momentum):
    """Regularization: exactly the terms that the two frameworks subtract besides the scaled gradient."""
    x, g = layer()
    parameters = {"measure": name, "reweighting": reweighting, "epsilon": 0.5, "p": 0.8}
    states = (g * 2,) if momentum else ()
    extra = {"alpha": 0.5} if momentum else {}
    without = operators.ssgd(0.1, 0, x, g, *states, **parameters, **extra)[0]
    with_it = operators.ssgd(0.1, 0, x, g, *states, regularization=0.25, **parameters, **extra)[0]
    wide = {k: float(np.float32(v)) if not isinstance(v, str) else v for k, v in parameters.items()}
    squares = np.vectorize(lambda u: pages.ssgd_weight(u, **wide))(x)
    if reweighting == "l2":
        term = 2 * 0.1 * 0.25 * x / squares.mean()
    else:
        term = 0.1 * 0.25 * np.sqrt(squares) * np.sign(x) / squares.mean()
    np.testing.assert_allclose(without - with_it, term, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("name", "reweighting"), EVERY)
def test_the_scale_averages_one(name, reweighting):
    for shape in ((1,), (7,), (30, 4)):
        x, _ = layer(shape=shape)
        s = scale_of(x, measure=name, reweighting=reweighting)
        assert math.isclose(s.mean(), 1.0, rel_tol=1e-9)
        assert np.all(np.diff(s.reshape(-1)[np.argsort(np.abs(x), axis=None)]) >= -1e-9)  # larger, faster


@pytest.mark.parametrize(("name", "reweighting"), EVERY)
def test_the_cap(name, reweighting):
    x, _ = layer()
    free = scale_of(x, measure=name, reweighting=reweighting)
    assert free.max() > 1.25
    capped = scale_of(x, max_scale=1.25, measure=name, reweighting=reweighting)
    np.testing.assert_allclose(capped, np.minimum(free, 1.25), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["exponential", "tanh"])
@pytest.mark.parametrize("reweighting", ["l1", "l2"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_measures_that_would_overflow(name, reweighting, dtype):
    """e^(9 / 1e-4) is far beyond any float; the ratio is not."""
    x = np.asarray([3.0, 1.0, -3.0, 0.0], dtype)
    s = scale_of(x, measure=name, reweighting=reweighting, epsilon=1e-4)
    np.testing.assert_allclose(s, [2, 0, 2, 0], atol=1e-6)
    (x_new,) = operators.ssgd(0.1, 0, x, 0 * x, measure=name, reweighting=reweighting, epsilon=1e-4, regularization=0.5)
    np.testing.assert_array_equal(x_new, x)  # the mean of w² is beyond float64: the term vanishes


def test_zero_is_absorbing_under_a_p_norm_and_only_there():
    x = np.asarray([0.0, 1.0, -2.0])
    assert scale_of(x, measure="p-norm", p=0.5)[0] == 0
    assert scale_of(x, measure="log-sum")[0] > 0


@pytest.mark.parametrize("regularization", [0.0, 0.5])
def test_a_layer_of_zeros_stays_under_a_p_norm(regularization):
    x = np.zeros((2, 2), np.float32)
    (x_new,) = operators.ssgd(0.1, 0, x, x + 1, measure="p-norm", regularization=regularization)
    np.testing.assert_array_equal(x_new, x)


def test_a_layer_is_one_variable():
    """The mean is taken over each variable separately."""
    x, g = layer()
    together = operators.ssgd(0.1, 0, x, 10 * x, g, g)
    for scale, got in zip((1, 10), together, strict=True):
        np.testing.assert_array_equal(got, operators.ssgd(0.1, 0, scale * x, g)[0])


def test_small_weights_die_out_where_plain_descent_keeps_them():
    """A regression with few true coefficients: SSGD leaves the others far smaller."""
    rng = np.random.default_rng(3)
    truth = np.zeros(40)
    truth[:4] = [2, 1.5, 1, 2]
    inputs = rng.standard_normal((25, 40))  # fewer equations than unknowns
    targets = inputs @ truth

    def train(**parameters):
        x = np.full(40, 0.3)
        for _ in range(4000):
            gradient = inputs.T @ (inputs @ x - targets) / 25
            (x,) = operators.ssgd(0.01, 0, x, gradient, **parameters)
        return np.abs(x - truth).max()

    assert train(measure="p-norm", p=1.0, max_scale=10.0) < 0.1 < 0.5 < train(measure="p-norm", p=2.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_scaled_rate_makes_any_rule_promote_sparsity(dtype):
    """The shared part: R * s instead of R, in the rule of another optimizer."""
    x, g = (Tensor(item) for item in layer(dtype=dtype))
    v = Tensor(np.zeros_like(x.data))
    s = Layer.of(x, measure("log-sum", epsilon=0.5)).scale()
    settings = {
        "alpha": Wide(np.float64(0.0)),
        "beta": Wide(np.float64(1.0)),
        "norm_coefficient": Wide(np.float64(0.0)),
    }
    new, _ = momentum_rule(0.1 * s, Wide(np.float64(0)), x, g, v, mode="standard", **settings)
    assert new.dtype == dtype
    np.testing.assert_array_equal(new.data, operators.ssgd(0.1, 0, x.data, g.data, epsilon=0.5)[0])
