"""Every rule against central differences, with all sizes known, only ranks known, and nothing known."""

from __future__ import annotations

import pytest

from autodiff.case import Case, all_rows
from autodiff.microsoft_rows import ROWS as MICROSOFT
from onnxtrain.autodiff import registry
from onnxtrain.runtime.testing import check_gradient

CASES = all_rows()
RUNS = [pytest.param(case, shapes, id=f"{case.name}-{shapes}") for case in CASES for shapes in case.shapes]


@pytest.mark.sampled("shapes")
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
    covered |= {(row.values[3], row.values[0]) for row in MICROSOFT}  # some of them are in ONNX's domain
    rules = {(e.domain, e.operator) for e in registry.entries() if e.function is not None}
    rules = {rule for rule in rules if rule[0] != "com.microsoft"}  # those are in test_microsoft.py
    assert not sorted(rules - covered)


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
