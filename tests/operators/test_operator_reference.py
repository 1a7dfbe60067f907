"""The operators over NumPy arrays, against the pseudo-code of their pages."""

from __future__ import annotations

import math

import numpy as np
import operator_pages as pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import ATTRIBUTES, CASES, IDS, TYPES, Problem, problem

from onnxtrain import operators
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.operators.arithmetic import Tensor, wide
from onnxtrain.operators.evaluation import arguments
from sentences import raises_sentence

COUNTS = (0, 1, 2, 1000)


def expected(made: Problem, R: float, T: int) -> list[np.ndarray]:
    """The page's pseudo-code in float64 on the same numbers."""
    attributes = {
        a.name: made.attributes.get(a.name, a.default) for a in made.schema.attributes
    }  # not through the project's own completion
    attributes = {k: v if isinstance(v, (str, tuple)) else float(np.float32(v)) for k, v in attributes.items()}
    results: list[list[np.ndarray]] = []
    for index in range(made.variables):
        x, *others = (t.astype(np.float64) for t in made.tensors[index :: made.variables])
        own = [x.reshape(-1).tolist(), *(np.broadcast_to(t, x.shape).reshape(-1).tolist() for t in others)]
        if made.schema.name == "SSGD":
            states = own[2] if len(own) > 2 else [0.0] * x.size
            new = (
                pages.ssgd(R, own[0], own[1], states, **attributes)[: made.roles - 1]
                if x.size
                else ([],) * (made.roles - 1)
            )
        elif made.schema.name == "LAMB":
            new = pages.lamb(R, T, *own, **attributes)
        elif not hasattr(pages, made.schema.name.lower()):
            new = by_rule(made.schema, R, T, own, attributes)
        else:
            rule = getattr(pages, made.schema.name.lower())
            rows = [rule(R, T, *numbers, **attributes) for numbers in zip(*own, strict=True)]
            new = list(zip(*rows, strict=True)) if rows else [[]] * (made.roles - 1)
        results.append([np.asarray(item, dtype=np.float64).reshape(x.shape) for item in new])
    return [item for role in zip(*results, strict=True) for item in role]


def by_rule(schema, R, T, own, attributes):
    """The operator's own rule in float64, for one without pseudo-code: its numbers are those of its page's example."""
    tensors = [Tensor(np.array(numbers, np.float64)) for numbers in own]
    return [np.asarray(new.data) for new in schema.rule(wide(R), wide(T), *tensors, **arguments(attributes))]


def check(made: Problem, R: float, T: int) -> None:
    got = made.run(R, T)
    wanted = expected(made, float(R), int(T))
    assert len(got) == len(wanted)
    for new, want, old in zip(got, wanted, made.old, strict=True):
        assert isinstance(new, np.ndarray)
        assert new.dtype == old.dtype
        assert new.shape == old.shape
        tolerance = 2e-6 if old.dtype == np.float32 else 1e-14
        np.testing.assert_allclose(new, want, rtol=tolerance * 20, atol=tolerance)


@pytest.mark.sampled("T")
@pytest.mark.parametrize("T", COUNTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_equals_the_page(name, attributes, dtype, T):
    made = problem(name, attributes, [((3, 4), dtype)], seed=T)
    check(made, 0.1, T)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(200))
def test_random_cases_equal_the_page(seed):
    rng = np.random.default_rng(seed)
    name, rows = list(ATTRIBUTES.items())[seed % len(ATTRIBUTES)]
    attributes = dict(rows[rng.integers(len(rows))])
    known = [attribute.name for attribute in OPTIMIZERS[name].schema.attributes]
    for decay in {"norm_coefficient", "weight_decay"}.intersection(known).difference(attributes):
        attributes[decay] = float(rng.uniform(0, 0.1))
    if name in ("Adam", "AdamW", "LAMB"):
        attributes |= {"alpha": float(rng.uniform(0, 0.99)), "beta": float(rng.uniform(0, 0.999))}
    variables = [
        (tuple(rng.integers(0, 5, size=rng.integers(0, 4)).tolist()), TYPES[rng.integers(2)])
        for _ in range(rng.integers(1, 5))
    ]
    T = int(rng.choice([0, 1, 2, 7, 1000, 10**6]))
    R = rng.choice(TYPES)(rng.uniform(0, 1))
    check(problem(name, attributes, variables, seed), R, T)


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from(CASES),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from(TYPES),
    T=st.integers(0, 2000),
    R=st.floats(0, 2),
)
def test_any_shapes_counts_and_rates(case, shapes, dtype, T, R):
    check(problem(*case, [(shape, dtype) for shape in shapes]), R, T)


