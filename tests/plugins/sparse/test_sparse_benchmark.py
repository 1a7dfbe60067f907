"""benchmarks/sparse_models.py: its roofline, its short run, and the page that shows its table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))

import sparse_models as benchmark  # noqa: E402

import onnxtrain  # noqa: E402


def test_the_roofline_counts_windows_and_rows():
    case = benchmark.lenet5(2)
    weights = [
        numpy_helper.to_array(tensor)
        for tensor in case.model.graph.initializer
        if len(tensor.dims) > 1 or tensor.dims[0] > 500
    ]
    left = sum(np.count_nonzero(weight) for weight in weights)
    assert left == pytest.approx(430_500 / 280, rel=0.1)
    every, remaining, size = benchmark.roofline(case.model, case.model)
    assert every == 2 * (500 * 24 * 24 + 25_000 * 8 * 8 + 400_000 + 5_000)
    convolutions = [np.count_nonzero(weight) for weight in weights if weight.ndim == 4]
    windows = 24 * 24 * convolutions[0] + 8 * 8 * convolutions[1]
    assert remaining == 2 * (windows + left - sum(convolutions))
    assert size == 4 * (430_500 + 20 + 50 + 500 + 10)


def test_a_pruned_file_keeps_its_weights_and_its_multiply_adds_are_counted(tmp_path):
    model = onnxtrain.examples.lenet_300_100()
    kept = 0
    for tensor in model.graph.initializer:
        if len(tensor.dims) > 1:
            weight = numpy_helper.to_array(tensor) * (np.arange(np.prod(tensor.dims)) % 50 == 0).reshape(tensor.dims)
            kept += np.count_nonzero(weight)
            tensor.CopyFrom(numpy_helper.from_array(weight.astype(np.float32), tensor.name))
    onnx.save(model, tmp_path / "pruned.onnx")
    case = benchmark.pruned_file(tmp_path / "pruned.onnx", 8)
    assert (case.name, case.shape[0]) == ("pruned, 50x, own weights, batch 8", 8)
    assert benchmark.roofline(case.model, case.model)[:2] == (8 * 266_200, 8 * kept)


@pytest.mark.parametrize("name", list(benchmark.CASES))
def test_the_models_are_valid_and_pruned_as_their_names_say(name):
    case = next(benchmark.CASES[name]())
    onnx.checker.check_model(case.model)
    every, remaining, _ = benchmark.roofline(case.model, case.model)
    assert every / remaining > 4


@pytest.mark.thorough  # it takes timings
def test_the_short_run_prints_a_row_of_each_column():
    command = [sys.executable, str(ROOT / "benchmarks" / "sparse_models.py"), "--quick"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    header, rule, *rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert (header, rule) == benchmark.HEADER
    assert len(rows) == 6
    assert {row.count("|") for row in rows} == {header.count("|")}
    assert "Instruction sets: " in printed


def test_the_page_shows_the_columns_that_the_benchmark_prints():
    page = (ROOT / "benchmarks" / "pages" / "sparse.md").read_text().splitlines()
    start = page.index(benchmark.HEADER[0])
    assert page[start + 1] == benchmark.HEADER[1]
    assert page[start + 2].startswith("| ")


@pytest.mark.thorough  # it takes timings
def test_the_products_under_masks_have_a_row():
    command = [sys.executable, "masked_step.py", "--layers", "--quick", "--turns", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT / "benchmarks")
    assert "| 16 x 768, 768 x 768 | 95%, 4x1 |" in done.stdout
