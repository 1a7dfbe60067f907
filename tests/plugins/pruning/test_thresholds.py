"""Cuts by magnitude and at random, the cubic schedule, the search for a bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxtrain.plugins.pruning.thresholds import Form, cubic, magnitude_cut, random_cut, search

WEIGHTS = {"a": np.array([[4.0, -3.0], [0.5, 0.0]]), "b": np.array([[2.0, 1.0, -0.1, 0.2, -0.3, 0.4]])}


def survivors(cut):
    return {name: WEIGHTS[name][mask].tolist() for name, mask in cut.masks.items()}


def test_all_tensors_compete_or_each_gets_its_share():
    assert survivors(magnitude_cut(WEIGHTS, 0.6)) == {"a": [4.0, -3.0], "b": [2.0, 1.0]}
    assert survivors(magnitude_cut(WEIGHTS, 0.5, Form(allocation="uniform"))) == {
        "a": [4.0, -3.0],
        "b": [2.0, 1.0, 0.4],
    }
    cut = magnitude_cut(WEIGHTS, 0.6)
    assert cut.thresholds == {"a": 3.0, "b": 1.0}
    assert cut.sparsity == pytest.approx(0.6)


def test_an_emptied_tensor_is_named():
    cut = magnitude_cut(WEIGHTS, 0.9)
    assert (survivors(cut), cut.emptied) == ({"a": [4.0], "b": []}, ["b"])
    assert cut.thresholds["b"] == np.inf


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    sparsity=st.floats(0, 0.99),
    allocation=st.sampled_from(["global", "uniform"]),
)
def test_exact_counts_and_no_smaller_survivor(values, sparsity, allocation):
    weights = {"w": np.array(values, dtype=np.float32)}
    mask = magnitude_cut(weights, sparsity, Form(allocation=allocation)).masks["w"]
    assert np.count_nonzero(mask) == round(len(values) * (1 - sparsity))
    kept, gone = np.abs(weights["w"][mask]), np.abs(weights["w"][~mask])
    assert kept.size == 0 or gone.size == 0 or kept.min() >= gone.max()


def test_random_cuts_are_nested_repeatable_and_take_zeros_first():
    weights = {"w": np.r_[np.zeros(40), np.ones(60)].reshape(10, 10), "v": np.ones((5, 4))}
    cuts = [random_cut(weights, s, generator=np.random.default_rng(3)) for s in (0.34, 0.34, 0.7)]
    for name in weights:
        np.testing.assert_array_equal(cuts[0].masks[name], cuts[1].masks[name])
        assert not (cuts[2].masks[name] & ~cuts[0].masks[name]).any()
    assert not cuts[0].masks["w"].ravel()[:40].any()
    other = random_cut(weights, 0.7, generator=np.random.default_rng(4))
    assert (other.masks["w"] != cuts[2].masks["w"]).any()


def test_cubic_rises_from_first_to_final():
    rising = [cubic(0.9, part, 5, first=0.2) for part in range(6)]
    assert rising[0] == pytest.approx(0.2)
    assert rising[-1] == 0.9
    assert np.all(np.diff(rising) > 0)
    assert np.all(np.diff(rising, 2) < 0)


@pytest.mark.parametrize("limit", [0.0, 0.37, 0.9, 0.997])
def test_search_finds_the_bound(limit):
    weights = {"w": np.arange(1.0, 5001.0)}
    cut, probes = search(
        lambda sparsity: magnitude_cut(weights, sparsity),
        lambda found: 0.9 if found.sparsity <= limit + 1e-9 else 0.5,
        bound=0.9,
        size=5000,
    )
    assert cut.sparsity <= limit + 1e-9
    assert (1 - cut.sparsity) <= (1 - limit) * 1.03
    assert all(probe.accepted == (probe.sparsity <= limit + 1e-9) for probe in probes)
    assert len(probes) <= 16
