"""Hostile tokenizers: refused in one sentence, in bounded time, without a crash of the process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtrain.data import TensorSpec, TextFile, open_dataset, tokenizer
from onnxtrain.errors import DataError

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers are not installed")

PLAIN: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"},
}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
CATASTROPHIC = {"type": "Replace", "pattern": {"Regex": "(a|aa|a?)+$"}, "content": "x"}


def with_changes(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(PLAIN) | changes


WORD_LEVEL = PLAIN["model"]
REFUSED = {
    "doubling rules": with_changes(normalizer={"type": "Sequence", "normalizers": [DOUBLING] * 50}),
    "a catastrophic pattern": with_changes(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    ),
    "no unknown token": with_changes(model={**WORD_LEVEL, "vocab": {"a": 1}}),
    "large ids": with_changes(model={**WORD_LEVEL, "vocab": {"a": 2**31, "[UNK]": 2**32 - 1}}),
    "ids beyond 32 bits": with_changes(model={**WORD_LEVEL, "vocab": {"a": 2**40}}),
    "a padding id beyond 31 bits": with_changes(padding={**PADDING, "strategy": "BatchLongest", "pad_id": 2**31}),
    "no model": {"version": "1.0"},
    "a list": [],
}  # fmt: skip
TAKEN = {
    "padding to 2^40": with_changes(padding={**PADDING, "strategy": {"Fixed": 2**40}}),
    "padding to a multiple": with_changes(padding={**PADDING, "strategy": "BatchLongest", "pad_to_multiple_of": 2**40}),
    "truncation to nothing": with_changes(
        truncation={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}
    ),
}


def encoded(folder: Path, tokenizer: Any, text: str = "a b") -> np.ndarray:
    (folder / "texts.csv").write_text(f"text\n{text}\n{text}\n")
    specs = [TensorSpec("ids", np.dtype(np.int64), ("N", None))]
    (batch,) = open_dataset(TextFile(folder / "texts.csv", tokenizer), specs, need_target=False).batches(10)
    return batch.inputs["ids"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", REFUSED)
def test_hostile_files_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_SECONDS", 5.0)
    monkeypatch.setattr(tokenizer, "_MEMORY", 1 << 30)
    (tmp_path / "tokenizer.json").write_text(json.dumps(REFUSED[name]))
    with pytest.raises(DataError, match=r"tokenizer\.json'.*\.$") as caught:
        encoded(tmp_path, tmp_path / "tokenizer.json", f"a b zzz {'x' * 3000}")
    assert "defect" not in str(caught.value)


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("as_object", [False, True])
def test_own_padding_and_truncation_are_off(tmp_path: Path, name: str, as_object: bool) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TAKEN[name]))
    given = tokenizers.Tokenizer.from_str(json.dumps(TAKEN[name])) if as_object else tmp_path / "tokenizer.json"
    np.testing.assert_array_equal(encoded(tmp_path, given), [[1, 2], [1, 2]])
