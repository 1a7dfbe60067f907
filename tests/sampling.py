"""Sampling of wide sweeps: the default run takes a sample of the cases, the others are marked thorough.

Of these, ``.ci/run`` takes one in three; the others are marked ``sweep``, too. Of a test that is ``thorough`` itself,
``.ci/run`` takes the sample.

``@pytest.mark.sampled("shapes")`` on a test: each combination of its other parameters runs with one value of
``shapes``, in turn. ``@pytest.mark.sampled(3)``: one case in three.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest


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
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            tests.setdefault(f"{item.path}::{item.originalname}", []).append(item)
    for cases in tests.values():
        (kind,) = cases[0].get_closest_marker("sampled").args
        kept = places([case.callspec.params for case in cases], kind)
        left_out = [case for case, is_kept in zip(cases, kept, strict=True) if not is_kept]
        is_thorough = cases[0].get_closest_marker("thorough") is not None
        for number, case in enumerate(left_out):
            case.add_marker("thorough")
            if is_thorough or _turn(number, 3):
                case.add_marker("sweep")
