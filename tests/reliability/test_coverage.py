"""Every reader and every command has a fuzzer: the code lists both, so that a new one without a fuzzer fails here."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import onnxtrain
from onnxtrain.cli.app import COMMANDS
from reliability import run as campaigns
from reliability.killer import SCENARIOS
from reliability.runner import Report
from reliability.subject_flags import BASES
from reliability.subjects import SUBJECTS

READS = re.compile(
    r"\.open\(\"rb\"\)|\bread_(?:small|json|toml|text|file|arrays)\(|map_safetensors\(|safe_open\(|load_file\(|"
    r"tarfile\.open\(|ParquetFile\(|AdapterFormat\.read_adapter\(|path\.open\(|os\.O_RDONLY|os\.O_RDWR|"
    r"json\.loads\(|np\.load\(|\.from_file\(|\brfile\b|\.recv\("
)
"""Calls that open a file, parse a text of a model's metadata, or receive network data."""

FUZZED = {
    "models": ("model_file/file.py", "model_file/large_data.py", "model_file/external.py"),
    "killings": ("model_file/writing.py", "model_file/saving.py"),
    "checkpoints": ("training/checkpoints.py", "training/description.py"),
    "data": ("data/files.py", "data/opening.py"),
    "adapters": ("adapters/peft.py", "adapters/files.py", "adapters/checkpoint.py"),
    "small": (
        "model_file/small_files.py", "data/text_file.py", "data/tokenizer.py", "data/data_names.py",
        "training/report/record.py",
        "cli/configuration.py", "cli/fit.py", "plugins/step_graphs/import_states.py", "autodiff/options.py",
        "plugins/text/hugging_face.py",
    ),
    "tables": (
        "data/csv_file.py", "data/parquet_file.py", "data/tar_file.py",
        "data/images.py", "data/text_file.py",
        "plugins/tables/shards.py", "plugins/tables/windows.py", "plugins/tables/flags.py", "plugins/audio/sounds.py",
    ),
    "images": ("plugins/images/coco.py", "plugins/images/labelled.py", "plugins/images/mask_folder.py"),
    "texts": ("plugins/text/rows.py", "plugins/text/tokenizer_files.py"),
}  # fmt: skip
"""The subject that feeds each file of the source that reads others' files."""

SERVERS = {"pages": ("federated_pages/page_server.py",)}
"""For each file of the examples that receives network data, the subject that feeds it."""

OWN = (
    "plugins/pruning/report.py", "cli/export.py", "cli/process.py", "lowering/description.py",
    "interop/hub.py", "plugins/text/noisy_embeddings.py",
    "data/limited_process.py", "data/limited_worker.py", "data/tokenizing_worker.py", "plugins/text/template_worker.py",
)  # fmt: skip
"""Readers of trusted data only: files of packages, files just written, messages of worker processes."""

NO_OUTPUT = ("evaluate", "inspect", "doctor", "check", "runs", "completion", "demo")
"""Commands that write no file, and the demonstration, which writes as ``fit`` does."""


def test_every_reader_has_a_fuzzer() -> None:
    root = Path(onnxtrain.__file__).parent
    readers = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if READS.search(path.read_text())}
    fuzzed = {name for names in FUZZED.values() for name in names}
    assert readers - fuzzed - {*OWN} == set(), "name the subject that feeds it in FUZZED"
    assert not [name for name in fuzzed if not (root / name).exists()]
    assert {*FUZZED} <= {*SUBJECTS}


def test_every_server_has_a_fuzzer() -> None:
    root = Path(__file__).parents[2] / "examples"
    asked = re.compile(r"\brfile\b|\.recv\(|HTTPRequestHandler")
    servers = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if asked.search(path.read_text())}
    assert servers == {name for names in SERVERS.values() for name in names}, (
        "name the subject that feeds it in SERVERS"
    )
    assert {*SERVERS} <= {*SUBJECTS}


def test_every_command_has_a_fuzzer() -> None:
    assert {*BASES} == {*COMMANDS}
    killed = {scenario.line[0] for scenario in SCENARIOS.values()}
    assert killed | {*NO_OUTPUT} == {*COMMANDS}


def test_a_campaign_adds_up(tmp_path: Path, monkeypatch: Any) -> None:
    """A campaign continues after the journal's last case, also if the last line is incomplete."""
    journal, page = tmp_path / "journal.jsonl", tmp_path / "page.md"
    page.write_text("a\n<!-- counts -->\n\n<!-- end of counts -->\nb\n")
    begun: list[tuple[str, int]] = []

    def run_cases(subject: str, indices: Any, **_: Any) -> Report:
        begun.append((subject, next(iter(indices))))
        report = Report(seconds=2.0)
        report.counts.update(ok=300, refused=100)
        return report

    monkeypatch.setattr(campaigns, "run_cases", run_cases)
    monkeypatch.setattr(campaigns, "INPUTS", 1500)
    monkeypatch.setattr(campaigns, "KILLINGS", 800)
    monkeypatch.setattr(campaigns.signal, "signal", lambda *_: None)
    given = argparse.Namespace(
        hours=None, seconds=None, subject=["reading", "killings"], seed=3, workers=1, failures=None
    )
    assert campaigns.campaign(given, journal, page) == 0
    assert [first for subject, first in begun if subject == "reading"] == [0, 400, 800, 1200]
    assert [first for subject, first in begun if subject == "killings"] == [0, 400, 800]
    with journal.open("a") as file:
        file.write('{"subject": "read')
    entries = campaigns.read_journal(journal)
    assert sum(entry["count"] for entry in entries) == 2800
    assert campaigns.reached(entries)
    assert "| reading | 1,600 |" in page.read_text()
    assert json.loads(journal.read_text().splitlines()[0])["seed"] == 3


def test_the_page_has_the_counts_of_the_journal() -> None:
    page = campaigns.PAGE.read_text(encoding="utf-8")
    table = campaigns.sums(campaigns.read_journal(campaigns.JOURNAL))
    assert campaigns.replace_table(page, table) == page
