"""Every rule against central differences, with all sizes known, only ranks known, and nothing known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from case import Case

from onnxtrain.autodiff import registry
from onnxtrain.testing import check_gradient


def _tables() -> list[Case]:
    cases: list[Case] = []
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cases += module.CASES
    return cases


CASES = _tables()
RUNS = [pytest.param(case, shapes, id=f"{case.name}-{shapes}") for case in CASES for shapes in case.shapes]


@pytest.mark.parametrize(("case", "shapes"), RUNS)
def test_gradient_equals_central_differences(case: Case, shapes: str) -> None:
    check_gradient(
        case.node,
        case.inputs,
        wrt=case.wrt,
        opset=case.opset,
        shapes=shapes,
        precision=case.precision,
        runtime=case.runtime,
        tolerance=case.tolerance,
    )


def test_every_rule_has_a_case() -> None:
    covered = set().union(*(case.operators for case in CASES))
    rules = {(e.domain, e.operator) for e in registry.entries() if e.function is not None}
    rules = {rule for rule in rules if rule[0] != "com.microsoft"}  # those are in test_microsoft.py
    assert not sorted(rules - covered)


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
