"""Sampling of wide sweeps: the default run takes a sample of the cases, the others are marked thorough.

Of the others, ``.ci/run`` takes one in four; the rest are marked ``sweep``, too. Of a test that is ``thorough``
itself, ``.ci/run`` takes the sample.

``@pytest.mark.sampled("shapes")`` on a test: each combination of its other parameters runs with one value of
``shapes``, in turn. ``@pytest.mark.sampled(3)``: one case in three; ``sampled(1)``: all, which suits tests that reflect
over the product in a few milliseconds a case. As ``pytestmark`` it is for all tests of a file.

A test of more than ``MANY`` cases without such a mark runs with one case in five.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

MANY = 4
"""Cases of a test of which the default run takes all."""

_OWN_RUNS = ("thorough", "sweep", "slow", "reliability", "browser")
"""Marks of tests that the default run leaves out."""


def places(cases: Sequence[dict[str, object]], kind: str | int) -> list[bool]:
    """Select the cases in the sample, given the parameter objects of all cases."""
    if isinstance(kind, int):
        return [_turn(place, kind) == 0 for place in range(len(cases))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, parameters in enumerate(cases):
        others = tuple(id(value) for name, value in sorted(parameters.items()) if name != kind)
        groups.setdefault(others, []).append(place)
    chosen = {group[_turn(number, len(group))] for number, group in enumerate(groups.values())}
    return [place in chosen for place in range(len(cases))]


def _turn(number: int, count: int) -> int:
    """0 to count - 1 in turn, and in the next round one further: parameters of as many values do not go along."""
    return (number + number // count) % count


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the cases outside the sample as thorough, and those that ``.ci/run`` leaves out as a sweep."""
    for cases in _by_test(items, lambda item: hasattr(item, "callspec") and item.get_closest_marker("sampled")):
        (kind,) = cases[0].get_closest_marker("sampled").args
        kept = places([case.callspec.params for case in cases], kind)
        left_out = [case for case, is_kept in zip(cases, kept, strict=True) if not is_kept]
        is_thorough = cases[0].get_closest_marker("thorough") is not None
        for number, case in enumerate(left_out):
            case.add_marker("thorough")
            if is_thorough or _turn(number, 4):
                case.add_marker("sweep")
    for cases in _by_test(items, lambda item: not any(map(item.get_closest_marker, ("sampled", *_OWN_RUNS)))):
        left_out = [case for place, case in enumerate(cases) if len(cases) > MANY and _turn(place, 5)]
        for number, case in enumerate(left_out):
            case.add_marker("thorough")
            if _turn(number, 4):
                case.add_marker("sweep")
    for item in items:
        if item.get_closest_marker("sweep") is not None:
            item.add_marker("thorough")  # the default run leaves out what is thorough


def _by_test(
    items: Sequence[pytest.Item], is_meant: Callable[[pytest.Function], object]
) -> list[list[pytest.Function]]:
    """Return the cases of each test."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and is_meant(item):
            tests.setdefault(f"{item.path}::{item.originalname}", []).append(item)
    return list(tests.values())
