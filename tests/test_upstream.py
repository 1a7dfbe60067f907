"""docs/upstream.md has a row for every open entry of the registry of upstream bugs; the programs of its reports run."""

from __future__ import annotations

import subprocess
import sys

import onnx
import pytest

import upstream_page
from onnxtrain.graph.upstream.book import BOOK


def test_the_page_is_up_to_date():
    text = upstream_page.PAGE.read_text()
    assert text == upstream_page.page(text), "run python tools/upstream_page.py"


def test_no_open_entry_is_missing_and_no_closed_one_is_there():
    text = upstream_page.PAGE.read_text()
    for entry in BOOK:
        section = text.partition(f"## Bugs of {entry.package}\n")[2].partition("\n## ")[0]
        assert (f"\n| {entry.name} | " in section) == (entry.gone is None), entry.name
        assert entry.package in upstream_page.LINKS


def test_a_row_says_versions_symptom_and_workaround():
    text = upstream_page.PAGE.read_text()
    for entry in upstream_page.open_entries():
        oldest, newest = entry.seen
        cells = [entry.name, newest if oldest == newest else f"{oldest} to {newest}", entry.wrong, entry.done]
        assert f"\n| {' | '.join(cells)} |\n" in text
        assert not any("|" in cell for cell in cells)


def test_the_tool_prints_a_report_that_is_ready_to_send(capsys):
    upstream_page.main(["evaluated Scan"])
    printed = capsys.readouterr().out
    assert printed.startswith("# onnx: evaluated Scan\n\nTo report at https://github.com/onnx/onnx/issues.\n")
    assert printed.count("```") == 2
    assert 'print("present" if ' in printed
    with pytest.raises(SystemExit, match=r"No open bug is named 'evaluated Scam'; there are .*evaluated Scan"):
        upstream_page.main(["evaluated Scam"])


def test_every_open_entry_has_a_report():
    for entry in upstream_page.open_entries():
        assert upstream_page.report(entry).count("```") in (2, 4), entry.name


@pytest.mark.parametrize(
    "name",
    [
        "evaluated Scan",
        *(
            pytest.param(n, marks=pytest.mark.thorough)
            for n in ("the matrix of Attention", "merged outputs", "eliminated dropout")
        ),
    ],
)
def test_a_program_shows_its_bug_without_this_project(name):
    program = upstream_page.script(name)
    assert "onnxtrain" not in program
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=True)
    assert done.stdout == "present\n"


def test_programs_need_neither_this_project_nor_pytest():
    for entry in upstream_page.open_entries():
        if entry.package != "onnxruntime-web":
            program = upstream_page.script(entry.name)
            assert "import pytest" not in program, entry.name
            assert "import onnxtrain" not in program or entry.name == "quantized biases"  # a kernel of another domain
            assert "from onnxtrain" not in program, entry.name


def test_every_program_compiles():
    for entry in upstream_page.open_entries():
        if entry.package != "onnxruntime-web":
            compile(upstream_page.script(entry.name), entry.name, "exec")
        else:
            compile(upstream_page.browser_model(entry.name), entry.name, "exec")


def test_the_models_for_browsers_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for entry in upstream_page.open_entries():
        if entry.package == "onnxruntime-web":
            exec(upstream_page.browser_model(entry.name), {})
            onnx.checker.check_model("model.onnx", full_check=True)
            assert "SIZE" not in upstream_page.browser_script(entry.name)
