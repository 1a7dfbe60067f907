"""benchmarks/sparse_forms.py on a few synthetic digits: a run, the choice of the finals, the CSV file, the tables."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zoo.mnist_files import write_digits

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "sparse_forms.py"
sys.path.append(str(SCRIPT.parent))

import sparse_forms as forms  # noqa: E402


def row_of(run: forms.Run, sparsity: float, error: float) -> forms.Row:
    values = {name: getattr(run, name) for name in forms.Run.__dataclass_fields__}
    return forms.Row(
        **values, sparsity=sparsity, zeros=sparsity, multiplications=0.2, error=error, dense_error=1.0, seconds=1.0
    )


@pytest.mark.parametrize("form", ["4x1", "channels", "2:4"])
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(forms, "HELD_OUT", 200)
    write_digits(tmp_path, 500, 300)
    run = forms.Run("screen", "mlp", form, "gradual", "uniform" if form != "2:4" else "global", 0.05, 0)
    forms.train_dense(tmp_path, ("screen", "mlp", 0), tmp_path, None)
    rows = forms.prune(tmp_path, run, tmp_path, None)
    assert [row.sparsity for row in rows] == list(run.stages())
    for row in rows:
        assert row.run() == run
        assert row.zeros == pytest.approx(row.sparsity, abs=0.02)
        assert row.multiplications == pytest.approx(1 - row.zeros, abs=0.02)  # of a model without convolutions
        assert row.dense_error < 20
    forms.append(tmp_path / "rows.csv", rows[:1])
    forms.append(tmp_path / "rows.csv", rows[1:])
    assert forms.read(tmp_path / "rows.csv") == rows
    assert f"| {form} |" in forms.tables(rows)


@pytest.mark.parametrize("name", ["vit", "text", "table"])
def test_models_of_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(forms, "HELD_OUT", 200)
    write_digits(tmp_path, 500, 300)
    forms.train_dense(tmp_path, ("screen", name, 0), tmp_path, 200)
    run = forms.Run("screen", name, "4x1", "ssgd", "uniform", 1e-3, 0)
    rows = forms.prune(tmp_path, run, tmp_path, 200)
    assert [row.zeros for row in rows] == pytest.approx([0.8, 0.9, 0.95], abs=0.03)
    assert all(0 <= row.error < 100 for row in rows)


def test_the_table_of_dense_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "HELD_OUT", 100)
    write_digits(tmp_path, 500, 300)
    header, _, row = forms.int8_table(tmp_path, ["mlp"], None)
    assert header.count("|") == row.count("|")
    name, *errors = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "mlp"
    assert all(float(error) < 20 for error in errors)


def test_the_finals_are_the_best_of_the_screening() -> None:
    runs = forms.screening(["mlp"])
    assert len(runs) == len(set(runs)) == 2 * 3 * (5 * 3 + 1)
    rows = [row_of(run, sparsity, 10.0) for run in runs for sparsity in run.stages()]
    assert not forms.finals(["mlp"], rows[:-1])
    best = {form: next(run for run in runs if run.form == form and run.method == "gradual") for form in forms.FORMS}
    rows = [replace(row, error=5.0) if row.run() in best.values() else row for row in rows]
    chosen = forms.finals(["mlp"], rows)
    assert {replace(run, phase="screen", seed=0) for run in chosen} >= set(best.values())
    assert len(chosen) == 5 * (len(forms.FORMS) + 2)  # and single zeros by the two other methods
