"""The README and the documentation: their Python runs, their command lines parse, their links lead somewhere."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from onnxtrain.autodiff import registry
from onnxtrain.cli import main
from onnxtrain.cli.app import COMMANDS, build
from onnxtrain.operators import OPTIMIZERS

ROOT = Path(__file__).parent.parent
FOLDERS = ("examples/*.md", "docs/**/*.md", "benchmarks/pages/*.md")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for part in FOLDERS for page in ROOT.glob(part))])
COMPARISON = ROOT / "docs" / "coming_from.md"
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[list[str]]:
    """The lines that call onnxtrain, as arguments."""
    found = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part)
                if words and Path(words[0]).name == "onnxtrain":
                    found.append(words[1:])
    return found


def programs() -> list[Any]:
    """Every block of Python with its page and number; those that need PyTorch take seconds."""
    found = []
    for page in PAGES:
        if page.parent.name == "operators":  # generated pages: what they show are rules, not programs
            continue
        for number, block in enumerate(blocks(page, "python"), 1):
            marks = [pytest.mark.torch, pytest.mark.thorough] if "import torch" in block else []
            found.append(pytest.param(page, block, id=f"{name(page)}-{number}", marks=marks))
    return found


@pytest.mark.parametrize(("page", "block"), programs())
def test_a_block_runs_alone(page, block, tmp_path, monkeypatch):
    """Whoever copies a block has a whole program."""
    for package in re.findall(
        r"^(?:import|from) (torch|transformers|sklearn|flwr|soundfile|pyarrow|pandas|PIL)", block, re.MULTILINE
    ):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    try:
        with warnings.catch_warnings():
            if "import torch" in block:
                warnings.simplefilter("ignore")  # the exporter's own
            exec(compile(block, name(page), "exec"), {"__name__": "example"})
    finally:
        registry.unregister_gradient("SquaredRelu", "my.domain")


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_command_lines_parse(page):
    app = build()
    for arguments in commands(page):
        if "--config" in arguments:  # which has what every training needs
            arguments = [*arguments, "--data", "train.npz", "--loss", "softmax_cross_entropy"]
            arguments.insert(1, "model.onnx")
        app.parse_args(arguments, exit_on_error=False, print_error=False)


@pytest.mark.thorough
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "transfer_learning.md"], ids=name)
def test_commands_with_files_of_the_repository_run(page, tmp_path, monkeypatch):
    """The first two programs of the README train models that generalize to held-out data."""
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "examples" / "data")
    first, second = [arguments for arguments in commands(page) if "examples/data" in " ".join(arguments)]
    for arguments in (first, second):
        assert main(arguments) == 0
        assert (tmp_path / arguments[arguments.index("--output") + 1]).is_file()
        if "--run" in arguments:
            run = tmp_path / arguments[arguments.index("--run") + 1]
            assert "<html" in (run / "report.html").read_text()
            with (run / "metrics.csv").open() as file:
                *_, last = csv.DictReader(file)
            assert float(last["val_accuracy"]) > 0.85


def test_readme_is_one_screen_and_says_nothing_twice():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 650
    assert text.count("](") <= 22
    lines = [line for line in text.splitlines() if line and not line.startswith("```")]
    assert len(lines) <= 70
    assert len(set(lines)) == len(lines)


def test_readme_shows_the_two_commands():
    first, second = blocks(ROOT / "README.md", "sh")[:2]
    assert first.rstrip().endswith('pip install ".[demo]" && .venv/bin/onnxtrain demo')
    assert second.rstrip() == 'python3 -m venv .venv && .venv/bin/pip install ".[test]" && .venv/bin/pytest -n 2'


def test_readme_example_has_ten_lines_at_most():
    lines = [line for line in blocks(ROOT / "README.md", "python")[0].splitlines() if line.strip()]
    assert len(lines) <= 10


def test_the_comparison_counts_the_rules():
    claimed = re.search(r"more than (\d+) by rule", COMPARISON.read_text())
    assert claimed
    ruled = {entry.operator for entry in registry.entries() if entry.function is not None and entry.domain == ""}
    assert len(ruled) > int(claimed[1])


def test_pages_lead_to_the_table_of_all_optimizers():
    table = (ROOT / "docs" / "operators" / "index.md").read_text()
    assert all(f"[{optimizer}]" in table for optimizer in OPTIMIZERS)
    explained = (ROOT / "docs" / "training.md").read_text().partition("\n## Optimizers\n")[2].partition("\n## ")[0]
    compared = [line for line in COMPARISON.read_text().splitlines() if "`AdamW`, `SGD`" in line]
    compared += [line for line in COMPARISON.read_text().splitlines() if line.startswith("| optimizers |")]
    assert [text for text in (explained, *compared) if "](operators/index.md)" not in text] == []
    assert len(compared) >= 2


def test_every_command_is_documented():
    text = (ROOT / "docs" / "command_line.md").read_text()
    assert all(f"| `{command}` |" in text for command in COMMANDS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_anchors_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*\.md|)#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_the_comparison_counts_rules():
    ruled = {(entry.domain, entry.operator) for entry in registry.entries() if entry.function is not None}
    (promised,) = re.findall(r"more than (\d+) by rule", COMPARISON.read_text())
    assert int(promised) < len([operator for domain, operator in ruled if not domain])


def test_pages_agree_on_the_bytes_of_a_parameter_of_adam():
    own = (ROOT / "docs" / "language_models.md").read_text()
    assert "12 bytes a parameter" in own
    assert "16 bytes" in own
    text = (ROOT / "docs" / "training.md").read_text()
    assert "needs 12 bytes for each trained parameter" in text
    assert "4 bytes more" in text


def test_architecture_lists_every_part():
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = [path.parent.name for path in (ROOT / "src" / "onnxtrain").glob("*/__init__.py")]
    missing = [package for package in packages if f"`{package}/" not in text]
    assert not missing
