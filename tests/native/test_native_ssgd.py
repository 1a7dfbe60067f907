"""SSGD's kernels: every measure against its definition, the order of the mean's sum, and overflow."""

import numpy as np
import pytest
from optimizer_reference import assert_close, wide_ssgd

from onnxtrain.runtime.kernels import ssgd_

MEASURES = ("log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh")
OPTIONS = [
    {},
    {"regularization": 0.01, "norm_coefficient": 0.01},
    {"alpha": 0.9, "max_scale": 1.5},
    {"alpha": 0.5, "regularization": 0.1},
]


def in_place(R, X, G, V=None, threads=1, **attributes):
    X, states = np.array(X), [] if V is None else [np.array(V)]
    ssgd_([X], [G], states, learning_rate=R, threads=threads, **attributes)
    return [X, *states]


def draw(rng, count, dtype, attributes):
    arrays = [np.asarray(rng.standard_normal(count), dtype) for _ in range(3)]
    return arrays if attributes.get("alpha") else arrays[:2]


def settings(measure):
    return {"measure": measure, "epsilon": 3.0 if measure in ("exponential", "tanh") else 0.01}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reweighting", ["l1", "l2"])
@pytest.mark.parametrize("measure", MEASURES)
def test_measures_agree_with_a_wide_evaluation(instruction_set, measure, reweighting, dtype, options):
    attributes = {**settings(measure), "reweighting": reweighting, **options}
    arrays = draw(np.random.default_rng(1), 100_000, dtype, attributes)
    # The arguments of exp reach 10, so that rounding them costs ten times the last place of a float64.
    relative = 2e-14 if measure in ("exponential", "tanh") else 2e-15
    assert_close(in_place(0.1, *arrays, **attributes), wide_ssgd(0.1, *arrays, **attributes), 4, relative)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("measure", MEASURES)
def test_every_tail(instruction_set, measure, dtype):
    rng = np.random.default_rng(2)
    for count in range(1, 71):
        attributes = {**settings(measure), "regularization": 0.01, "reweighting": "l1"}
        arrays = draw(rng, count, dtype, attributes)
        assert_close(in_place(0.1, *arrays, **attributes), wide_ssgd(0.1, *arrays, **attributes), 4, 2e-14)


@pytest.mark.parametrize("reweighting", ["l1", "l2"])
@pytest.mark.parametrize("measure", MEASURES)
def test_all_instruction_sets_and_thread_counts_give_the_same_bits(libraries, monkeypatch, measure, reweighting):
    attributes = {**settings(measure), "reweighting": reweighting, "regularization": 0.01}
    for dtype in (np.float32, np.float64):
        arrays = draw(np.random.default_rng(3), 50_003, dtype, attributes)
        results = []
        for _, library in libraries.values():
            monkeypatch.setattr("onnxtrain.runtime.native._loaded", lambda library=library: (library, ""))
            results += [in_place(0.1, *arrays, threads=n, **attributes)[0] for n in (1, 3)]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("reweighting", ["l1", "l2"])
@pytest.mark.parametrize("measure", ["exponential", "tanh"])
def test_a_small_epsilon_does_not_overflow(instruction_set, measure, reweighting):
    X, G = np.array([0.5, -3.0, 0.1], np.float32), np.ones(3, np.float32)
    attributes = {"epsilon": 1e-4, "reweighting": reweighting, "regularization": 1.0}
    (result,) = in_place(0.01, X, G, measure=measure, **attributes)
    # exp(30,000) is beyond every type; the largest weight takes the whole mean, the others nothing.
    np.testing.assert_allclose(result, [0.5, -3.03, 0.1], rtol=1e-6)


def test_p_of_2_is_plain_gradient_descent(instruction_set):
    X, G = np.array([0.0, 2.0, -1.0], np.float32), np.array([1.0, 2.0, 3.0], np.float32)
    (result,) = in_place(0.5, X, G, measure="p-norm", p=2.0)
    np.testing.assert_array_equal(result, X - np.float32(0.5) * G)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_absorbs_under_a_p_norm(instruction_set, dtype):
    G = np.ones(2, dtype)
    np.testing.assert_array_equal(in_place(0.5, np.zeros(2, dtype), G, measure="p-norm")[0], 0)
    assert in_place(0.5, np.array([0, 1], dtype), G, measure="p-norm")[0][0] == 0


def test_a_p_norm_of_l1_is_one_of_l2_with_twice_the_p():
    X, G = np.random.default_rng(4).standard_normal((2, 1000))
    a = in_place(0.1, X, G, measure="p-norm", p=0.4, reweighting="l1")[0]
    b = in_place(0.1, X, G, measure="p-norm", p=0.8, reweighting="l2")[0]
    np.testing.assert_allclose(a, b, rtol=1e-13)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_layer_of_equal_weights_steps_like_plain_gradient_descent(measure):
    X, G = np.full(5, 0.5), np.arange(5.0)
    result = in_place(0.1, X, G, **settings(measure))[0]
    np.testing.assert_allclose(result, X - 0.1 * G, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("measure", ["exponential", "tanh"])
def test_a_layer_with_a_nan_becomes_nan(instruction_set, measure, value):
    X = np.array([1.0, value, 2.0], np.float32)
    assert np.isnan(in_place(0.1, X, np.ones(3, np.float32), measure=measure)[0]).all()


@pytest.mark.parametrize("measure", ["log-sum", "p-norm", "arctan", "geman-mcclure"])
def test_an_infinite_weight_stops_its_layer(instruction_set, measure):
    X = np.array([1.0, np.inf, 2.0], np.float32)
    (result,) = in_place(0.1, X, np.ones(3, np.float32), measure=measure)
    np.testing.assert_array_equal(result, [1.0, np.nan, 2.0])


def test_large_float32_weights_do_not_overflow_the_measure(instruction_set):
    X, G = np.array([1e15, 2e15], np.float32), np.ones(2, np.float32)
    (result,) = in_place(1e15, X, G, measure="geman-mcclure")
    np.testing.assert_allclose(result, X - 1e15 * np.array([2 / 17, 32 / 17]), rtol=1e-6)
