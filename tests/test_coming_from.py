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


@pytest.mark.torch
def test_optimizers_step_as_the_page_says():
    """AdamW without decay is PyTorch's Adam to rounding, with gradients as small as its epsilon; Adam is not."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32) * np.float32(1e-5)
    y = np.arange(20) % 3
    model = onnxtrain.examples.mlp((4, 3))
    weights = [
        torch.tensor(array, requires_grad=True) for array in onnxtrain.Trainer(model, loss="mse").get_weights().values()
    ]
    other = torch.optim.Adam(weights)
    ours = {
        name: onnxtrain.Trainer(model, loss="cross_entropy", optimizer=name)
        for name in ("adamw(weight_decay=0)", "adam")
    }
    for _ in range(5):
        other.zero_grad()
        logits = torch.from_numpy(x) @ (weights[0] if weights[0].shape[0] == 4 else weights[0].T) + weights[1]
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)).backward()
        other.step()
        for trainer in ours.values():
            trainer.train_step(x, y)
    expected = weights[0].detach().numpy()
    off = {name: np.abs(trainer.parameters["layer1.weight"] - expected).max() for name, trainer in ours.items()}
    assert off["adamw(weight_decay=0)"] < 2e-6
    assert off["adam"] > 1e-4
    assert onnxtrain.Adam().epsilon == onnxtrain.Adagrad().epsilon == 1e-6
    assert torch.optim.Adam(weights).defaults["eps"] == 1e-8
    assert torch.optim.Adagrad(weights).defaults["eps"] == 1e-10


@pytest.mark.torch
@pytest.mark.parametrize("text", ["exponential(0.9)", "step(1 epoch, 0.9)", "warmup(4)+linear", "warmup(4)+cosine"])
def test_schedules_are_those_of_the_page(text):
    torch = pytest.importorskip("torch")
    of, steps, per_epoch = torch.optim.lr_scheduler, 12, 3
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    if text.startswith("warmup"):
        inner = (
            of.LinearLR(optimizer, 1.0, 0.0, steps - 4)
            if "linear" in text
            else of.CosineAnnealingLR(optimizer, steps - 4)
        )
        theirs = of.SequentialLR(optimizer, [of.LinearLR(optimizer, 1 / 5, total_iters=4), inner], [4])
    else:
        theirs = of.ExponentialLR(optimizer, 0.9)
    ours = onnxtrain.schedules.resolve_schedule(text, 0.3, total_steps=steps, steps_per_epoch=per_epoch)
    for step in range(steps):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-5), step
        assert ours(step) > 0
        optimizer.step()
        if not text.startswith("step") or (step + 1) % per_epoch == 0:
            theirs.step()
