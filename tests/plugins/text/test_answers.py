"""Answers that are measured while a model is trained: ROUGE, exact match, own functions, and what takes them."""

from __future__ import annotations

from typing import Any

import pytest

import onnxtrain
from onnxtrain import callbacks
from onnxtrain.errors import DataError, OptionError
from onnxtrain.plugins.text.answers import MEASURES
from plugins.text.chats import CHATS, language_model, tokenizer, write_rows

pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

PAIRS = [
    ("the cat sat on the mat", "the cat was on a mat"),
    ("The cat!", "the cat"),
    ("", "something"),
    ("a b c d e", "e d c b a"),
    ("no words", "in common"),
    ("one two one two one", "one one two three"),
]


def test_rouge_by_hand() -> None:
    """Runs of the first pair: 4 of 6 words, 1 of 5 pairs, and 'the cat on mat' in order."""
    first, second = PAIRS[:2]
    assert [MEASURES[name](*first) for name in MEASURES] == pytest.approx([0, 4 / 6, 1 / 5, 4 / 6])
    assert [MEASURES[name](*second) for name in MEASURES] == [0, 1, 1, 1]
    assert MEASURES["rouge1"](*PAIRS[5]) == pytest.approx(2 * 3 / (5 + 4))  # 'one' twice and 'two' once
    assert MEASURES["rougeL"](*PAIRS[3]) == pytest.approx(1 / 5)
    assert MEASURES["exact_match"](" Four.\n", "Four.") == 1


def test_texts_in_and_beyond_ascii_have_the_same_words() -> None:
    assert MEASURES["rouge1"]("foo_bar", "foo_bar é") == pytest.approx(4 / 5)
    assert MEASURES["rouge1"]("Ça va-t-il", "ça va t il") == 1


@pytest.mark.parametrize("pair", PAIRS)
def test_rouge_is_that_of_the_package(pair: tuple[str, str]) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge_score is not installed")
    names = ["rouge1", "rouge2", "rougeL"]
    found = scorer.RougeScorer(names).score(pair[1], pair[0])
    assert [MEASURES[name](*pair) for name in names] == pytest.approx([found[name].fmeasure for name in names])


def test_answers_are_measured_after_each_epoch(tmp_path: Any) -> None:
    """In the history and for the best weights; a model that has learned its rows answers them."""
    folder = tokenizer(tmp_path / "model")
    language_model(folder / "model.onnx")
    rows = [
        {"prompt": "Two", "completion": " Four"},
        {"messages": [CHATS[0][0], {"role": "assistant", "content": "é"}]},
    ]
    seen = []

    def length(answer: str, reference: str) -> int:
        seen.append((answer, reference))
        return len(answer)

    data = write_rows(tmp_path / "d.jsonl", rows)
    answers = callbacks.Answers(data, ["exact_match", "rouge1", length, length], tokens=4)
    trainer = onnxtrain.Trainer(folder, loss="next_token", optimizer="adam(lr=0.05)")
    history = trainer.fit(rows * 4, epochs=40, batch_size=8, callbacks=[answers], progress=False)
    assert [row["reference"] for row in answers.rows] == [" Four", "é"]
    first, last = history.rows[0], history.rows[-1]
    assert {"val_exact_match", "val_rouge1", "val_length", "val_length_2"} <= set(first)
    assert last["val_rouge1"] >= 0.5 > first["val_rouge1"]
    assert seen[-4:-2] == seen[-2:] == [(row["answer"], row["reference"]) for row in answers.rows]
    plain = onnxtrain.Trainer(folder, loss="next_token", optimizer="adam(lr=0.05)")
    assert plain.fit(rows * 4, epochs=40, batch_size=8, progress=False).rows[-1]["loss"] == last["loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], "rougeX"), "metrics of Answers has 'rougeX'"),
        ((["a"], "rouge1", 0), "tokens of Answers is 0; it needs an integer of at least 1"),
    ],
)
def test_wrong_arguments(arguments: Any, message: str) -> None:
    data, metrics, *tokens = arguments
    with pytest.raises(OptionError, match=message):
        callbacks.Answers(data, metrics, **({"tokens": tokens[0]} if tokens else {}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a b"}, "row 0 of the dataset is a text without a prompt; Answers needs chats, or prompts"),
        ({"messages": [{"role": "user", "content": "a"}]}, "row 0 of the dataset has no answer that is a text"),
        ({"txt": "a"}, "row 0 of the dataset holds 'txt'; a row needs messages"),
    ],
)
def test_rows_without_an_answer(tmp_path: Any, row: Any, message: str) -> None:
    folder = tokenizer(tmp_path)
    language_model(folder / "model.onnx")
    trainer = onnxtrain.Trainer(folder, loss="next_token")
    with pytest.raises(DataError, match=message):
        trainer.fit([{"text": "a b c"}], callbacks=[callbacks.Answers([row])], progress=False)
