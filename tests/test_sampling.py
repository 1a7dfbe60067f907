"""Samples of wide sweeps: which cases they have."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

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


MANY_CASES = """
import pytest

@pytest.mark.parametrize("case", range(30))
def test_many(case): pass

@pytest.mark.parametrize("case", range(4))
def test_few(case): pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(40))
def test_marked(case): pass

@pytest.mark.sweep
def test_swept(): pass
"""


@pytest.mark.parametrize(
    ("marks", "passed"), [("not thorough", 6 + 4 + 20), ("thorough and not sweep", 6 + 5), ("sweep", 18 + 15 + 1)]
)
def test_of_many_cases_one_in_five_runs_by_default(tmp_path, marks, passed):
    (tmp_path / "conftest.py").write_text(
        "import pytest, sampling\n"
        "def pytest_collection_modifyitems(items): sampling.mark(items)\n"
        "pytest_collection_modifyitems = pytest.hookimpl(tryfirst=True)(pytest_collection_modifyitems)\n"
    )
    (tmp_path / "test_cases.py").write_text(MANY_CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n thorough:\n sweep:\n sampled:\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    path = {**os.environ, "PYTHONPATH": str(Path(sampling.__file__).parent)}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=path)
    assert f"{passed} passed" in run.stdout, run.stdout + run.stderr