@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_many_variables_are_independent_of_each_other(name, attributes):
    rng = np.random.default_rng(1)
    variables = [(tuple(rng.integers(0, 4, size=k % 4).tolist()), TYPES[k % 3 == 0]) for k in range(50)]
    made = problem(name, attributes, variables)
    together = made.run(np.float32(0.1), 3)
    for index in range(50):
        alone = OPTIMIZERS[name].reference(np.float32(0.1), 3, *made.tensors[index::50], **attributes)
        for one, all_of_role in zip(alone, together[index::50], strict=True):
            np.testing.assert_array_equal(one, all_of_role, strict=True)


@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_a_wide_learning_rate_does_not_widen_the_results(name, attributes):
    made = problem(name, attributes, [((4,), np.float32), ((2, 2), np.float64)])
    for new, old in zip(made.run(np.float64(0.1), np.int64(5)), made.old, strict=True):
        assert new.dtype == old.dtype


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_element_of_any_rank_is_a_scalar(shape):
    made = problem("Adam", {}, [((3,), np.float32)])
    expected_new = made.run(np.float32(0.1), np.int64(2))
    got = made.run(np.full(shape, 0.1, np.float32), np.full(shape, 2, np.int64))
    for a, b in zip(got, expected_new, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("gradient_shape", [(), (1,), (3,), (2, 1), (1, 3)])
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_a_smaller_gradient_broadcasts(name, attributes, gradient_shape):
    made = problem(name, attributes, [((2, 3), np.float64)])
    small = np.asarray(np.random.default_rng(2).standard_normal(gradient_shape))
    made.tensors[1] = small
    got = made.run(0.1, 1)
    made.tensors[1] = np.broadcast_to(small, (2, 3)).copy()
    for a, b in zip(got, made.run(0.1, 1), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_nan_and_infinity_stay_in_their_element(name, attributes, dtype, bad):
    """In the gradient: elsewhere they follow IEEE arithmetic, and nothing is raised."""
    made = problem(name, attributes, [((4,), dtype)])
    clean = made.run(0.1, 1)
    made.tensors[1][2] = bad
    got = made.run(0.1, 1)
    rest = [0, 1, 3]
    for new, before in zip(got, clean, strict=True):
        if name == "LAMB" and new is got[0]:  # the scale of the whole tensor is 1 if its norm is not a number
            assert np.isfinite(new[rest]).all()
        else:
            np.testing.assert_array_equal(new[rest], before[rest])
        # The sign of an infinite gradient is a step like others: Lion's average is not finite, its weight is.
        assert np.isfinite(new[2]) == (name == "Lion" and new is got[0] and np.isinf(bad))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_a_bad_variable_gives_results_without_a_warning(name, attributes, bad):
    made = problem(name, attributes, [((4,), np.float32)])
    made.tensors[0][:] = bad
    assert not np.isfinite(made.run(0.1, 1)[0]).any()


def test_a_negative_update_count_is_used_as_written():
    made = problem("Adam", {}, [((3,), np.float64)])
    for a, b in zip(made.run(0.1, -5), made.run(0.1, 0), strict=True):
        np.testing.assert_array_equal(a, b)
    momentum = problem("Momentum", ATTRIBUTES["Momentum"][0], [((3,), np.float64)])
    for a, b in zip(momentum.run(0.1, -5), momentum.run(0.1, 0), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("T", "ok"), [(-1, True), (-1.0 / 0.1, False), (-11, False)])
def test_adagrad_refuses_a_rate_that_turns_around(T, ok):
    made = problem("Adagrad", {"decay_factor": 0.1}, [((3,), np.float64)])
    if ok:
        assert np.isfinite(made.run(0.1, int(T))[0]).all()
        return
    with raises_sentence("adagrad_uphill", factor="-"):
        made.run(0.1, int(T))


def test_squares_are_associated_as_on_the_page():
    """(1 - beta) * G * G is finite where G * G overflows."""
    x, g = np.ones(1, np.float32), np.full(1, 1e20, np.float32)
    _, _, h = operators.adam(
        0.0, 0, x, g, 0 * x, 0 * x, alpha=0.0, beta=float(np.nextafter(np.float32(1), np.float32(0)))
    )
    assert np.isfinite(h).all()


def test_attributes_are_the_float32_numbers_of_a_file():
    x = np.ones(1)
    _, v = operators.momentum(0.0, 0, x, 0 * x, x, alpha=0.1, beta=1.0, mode="standard", norm_coefficient=0.0)
    assert v[0] == float(np.float32(0.1)) != 0.1


def test_inputs_are_left_as_they_are():
    for name, attributes in CASES:
        made = problem(name, attributes, [((3,), np.float32)])
        copies = [t.copy() for t in made.tensors]
        made.run(0.5, 1)
        for a, b in zip(made.tensors, copies, strict=True):
            np.testing.assert_array_equal(a, b)


def test_lists_are_float64_arrays():
    (x_new, h_new) = operators.adagrad(0.1, 0, [1.0], [2.0], [0.0])
    assert x_new.dtype == h_new.dtype == np.float64
    assert math.isclose(x_new[0], 0.9, rel_tol=1e-6)
