"""benchmarks/pruning.py on a few synthetic digits: all tables are written, and the goal is judged."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zoo.mnist_files import write_digits, write_idx

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "pruning.py"
sys.path.append(str(SCRIPT.parent))

import shifted  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_digits(tmp_path, 500, 300)
    return tmp_path


def run(*arguments: object, expected: int) -> str:
    result = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == expected, result.stderr
    return result.stdout + result.stderr


def test_quick_run(folder: Path, tmp_path: Path) -> None:
    picture, report = tmp_path / "curve.png", tmp_path / "report.md"
    options = ("--quick", "--workers", 1, "--models", "lenet_300_100", "--picture", picture, "--output", report)
    run("--data", folder, *options, expected=0)
    text = report.read_text()
    rows = {
        (cells[0], cells[1]): float(cells[2])
        for line in text.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5 and cells[1].endswith("x")
    }
    assert {("dense", "1.0x"), ("magnitude", "68.0x"), ("ssgd", "68.0x")} <= rows.keys()
    assert rows["dense", "1.0x"] < 5
    assert all(0 <= rows[method, "68.0x"] <= 100 for method in ("magnitude", "ssgd"))
    for wanted in (
        "Published on MNIST",
        "sparse_initializer",
        "it says nothing about the goal",
        "to 68x 12 + 6; dense 12 + 6",
    ):
        assert wanted in text
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_held_out_images_take_the_place_of_the_test_images(folder: Path) -> None:
    for path in folder.glob("t10k-labels*"):
        write_idx(path, np.full(300, 9, dtype=np.uint8))  # nine in ten of the test images have a wrong label
    options = ("--quick", "--workers", 1, "--models", "lenet_300_100", "--methods", "dense", "--held-out", 100)
    text = run("--data", folder, *options, expected=0)
    row = next(line for line in text.splitlines() if line.startswith("| dense") and "1.0x" in line)
    assert float(row.split("|")[3]) < 5
    assert "| ssgd" not in text
    assert "says nothing about the goal" in text


def test_results_in_the_log_are_not_computed_again(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options = ("--quick", "--workers", 1, "--models", "lenet_300_100", "--log", log, "--data", folder)
    first = run(*options, "--methods", "dense,magnitude", expected=0)
    assert "2 of 2" in first
    second = run(*options, "--methods", "magnitude,ssgd", expected=0)
    assert "1 of 1" in second
    assert len(log.read_text().splitlines()) == 3
    row = next(line for line in first.splitlines() if line.startswith("| magnitude"))
    assert row in second.splitlines()


def test_lenet_5_is_pruned_from_its_dense_training_which_is_kept(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options = ("--quick", "--workers", 1, "--models", "lenet5_caffe", "--log", log, "--data", folder)
    assert "2 of 2" in run(*options, "--methods", "ssgd", expected=0)
    assert len(list(tmp_path.glob("dense_*.onnx"))) == 1
    assert "1 of 1" in run(*options, "--methods", "magnitude", expected=0)
    next(tmp_path.glob("dense_*.onnx")).unlink()
    kept = [line for line in log.read_text().splitlines(keepends=True) if " magnitude " not in line.split("[")[0]]
    log.write_text("".join(kept))
    assert "2 of 2" in run(*options, "--methods", "dense,magnitude", expected=0)


def test_stages_of_one_training(folder: Path) -> None:
    import pruning

    stages = (pruning.Stage(5, 1, 1), pruning.Stage(20, 2, 0))
    recipe = replace(pruning.quick(pruning.RECIPES[0]), stages=stages, examples=200)
    task = pruning.Task(folder, recipe, "ssgd", 0, file=folder / "goal.onnx")
    found = pruning.run(task)
    assert [outcome.wanted for outcome in found] == [5, 20]
    assert np.allclose([outcome.compression for outcome in found], [5, 20], rtol=0.01)
    assert not task.file.exists()  # neither compression equals the goal's


def test_shifted_images_move_by_whole_pixels_and_differ_every_epoch() -> None:
    images = np.zeros((7, 1, 5, 5), np.float32)
    images[np.arange(7), 0, 2, 2] = np.arange(1, 8)
    source = shifted.ShiftedImages(images, np.arange(7), batch_size=3, reach=1, seed=0)
    places = []
    for _ in range(2):
        batches = list(source)
        assert [len(labels) for _, labels in batches] == [3, 3, 1]
        assert len(source) == 3
        moved, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        assert sorted(labels) == list(range(7))
        number, _, row, column = np.nonzero(moved)
        assert np.array_equal(number, np.arange(7))
        assert np.array_equal(moved.max(axis=(1, 2, 3)), labels + 1)
        assert row.min() >= 1
        assert row.max() <= 3
        assert column.min() >= 1
        assert column.max() <= 3
        places.append([labels.tolist(), row.tolist(), column.tolist()])
    assert places[0] != places[1]
    still = shifted.ShiftedImages(images, np.arange(7), batch_size=7, reach=0, seed=0)
    moved, labels = next(iter(still))
    assert np.array_equal(moved, images[labels])


def test_bad_arguments(folder: Path, tmp_path: Path) -> None:
    assert "there is no model resnet" in run("--data", folder, "--models", "resnet", expected=2)
    assert "there is no method lottery" in run("--data", folder, "--methods", "lottery", expected=2)
    (tmp_path / "empty").mkdir()
    assert "has neither t10k-images" in run("--data", tmp_path / "empty", expected=2)


def test_pruning_without_settings(folder: Path) -> None:
    text = run(
        "--data", folder, "--models", "lenet_300_100", "--methods", "default", "--seeds", 0, "--workers", 1, expected=0
    )
    (row,) = (line for line in text.splitlines() if line.startswith("| default"))
    assert row.split("|")[2].strip() == "68.0x"
    assert float(row.split("|")[3]) < 20
