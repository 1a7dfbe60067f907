"""Texts on the command line: the commands of the page, the flags, and their refusals."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import onnxtrain
from onnxtrain.cli import main
from plugins.text.chats import CHATS, language_model, tokenizer, write_rows

pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

PAGE = Path(__file__).parents[3] / "docs" / "language_models.md"
Run = Callable[..., str]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, its tokenizer, and a file of chats."""
    monkeypatch.chdir(tmp_path)
    language_model(tokenizer(tmp_path / "folder") / "model.onnx")
    write_rows(tmp_path / "chat.jsonl", [{"messages": chat} for chat in CHATS] * 10)
    return tmp_path


@pytest.fixture
def fit(files: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``onnxtrain fit`` and returns its output, or its error where it fails."""

    def call(*flags: str, model: str = "folder", data: str = "chat.jsonl", loss: str = "next_token") -> str:
        capsys.readouterr()
        code = main(["fit", model, "--data", data, "--loss", loss, *flags])
        shown = capsys.readouterr()
        return f"{shown.out}{shown.err}" if code == 0 else f"refused: {shown.err}"

    return call


def section() -> str:
    return PAGE.read_text().partition("## From a text file to an adapter\n")[2].partition("\n## ")[0]


def test_the_commands_of_the_page(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", section(), re.DOTALL)
    install, command = block.replace("\\\n", " ").strip().splitlines()
    assert install == "pip install 'onnxtrain[cpu,text]'"
    assert main(shlex.split(command)[1:]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"epoch 3/3  loss [\d.]+  validation loss [\d.]+  validation perplexity [\d.]+  [\d,]+ tokens/s", shown
    )
    assert re.search(r"^adapter +adapter \(\d+ kB\)", shown, re.MULTILINE)
    assert sorted(path.name for path in (files / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "onnxtrain.json",
    ]  # fmt: skip


def test_the_python_of_the_page(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```py\n(.*?)```", section(), re.DOTALL)
    dataset = [{"messages": chat} for chat in CHATS]
    (files / "more.json").write_text(json.dumps(dataset))
    exec(compile(block, str(PAGE), "exec"), {"onnxtrain": onnxtrain, "dataset": dataset})
    assert (files / "adapter" / "adapter_model.safetensors").exists()


def test_the_rows_of_the_page(files: Path, fit: Run) -> None:
    rows = re.findall(r"^\| `(\{.*?\})`", section(), re.MULTILINE)
    assert len(rows) == 5
    (files / "rows.jsonl").write_text("\n".join(rows))
    assert "left out" not in fit(data="rows.jsonl")


def test_flags(files: Path, fit: Run) -> None:
    shown = fit("--max-length", "40", "--train-on", "answers", "--validation", "0.2", "--epochs", "2")
    assert shown.count("hint: 'chat.jsonl': 10 of 20 rows are longer than 40 tokens and are cut") == 1
    assert "tokens are lost (--max-length)." in shown
    (files / "folder" / "tokenizer.json").rename(files / "words.json")
    (files / "folder" / "tokenizer_config.json").rename(files / "tokenizer_config.json")
    assert "There is no file 'folder/tokenizer.json'" in fit()
    assert "epoch 1/1" in fit("--tokenizer", "words.json")
    (files / "mine.jinja").write_text(
        "{{ messages[0].content }}{% if messages[1] %}{{ messages[1].content }}{% endif %}"
    )
    assert "epoch 1/1" in fit("--tokenizer", "words.json", "--chat-template", "mine.jinja", model="folder/model.onnx")
    assert "refused" in fit("--tokenizer", "words.json", "--chat-template", "no.jinja")


def test_tables_and_lines(files: Path, fit: Run) -> None:
    (files / "d.csv").write_text("prompt;completion\na;b c\n" * 1 + "d;e f\n")
    assert "2 steps" in fit("--batch-size", "1", "--delimiter", ";", data="d.csv")
    (files / "d.txt").write_text("one two\n\nthree four\n")
    assert "2 steps" in fit("--batch-size", "1", data="d.txt")
    assert main(["evaluate", "folder", "--data", "d.txt", "--loss", "next_token"]) == 0


def test_packing(files: Path, fit: Run) -> None:
    assert "refused: error: packed sequences: the model has no attention with scores" in fit("--pack", "64")
    language_model(files / "folder" / "model.onnx", inputs="input_ids, int64[N, T] segment_ids")
    assert "4 steps" in fit("--pack", "80", "--batch-size", "4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mean", "1"), "--mean is '1', but 'chat.jsonl' is read as chats or texts; leave it out."),
        (("--text", "words"), "--text is 'words', but 'chat.jsonl' is read as chats or texts"),
        (("--max-length", "1"), "max_length is 1; it needs at least 2 tokens"),
        (("--pack", "1"), "pack is 1; it needs at least 2 tokens"),
    ],
)
def test_settings_that_do_not_fit(fit: Run, flags: tuple[str, ...], message: str) -> None:
    assert message in fit(*flags)


def test_settings_for_chats_are_refused_for_arrays(files: Path, fit: Run) -> None:
    np.savez(files / "d.npz", input_ids=np.zeros((2, 3), int))
    assert "--train-on is 'all', but 'd.npz' is read as arrays" in fit("--train-on", "all", data="d.npz")


def test_a_tokenizer_of_another_model(files: Path, fit: Run) -> None:
    language_model(files / "folder" / "model.onnx", vocabulary=100)
    assert re.search(r"has the value \d+ at example .* in a table of 100 rows: values must be 0 to 99", fit())


def test_the_help_names_the_loss_of_texts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "folder", "--data", "chat.jsonl"]) == 2
    assert "next_token" in capsys.readouterr().err


def test_a_folder_names_its_model(files: Path, fit: Run) -> None:
    (files / "folder" / "model.onnx").rename(files / "folder" / "text.onnx")
    assert "'folder' is a folder; give the model file in it" in fit()
    (files / "folder" / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"filename": "text.onnx"}}}))
    assert "text.onnx: trains" in fit()
    assert (files / "text-trained.onnx").exists()
    (files / "folder" / "genai_config.json").write_text(
        json.dumps({"model": {"decoder": {"filename": "../chat.jsonl"}}})
    )
    assert "'folder' is a folder; give the model file in it" in fit()


def test_a_folder_with_weights_of_pytorch_is_to_be_exported(files: Path, fit: Run) -> None:
    (files / "folder" / "model.onnx").unlink()
    (files / "folder" / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert "'folder' is a checkpoint of PyTorch (model-00001-of-00002.safetensors) without an ONNX model" in fit()


def test_samples_while_training(fit: Run) -> None:
    shown = fit("--sample", "And a smile?", "--sample-every", "2", "--sample-tokens", "3", "--batch-size", "4")
    assert re.findall(r"^step (\d+): And a smile\? -> ", shown, re.MULTILINE) == ["2", "4", "5"]
    assert "--sample-every is for samples of text; give a prompt" in fit("--sample-every", "2")
    assert "--sample-tokens is for samples of text; give a prompt" in fit("--sample-tokens", "2")
    assert "every of Samples is 0; it needs an integer" in fit("--sample", "a", "--sample-every", "0")


def test_an_adapter_to_continue_with_has_its_own_rank(files: Path, fit: Run) -> None:
    assert "adapter" in fit("--lora", "2", "--lora-targets", "*", "-o", "two.onnx_adapter")
    message = "--lora 4 begins new adapters of this rank, but --lora-adapter two.onnx_adapter continues with those of"
    assert message in fit("--lora", "4", "--lora-adapter", "two.onnx_adapter")


def test_the_table_beside_other_packages_names_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    table = PAGE.read_text().partition("## Beside TRL and PEFT\n")[2].partition("\n## ")[0]
    own = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ") and "onnxtrain" not in row[:12]]
    assert main(["fit", "--help-all"]) == 0
    known = capsys.readouterr().out
    assert main(["adapter", "--help-all"]) == 0
    actions = capsys.readouterr().out
    flags = {flag for cell in own for flag in re.findall(r"--[a-z-]+", cell)}
    assert len(flags) >= 10
    assert not {flag for flag in flags if not re.search(rf"{flag}\b", known)}
    assert all(action in actions for cell in own for action in re.findall(r"`adapter (\w+)`", cell))
    names = {name for cell in own for name in re.findall(r"`onnxtrain\.losses\.(\w+)`", cell)}
    assert names
    assert not {name for name in names if not hasattr(onnxtrain.losses, name)}


def test_noise_on_embeddings(files: Path, fit: Run) -> None:
    assert "epoch 1/1" in fit("--neftune", "5")
    assert "alpha is 0.0; NEFTune needs a finite number above 0" in fit("--neftune", "0")
