"""The figures of docs/pruning.md: each exists, is small, and shows the rows that the pages of benchmarks have now."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from pruned_models import run

import onnxtrain
from onnxtrain.cli import main

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = ROOT / "benchmarks" / "pages"
sys.path.append(str(ROOT / "benchmarks"))

import draw_sparse  # noqa: E402

COMMAND = "run python benchmarks/draw_sparse.py"


@pytest.mark.parametrize("name", draw_sparse.FIGURES)
def test_the_file_shows_the_tables_of_today(name):
    file = (DOCS / "pictures" / name).read_bytes()
    assert file.startswith(b"\x89PNG")
    assert len(file) < 40_000
    read, _ = draw_sparse.FIGURES[name]
    assert draw_sparse.checksum(read(PAGES)).encode() in file, f"a table changed since the figure was drawn: {COMMAND}"


def test_the_page_shows_the_figures_and_no_others():
    named = re.findall(r"!\[[^]]+\]\(pictures/([^)]+)\)", (DOCS / "pruning.md").read_text())
    assert named == list(draw_sparse.FIGURES)


def times(column: str) -> dict[str, float]:
    """Times dense float32 of the rows of the figure, by model, zeros and form."""
    (rows,) = draw_sparse.speed_rows().values()
    return {row["model"]: draw_sparse.number(row[column]) for row in rows}


def test_the_first_screen_says_what_to_do_with_the_figures_of_the_table():
    screen = (DOCS / "pruning.md").read_text().split("\n\n```")[0]
    steps = re.findall(r"^- (.+?)$(?!\n  )", screen, re.MULTILINE | re.DOTALL)
    assert [step[2:].split("**")[0] for step in steps] == [
        "Faster with our library",
        "Faster without our library",
        "Without pruning",
    ]
    for step, word in zip(steps, ("onnxtrain sparsify", 'prune(structure="channels"', "int8"), strict=True):
        assert word in step
        assert len(re.findall(r"\.(\s|$)", step)) == 1, "one sentence"
    for model in ("BERT-base layer, 128 tokens", "ResNet-18, 224 px"):
        for form in ("1x1", "4x1"):
            assert f"{times('sparse')[f'{model}, 90%, {form}']:.2f}" in steps[0]
    int8 = times("dense int8").values()
    assert f"{min(int8):.2f} to {max(int8):.2f}" in steps[2]


@pytest.mark.thorough  # it trains and takes timings
def test_the_commands_of_the_first_screen_prune_each_layer_in_blocks_and_compile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = onnxtrain.examples.mlp((64, 256, 8))
    onnx.save(model, "model.onnx")
    y = np.arange(160) % 8
    x = np.random.default_rng(0).normal(size=(160, 64)).astype(np.float32)
    x[np.arange(160), y] += 4
    np.savez("train.npz", **{model.graph.input[0].name: x, "label": y})
    block = (DOCS / "pruning.md").read_text().split("```sh\n")[1].split("```")[0]
    for command in block.replace("\\\n", " ").splitlines():
        assert main(command.split()[1:]) == 0
    for tensor in onnx.load("pruned.onnx").graph.initializer:
        weight = numpy_helper.to_array(tensor)
        if weight.ndim == 2:
            assert np.mean(weight == 0) == pytest.approx(0.9, abs=0.01)
            kept = (weight != 0).reshape(-1, 4, weight.shape[1])
            assert (kept.any(axis=1) == kept.all(axis=1)).all()
    name = model.graph.input[0].name
    dense, fast = run("pruned.onnx", {name: x}), run("fast.onnx", {name: x}, kernels=True)
    np.testing.assert_allclose(fast, dense, rtol=1e-4, atol=1e-4)


def test_the_comparisons_of_the_page_hold_in_the_table():
    sparse, int8 = times("sparse"), times("dense int8")
    single = {model: speed for model, speed in sparse.items() if model.endswith("1x1") and "16x1" not in model}
    assert all(sparse[model.replace("1x1", "4x1")] > speed for model, speed in single.items())
    slower = ["BERT-base layer, 128 tokens, 80%, 1x1", "768 x 768, batch 32, 90%, 1x1"]
    assert [model for model, speed in single.items() if speed < int8[model]] == slower
    assert all(sparse[model] > int8[model] for model in sparse if re.search(r"9\d%, 4x1", model))
    errors = draw_sparse.forms_rows()["int8"]
    assert all(float(row["dense int8, error, %"]) - float(row["dense float32, error, %"]) < 0.1 for row in errors)


def test_the_script_reads_every_row_that_it_draws():
    forms = draw_sparse.forms_rows()
    assert list(forms) == ["int8", "LeNet-300-100", "LeNet-5", "ResNet"]
    for model, rows in list(forms.items())[1:]:
        assert {row["form"] for row in rows} == {"single", "4x1", "16x1", "1x4", "channels", "2:4"}, model
    (speed,) = draw_sparse.speed_rows().values()
    assert {row["model"].split(",")[0] for row in speed} == {"BERT-base layer", "768 x 768", "ResNet-18"}
    assert all(draw_sparse.number(row[column]) > 0 for row in speed for column in ("sparse", "dense int8"))
    assert {library: len(rows) for library, rows in draw_sparse.structure_rows().items()} == {
        "torchvision": 19,
        "timm": 10,
        "transformers": 12,
    }


@pytest.mark.parametrize(
    ("page", "name"),
    [("sparse_forms.md", "sparse_forms.png"), ("sparse.md", "sparse_speed.png"), ("structures.md", "structures.png")],
)
def test_a_page_without_its_table_is_an_error(page, name, tmp_path):
    shutil.copytree(PAGES, tmp_path / "pages")
    path = tmp_path / "pages" / page
    path.write_text(path.read_text().replace("| model |", "| name |").replace("| architecture |", "| name |"))
    with pytest.raises(SystemExit, match=rf"{page} has no table '\| "):
        draw_sparse.FIGURES[name][0](tmp_path / "pages")


@pytest.mark.thorough  # it imports matplotlib
def test_the_figures_are_drawn_from_the_pages(tmp_path):
    pytest.importorskip("matplotlib")
    draw_sparse.draw(tmp_path)
    for name, (read, _) in draw_sparse.FIGURES.items():
        assert draw_sparse.checksum(read(PAGES)).encode() in (tmp_path / name).read_bytes()
