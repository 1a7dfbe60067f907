"""The harness detects every kind of outcome and keeps the files of a failure."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from reliability.crafted import CRAFTED
from reliability.outcome import KINDS, Outcome, counts_table, worst
from reliability.plain import compare_with_plain
from reliability.run import replace_table
from reliability.runner import run_cases
from reliability.subject_selftest import OUTCOMES
from reliability.subjects import SUBJECTS


@pytest.mark.reliability
def test_every_outcome_is_reported(tmp_path):
    report = run_cases("selftest", range(len(OUTCOMES)), failures=tmp_path, computing_limit=4.0)
    assert report.counts == Counter(OUTCOMES)
    causes = {cause: [index for index, _ in found] for cause, found in report.failures.items()}
    assert causes.pop("wrong in work: mixed") == [3]
    assert sorted(index for indices in causes.values() for index in indices) == [2, 4, 5, 6, 7, 8]
    assert "KeyError: 'x'" in report.text()
    assert (tmp_path / "selftest-0-5" / "input").read_text() == "5"
    assert "SIGABRT" in (tmp_path / "selftest-0-5" / "outcome.txt").read_text()


def test_a_repeated_case_has_the_same_outcome():
    first, second = (run_cases("models", range(5), seed=3).counts for _ in range(2))
    assert first == second


def test_the_worst_operation_counts():
    outcomes = [Outcome("ok"), Outcome("hang"), Outcome("refused")]
    assert worst(outcomes).kind == "hang"
    assert worst([]).kind == "ok"


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("the smallest integer by -1", "crash", "runtime"),  # it divides so while it loads
        ("strides of zero", "crash", "crash"),
        ("strides of zero", "hang", "hang"),
        ("strides of zero", "memory", "memory"),
    ],
)
def test_failures_of_plain_onnxruntime_are_reported_as_such(name, kind, expected, tmp_path):
    CRAFTED[name](tmp_path)
    assert compare_with_plain(Outcome(kind, detail=str(8 << 30)), tmp_path).kind == expected


def test_the_page_keeps_its_text_around_the_table():
    page = "before\n<!-- counts -->\n\n| new |\n\n<!-- end of counts -->\nafter\n"
    empty = page.replace("\n| new |\n\n", "")
    assert replace_table(page, "| new |") == replace_table(empty, "| new |") == page
    rows = page.replace("| new |", "| data | 1 |\n| models | 2 |")
    assert replace_table(rows, "| models | 3 |\n| flags | 4 |") == rows.replace(
        "| models | 2 |", "| models | 3 |\n| flags | 4 |"
    )
    with pytest.raises(SystemExit, match="no marks"):
        replace_table("no table", "| new |")


def test_the_docs_list_every_subject_and_outcome():
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert replace_table(page, "| new |") != page
    for word in (*SUBJECTS, *KINDS):
        assert f"`{word}`" in page


def test_the_table_has_a_column_for_each_kind():
    text = counts_table({"models": Counter(ok=3, crash=1)}, {"models": 2.0})
    assert text.splitlines()[0].split(" | ")[3:] == [*list(KINDS)[:-1], list(KINDS)[-1] + " |"]
    assert text.splitlines()[-1] == "| models | 4 | 2.0 | 3 | 0 | 0 | 0 | 0 | 0 | 0 | 1 |"
