"""The forty tasks of docs/coming_from.md run, here and in peers that are installed; the page has their counts."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

import coming_from
import onnxtrain
from coming_from_tasks import HERE, PEERS, TASKS

ROOT = Path(__file__).resolve().parent.parent
ALL = [task for group in TASKS.values() for task in group]
NEEDS = {"PyTorch": "torch", "Keras": "keras", "scikit-learn": "sklearn"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files that tasks read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(onnxtrain.examples.mlp((4, 16, 3)).SerializeToString())
    with (tmp_path / "data.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["a", "b", "c", "d", "kind"])
        for number, row in enumerate(np.random.default_rng(0).normal(size=(60, 4))):
            table.writerow([*row, ("low", "middle", "high")[number % 3]])
    shutil.copytree(ROOT / "examples" / "data" / "pictures", tmp_path / "pictures")


@pytest.mark.thorough
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.title)
def test_here(task, folder):
    if '"pictures"' in task.here:
        pytest.importorskip("PIL")
    exec(HERE + task.here, {})


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", [task for task in ALL if task.there and task.runs], ids=lambda task: task.title)
def test_there(task, folder):
    library = pytest.importorskip(NEEDS[task.peer])
    try:
        exec(PEERS[task.peer] + task.there, {})
    finally:
        if task.peer == "PyTorch":
            library.use_deterministic_algorithms(False)
            library.set_num_threads(1)


def test_there_are_forty_tasks():
    assert len({task.title for task in ALL}) == len(ALL) == 40
    assert {task.peer for task in ALL} <= PEERS.keys()
    assert all(task.there == "" for task in ALL if task.peer == "nobody")


def test_statements_are_counted_without_imports():
    assert coming_from.lines("import numpy as np\nfor a in range(3):\n    print(a)\nx = f(\n    1,\n)") == 3


def test_the_page_is_up_to_date():
    text = coming_from.PAGE.read_text()
    assert coming_from.page(text) == text, "run python tools/coming_from.py"
