"""Samples of wide sweeps: which cases they have."""

from itertools import product

import sampling

SHAPES = ("static", "dynamic", "unknown")


def chosen(cases, kind):
    kept = sampling.places(cases, kind)
    return [tuple(case.values()) for case, is_kept in zip(cases, kept, strict=True) if is_kept]


def test_each_case_runs_with_one_value_and_values_take_turns():
    cases = [{"case": case, "shapes": shapes} for case, shapes in product("abcd", SHAPES)]
    assert chosen(cases, "shapes") == [("a", "static"), ("b", "dynamic"), ("c", "unknown"), ("d", "dynamic")]
    by_shapes = sorted(cases, key=lambda case: case["shapes"])
    assert sorted(case for case, _ in chosen(by_shapes, "shapes")) == list("abcd")


def test_every_pair_of_values_is_chosen_somewhere():
    cases = [{"case": case, "kind": kind, "shapes": shapes} for case, kind, shapes in product("abc", range(3), SHAPES)]
    assert {(kind, shapes) for _, kind, shapes in chosen(cases, "shapes")} == set(product(range(3), SHAPES))


def test_cases_may_have_different_numbers_of_values():
    cases = [{"case": "a", "shapes": 1}, {"case": "b", "shapes": 1}, {"case": "b", "shapes": 2}, {"case": "c"}]
    assert sampling.places(cases, "shapes") == [True, False, True, True]


def test_one_in_three():
    kept = sampling.places([{"seed": seed} for seed in range(90)], 3)
    assert kept[0]
    assert sum(kept) == 30
