"""ONNX's own node tests as gradient checks: a sample here, all with the slow marker; and checks of the tables."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import operators_page
from autodiff.case import all_rows
from autodiff.sweep import tables as sweep_tables
from autodiff.sweep.run import run, run_second_order, second_order_subject, sweep, usable_tests
from autodiff.sweep.subjects import Subject, node_tests, own_opset, refusal, subject_at, subjects
from onnxtrain.autodiff import registry
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN

DOCS = Path(__file__).parents[3] / "docs"
DIFFERENTIABLE = [name for name in operators_page.standard_operators() if operators_page.differentiated_by(name)]
VARIANTS = ("unknown", "static", "dynamic")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of infinities on the way through the reference evaluator
        yield


@functools.cache
def rows() -> frozenset[tuple[str, str]]:
    return frozenset(operator for case in all_rows() for operator in case.operators)


@pytest.mark.parametrize("operator", DIFFERENTIABLE)
def test_one_of_onnx_tests_of_every_operator(operator: str) -> None:
    subject = next((subject for test in usable_tests(operator) for subject in subjects(test)), None)
    if subject is None:
        assert ("", operator) in rows(), "neither ONNX nor our tables have a case"
        return
    outcome = run(subject, VARIANTS[len(operator) % 3])
    assert not outcome.failure
    assert outcome.excuse or outcome.worst < 0.02


@pytest.mark.parametrize("operator", ["Attention", "Conv", "GRU", "LayerNormalization", "MatMul", "Relu", "Softmax"])
def test_gradient_of_a_gradient(operator: str) -> None:
    assert not run_second_order(second_order_subject(operator)).failure


@pytest.mark.slow
@pytest.mark.parametrize("operator", DIFFERENTIABLE)
def test_all_of_onnx_tests(operator: str) -> None:
    outcomes = sweep(operator)
    assert not [outcome for outcome in outcomes if outcome.failure]
    for test in usable_tests(operator):
        # A rule may need the rank or constants, but not always.
        found = [outcome for outcome in outcomes if outcome.test == test.name]
        assert not found or any(outcome.excuse not in ("rank", "constants") for outcome in found), test.name


def test_a_wrong_gradient_is_found() -> None:
    subject = _subject("tanh")
    cut = subject.model.graph.node[0]
    assert not run(subject, "static").failure
    entry = registry.find("Tanh", "", 18)
    assert entry is not None
    wrong = entry._replace(function=lambda node, dy: dy * node.y)
    known = registry._rules._entries["", "Tanh"]
    known[known.index(entry)] = wrong
    try:
        assert "but central differences give" in run(subject, "static").failure
    finally:
        known[known.index(wrong)] = entry
    assert cut.op_type == "Tanh"


def test_the_suite_is_the_one_that_was_meant() -> None:
    usable = [test for test in node_tests() if refusal(test) is None]
    assert len(usable) > 750
    assert len({test.operator for test in usable}) > 115


def test_every_rule_has_a_case() -> None:
    rules = {(e.domain, e.operator) for e in registry.entries() if e.function is not None}
    # ONNX Runtime's own and those of ai.onnx.ml are in test_microsoft.py; one of them is in ONNX's domain.
    others = ("com.microsoft", "ai.onnx.ml")
    rules = {rule for rule in rules if rule[0] not in others} - {("", "SimplifiedLayerNormalization")}
    swept = {("", test.operator) for test in node_tests() if refusal(test) is None}
    assert not sorted(rules - swept - rows())


# The preparation of subjects.


def _subject(name: str, opset: int | None = None) -> Subject:
    test = next(test for test in node_tests() if test.name == name)
    subject = subject_at(test, own_opset(test) if opset is None else opset)
    assert subject is not None
    return subject


def test_older_tests_are_upgraded_and_newer_ones_declared_older() -> None:
    assert _subject("tanh").opset == 18
    assert _subject("tanh").model.opset_import[0].version == 18
    newest = next(test for test in node_tests() if test.model.opset_import[0].version > 26 and refusal(test) is None)
    assert own_opset(newest) == 26


def test_what_changed_after_the_newest_opset_is_left_out() -> None:
    test = next(test for test in node_tests() if test.name == "mod_float32_mixed_sign_fmod_0")
    assert not list(subjects(test))


def test_sequences_become_tensors() -> None:
    subject = _subject("split_to_sequence_2")
    assert {node.op_type for node in subject.model.graph.node} == {"SplitToSequence", "Constant", "SequenceAt"}
    assert all(isinstance(array, np.ndarray) for array in subject.expected.values())
    subject = _subject("identity_sequence")
    assert subject.model.graph.node[0].op_type == "SequenceConstruct"
    assert len(subject.wrt) == len(subject.feeds) > 0


def test_optionals_become_tensors() -> None:
    subject = _subject("optional_get_element_optional_tensor")
    assert [node.op_type for node in subject.model.graph.node] == ["Optional", "OptionalGetElement"]
    assert len(subject.wrt) == 1


def test_integers_become_constants() -> None:
    subject = _subject("gather_0")
    constant = subject.with_constants()
    assert subject.has_integers
    assert not constant.has_integers
    assert [tensor.name for tensor in constant.model.graph.initializer] == ["indices"]


def test_moved_inputs_stay_near_and_are_the_same_again() -> None:
    test = next(test for test in node_tests() if test.name == "relu")
    first, second = _subject("relu"), _subject("relu")
    assert first.moved
    np.testing.assert_array_equal(first.feeds["x"], second.feeds["x"])
    difference = first.feeds["x"] - test.inputs[0]
    assert 0.04 < difference.min() <= difference.max() < 0.11


def test_configuration_is_not_differentiated() -> None:
    assert "scales" not in _subject("resize_upsample_scales_nearest").wrt


# The tables and the documents.


@pytest.mark.parametrize(
    "table", [sweep_tables.SKIPPED, sweep_tables.REPLACED, sweep_tables.BY_RUNTIME, sweep_tables.NOT_BY_RUNTIME]
)
def test_patterns_match_tests_and_have_reasons(table: dict[str, str]) -> None:
    for pattern, reason in table.items():
        assert any(re.fullmatch(pattern, test.name) for test in node_tests()), pattern
        assert len(reason) > 10


def test_moves_match_tests_and_name_their_inputs() -> None:
    for pattern, move in sweep_tables.MOVED.items():
        found = [test for test in node_tests() if re.fullmatch(pattern, test.name)]
        names = {info.name for test in found for info in test.model.graph.input}
        assert found, pattern
        assert set(move.inputs) <= names
        assert move.low < move.high


def test_operators_of_the_tables_exist() -> None:
    known = set(operators_page.standard_operators()) | {"Upsample"}
    listed = [operator for operator, _ in (*sweep_tables.CONFIGURATION, *sweep_tables.SILENT)]
    assert {*listed, *sweep_tables.SINGLE, *sweep_tables.NOT_TWICE} <= known


def test_the_document_has_every_operator() -> None:
    text = (DOCS / "operators.md").read_text(encoding="utf-8")
    for entry in registry.entries():
        if entry.domain != ONNXTRAIN_DOMAIN:  # those have a page of their own
            listed = f"`{entry.operator}`" in text or f"`{entry.domain}::{entry.operator}`" in text
            assert listed, f"{entry.operator} is not in docs/operators.md; write it again"
    table = text.partition("\n## Of other domains\n")[0].splitlines()
    for operator in DIFFERENTIABLE:
        (row,) = [line for line in table if line.startswith(f"| `{operator}` | ")]
        way = operators_page.differentiated_by(operator)
        assert way == "rule" or way in row
    assert operators_page.no_gradient_table() in text


def test_the_conventions_list_what_has_no_gradient() -> None:
    text = (DOCS / "conventions.md").read_text(encoding="utf-8")
    assert operators_page.with_generated_part(text) == text
