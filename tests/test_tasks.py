"""The everyday tasks of the benchmark: ours run, reach what they should, and take no more lines than the peers'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import compare_tasks  # noqa: E402

REACHES = {
    "classification": {"accuracy": 0.9},
    "regression": {"r2": 0.45},
    "sample_weights": {"accuracy": 0.88, "auc": 0.98},
    "multi_label": {"accuracy": 0.77, "f1": 0.65},
    "early_stopping": {"accuracy": 0.86},
    "grid_search": {"accuracy": 0.93},
    "transfer": {"head": 0.85, "whole": 0.88},
    "sentences": {"accuracy": 0.9},
    "next_token": {},
    "two_outputs": {"accuracy": 0.85},
    "distillation": {"teacher": 0.87, "student": 0.78},
    "moving_average": {"accuracy": 0.87},
}
NEEDS = {"classification": "pandas", "regression": "pandas", "sentences": "transformers", "next_token": "transformers"}


def test_every_task_is_here():
    folders = {path.parent.name for path in compare_tasks.TASKS.glob("*/ours.py")}
    assert folders == set(REACHES)


@pytest.mark.parametrize("task", REACHES)
def test_ours_takes_no_more_lines_than_the_peer_s(task):
    (peer,) = (compare_tasks.TASKS / task).glob("with_*.py")
    assert compare_tasks.line_count(compare_tasks.TASKS / task / "ours.py") <= compare_tasks.line_count(peer)


@pytest.mark.thorough
@pytest.mark.parametrize("task", REACHES)
def test_ours_reaches_what_it_should(task):
    pytest.importorskip("sklearn")
    pytest.importorskip(NEEDS.get(task, "sklearn"), reason=f"needs {NEEDS.get(task)}")
    found = compare_tasks.results(compare_tasks.TASKS / task / "ours.py", sys.executable)
    for name, least in REACHES[task].items():
        assert found[name] >= least, (name, found)
    if task == "early_stopping":
        assert found["loss"] == pytest.approx(found["best"], rel=1e-5)  # the best weights are back
    if task == "next_token":
        assert found["perplexity"] < 4  # of 30 tokens


def test_lines_are_counted_without_comments_and_docstrings(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('"""One.\n\nTwo.\n"""\n\nimport os\n\n# three\nprint(\n    os.sep\n)  # four\n')
    assert compare_tasks.line_count(script) == 4


def test_results_agree_where_they_are_close():
    assert compare_tasks.agree({"accuracy": 0.9, "loss": 0.5}, {"accuracy": 0.95, "loss": 0.6})
    assert not compare_tasks.agree({"accuracy": 0.9}, {"accuracy": 0.8})
    assert not compare_tasks.agree({"accuracy": 0.9}, {"f1": 0.9})


def test_a_script_that_fails_says_why(tmp_path):
    (tmp_path / "broken.py").write_text('"""Broken."""\nraise ValueError("no data")\n')
    with pytest.raises(RuntimeError, match=r"(?s)broken\.py failed: .*ValueError: no data"):
        compare_tasks.results(tmp_path / "broken.py", sys.executable)


NOTEBOOK = """
import numpy as np
import onnxtrain
x = np.eye(4, dtype=np.float32)[np.arange(40) % 4]
trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="cross_entropy")
history = trainer.fit(x, np.arange(40) % 3, validation=0.25, metrics="accuracy", epochs=3)
history
"""


@pytest.mark.thorough
def test_a_notebook_shows_the_training(tmp_path):
    """nbconvert runs it; what is left in the notebook is the table of the epochs and the curves, and no bar."""
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    pytest.importorskip("nbconvert", reason="needs nbconvert")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK.strip())])
    nbformat.write(book, tmp_path / "book.ipynb")
    command = [
        sys.executable,
        "-m",
        "nbconvert",
        "--to",
        "notebook",
        "--execute",
        "--output",
        "run.ipynb",
        "book.ipynb",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (cell,) = nbformat.read(tmp_path / "run.ipynb", 4).cells
    shown = ["".join(output["data"]["text/html"]) for output in cell.outputs if "text/html" in output.get("data", {})]
    assert not [output for output in cell.outputs if output.output_type == "stream"]
    progress, history = shown
    assert "<progress" not in progress
    assert "3 epochs, 3 steps" in progress
    assert progress.count("<tr>") == history.count("<tr>") == 1 + 3
    assert history.startswith("<svg")
