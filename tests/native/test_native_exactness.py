"""The kernels of every instruction set against the pseudo-code: bit by bit, and against a wide type."""

import numpy as np
import pytest
from optimizer_reference import STATES, assert_close, draw, stepwise, wide

from onnxtrain import kernels

CASES = [
    ("Adagrad", {}),
    ("Adagrad", {"decay_factor": 0.1, "epsilon": 1e-5, "norm_coefficient": 0.001}),
    ("Adam", {}),
    ("Adam", {"alpha": 0.95, "beta": 0.1, "norm_coefficient": 0.01, "norm_coefficient_post": 0.02}),
    ("Momentum", {}),
    ("Momentum", {"mode": "nesterov", "norm_coefficient": 0.01}),
]
FUNCTIONS = {"Adagrad": kernels.adagrad_, "Adam": kernels.adam_, "Momentum": kernels.momentum_}


def in_place(name, R, T, arrays, threads=1, **attributes):
    X, G, *states = (np.array(a) for a in arrays)
    if name == "Momentum":
        attributes = {"alpha": 0.95, "beta": 0.1, **attributes}
    FUNCTIONS[name]([X], [G], states, learning_rate=R, step=T, threads=threads, **attributes)
    return [X, *states]


@pytest.mark.parametrize("T", [0, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "attributes"), CASES)
def test_a_hundred_thousand_elements_agree_with_a_wide_evaluation(instruction_set, name, attributes, dtype, T):
    arrays = draw(np.random.default_rng(1), 100_000, dtype, STATES[name])
    # Both regularizations add three roundings to the page's formula, and with them half a place or so.
    places = 5 if "norm_coefficient_post" in attributes else 4
    results = in_place(name, 0.1, T, arrays, **attributes)
    assert_close(results, wide(name, 0.1, T, *arrays, **attributes), places)


def test_the_bound_refuses_an_error_of_five_places():
    arrays = draw(np.random.default_rng(1), 1000, np.float32, 2)
    results = in_place("Adam", 0.1, 7, arrays)
    results[0][500] += 5 * np.spacing(np.float32(2))
    with pytest.raises(AssertionError, match="bounds"):
        assert_close(results, wide("Adam", 0.1, 7, *arrays))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "attributes"), CASES)
def test_every_tail_has_the_bits_of_the_pseudo_code(instruction_set, name, attributes, dtype):
    rng = np.random.default_rng(2)
    for count in range(71):
        arrays = draw(rng, count, dtype, STATES[name])
        expected = stepwise(name, 0.1, 3, *arrays, **attributes)
        for result, value in zip(in_place(name, 0.1, 3, arrays, **attributes), expected, strict=True):
            np.testing.assert_array_equal(result, value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "attributes"), CASES)
def test_special_values_have_the_bits_of_the_pseudo_code(instruction_set, name, attributes, dtype):
    limits = np.finfo(dtype)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, limits.max, -limits.max, limits.tiny]
    special += [limits.smallest_subnormal, -limits.smallest_subnormal, 1.0, -1e-30]
    grids = np.meshgrid(*[np.array(special, dtype)] * 3)
    X, G, first = (np.ascontiguousarray(grid.ravel()) for grid in grids)
    states = [first, abs(first)][: STATES[name]]
    expected = stepwise(name, 0.1, 3, X, G, *states, **attributes)
    for result, value in zip(in_place(name, 0.1, 3, [X, G, *states], **attributes), expected, strict=True):
        np.testing.assert_array_equal(result, value)
        finite = ~np.isnan(value)
        np.testing.assert_array_equal(np.signbit(result[finite]), np.signbit(value[finite]))


@pytest.mark.parametrize("name", STATES)
def test_results_do_not_depend_on_the_number_of_threads(name):
    arrays = draw(np.random.default_rng(3), 200_001, np.float32, STATES[name])
    one, three = (in_place(name, 0.1, 5, arrays, threads=threads) for threads in (1, 3))
    for a, b in zip(one, three, strict=True):
        np.testing.assert_array_equal(a, b)


def test_adam_corrects_the_learning_rate_from_the_first_step_on():
    X, V, H = np.zeros(1), np.zeros(1), np.zeros(1)
    kernels.adam_([X], [np.full(1, 3.0)], [V, H], learning_rate=0.5, step=1, epsilon=0.0)
    assert X[0] == pytest.approx(-0.5, rel=1e-15)  # the corrections cancel what the averages lack
