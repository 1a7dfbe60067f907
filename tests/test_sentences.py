"""The sentences of errors: those of the golden file are used, and the helper of the tests finds wrong ones."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import sentences
from onnxtrain.errors import DataError
from sentences import SENTENCES, raises_sentence

TESTS = Path(__file__).parent


def test_each_sentence_is_used() -> None:
    used = {
        key
        for file in TESTS.rglob("*.py")
        if file.name not in ("sentences.py", "test_sentences.py")
        for key in re.findall(r'"(\w+)"', file.read_text(encoding="utf-8"))
    }
    assert not set(SENTENCES) - used


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SENTENCES, "rank", ("DataError", "{what!r} has rank {got} ({}), but needs {wanted:,}."))
    return "rank"


def raise_rank(sentence: str = "'x' has rank 2 (int64), but needs 1,000.") -> None:
    raise DataError(sentence).about("x", got=2, wanted=1000)


def test_sentence_and_fields_are_compared(rank: str) -> None:
    with raises_sentence(rank, what="x", got=2, wanted=1000):
        raise_rank()
    with raises_sentence(rank):
        raise_rank()


@pytest.mark.parametrize("values", [{"what": "y"}, {"got": 3}, {"wanted": 999}])
def test_other_values_fail(rank: str, values: dict[str, object]) -> None:
    with pytest.raises(AssertionError), raises_sentence(rank, **values):
        raise_rank()


@pytest.mark.parametrize(
    "sentence", ["'x' has rank 2 (int64), but needs 1,000", "'x' had rank 2 (int64), but needs 1,000."]
)
def test_other_sentences_fail(rank: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match="Regex pattern did not match"), raises_sentence(rank):
        raise_rank(sentence)


def test_field_that_a_sentence_does_not_show_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SENTENCES, "plain", ("DataError", "That is wrong."))
    with pytest.raises(AssertionError, match="what of: That is wrong"), raises_sentence("plain", what="y"):
        raise DataError("That is wrong.").about("x")


def test_unknown_placeholder_is_refused(rank: str) -> None:
    with pytest.raises(AssertionError, match="no placeholder"):
        sentences.pattern(rank, shape=(2,))


def test_fields_survive_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(DataError("x has rank 2.").about("x", got=2, wanted=1)))
    assert (str(error), error.what, error.got, error.wanted) == ("x has rank 2.", "x", 2, 1)
    assert (DataError("x").what, DataError("x").got, DataError("x").wanted) == (None, None, None)
