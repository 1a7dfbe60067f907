"""Samples of the fuzzers for files, command lines and kills; ``-m reliability`` runs more, ``run.py`` for hours."""

from __future__ import annotations

import pytest

from reliability.crafted import CRAFTED
from reliability.killer import find_compiler
from reliability.outcome import FAILURES
from reliability.runner import run_cases

_COUNTS = {
    "reading": (500, 5000, 10**6),
    "models": (100, 2000, 60000),
    "data": (80, 1000, 20000),
    "checkpoints": (60, 500, 10000),
    "flags": (60, 350, 8000),
    "killings": (0, 80, 1000),
    "adapters": (60, 1000, 50000),
    "small": (100, 2000, 50000),
    "tables": (100, 2000, 50000),
    "texts": (60, 1000, 50000),
    "images": (60, 1000, 50000),
    "pages": (30, 300, 20000),
    "interrupts": (3, 30, 1000),
}
SOME, MORE, MOST = ({subject: counts[size] for subject, counts in _COUNTS.items()} for size in range(3))


def check(subject: str, cases: range) -> None:
    if subject == "killings" and find_compiler() is None:
        pytest.skip("no compiler for the library that ends file operations")
    report = run_cases(subject, cases, workers=1 if len(cases) <= 100 else 2)
    assert sum(report.counts.values()) == len(cases)
    assert not any(report.counts[kind] for kind in FAILURES), f"{report.counts}\n\n{report.text()}"


@pytest.mark.thorough
@pytest.mark.parametrize("subject", [subject for subject in SOME if SOME[subject]])
def test_some(subject):
    check(subject, range(SOME[subject]))


@pytest.mark.reliability
@pytest.mark.parametrize("subject", MORE)
def test_more(subject):
    check(subject, range(SOME[subject], MORE[subject]))


@pytest.mark.slow
@pytest.mark.parametrize("subject", MOST)
def test_most(subject):
    check(subject, range(MORE[subject], MOST[subject]))


@pytest.mark.reliability
def test_crafted_models():
    check("crafted", range(len(CRAFTED)))
