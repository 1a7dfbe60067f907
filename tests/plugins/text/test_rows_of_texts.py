"""Rows of texts in an iterator, weights of rows, and refusals of first rows that lack a column."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain.data import pack
from onnxtrain.errors import CheckpointError, DataError
from onnxtrain.plugins.text import ChatData, ComparisonData
from plugins.text.chats import CHATS, language_model, tokenizer
from sentences import raises_sentence

pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

CHAT_ROWS: list[dict[str, Any]] = [{"messages": chat} for chat in CHATS] * 2
PAIRS = [{"prompt": "Say hello.", "chosen": word, "rejected": "No"} for word in ("Guten Tag", "Hello", "Four")]
JUDGED = [{"prompt": "Hi", "completion": word, "label": word == "Hello"} for word in ("Hello", "No", "Sure")]
ROWS = {"next_token": CHAT_ROWS, "dpo": PAIRS, "orpo": PAIRS, "kto": JUDGED}
NO_ANSWER = {"messages": [{"role": "user", "content": "Hello?"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tokenizer(tmp_path_factory.mktemp("model"))
    language_model(found / "model.onnx")
    return found


def trained(folder: Path, loss: str, data: Any, **options: Any) -> tuple[list[float], bytes]:
    """Return the losses of two epochs, and a weight after them."""
    trainer = onnxtrain.Trainer(folder, loss=loss, optimizer="sgd(lr=0.1)")
    history = trainer.fit(data, epochs=2, batch_size=2, progress=False, **options)
    return [row["loss"] for row in history.rows], trainer.parameters["mix"].tobytes()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", ROWS)
def test_an_iterator_of_rows_is_as_a_list(folder: Path, loss: str) -> None:
    rows = ROWS[loss]
    expected = trained(folder, loss, rows)
    assert trained(folder, loss, (dict(row) for row in rows)) == expected
    assert trained(folder, loss, deque(rows)) == expected


def test_validation_and_evaluation_take_iterators(folder: Path) -> None:
    trainer = onnxtrain.Trainer(folder, loss="next_token")
    row = trainer.fit(iter(CHAT_ROWS), validation=map(dict, CHAT_ROWS), epochs=1, progress=False).rows[0]
    expected = trainer.evaluate(CHAT_ROWS)
    assert row["val_loss"] == expected["loss"]
    assert trainer.evaluate(iter(CHAT_ROWS)) == expected
    alone = [
        onnxtrain.evaluate(folder / "model.onnx", rows, loss="next_token")["loss"]
        for rows in (CHAT_ROWS, iter(CHAT_ROWS))
    ]
    assert alone[0] == alone[1]


def test_an_iterator_of_batches_stays_one(folder: Path) -> None:
    ids = np.arange(12).reshape(2, 6)
    batch = ({"input_ids": ids, "attention_mask": np.ones_like(ids)}, ids)
    trainer = onnxtrain.Trainer(folder, loss="next_token")
    found = trainer.fit((batch for _ in range(3)), epochs=1, progress=False)
    assert found.rows[-1]["step"] == 3


@pytest.mark.parametrize("loss", ["next_token", "softmax_cross_entropy(axis=-1)"])
def test_rows_that_no_list_holds_are_refused(folder: Path, loss: str) -> None:
    class Rows:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(CHAT_ROWS)

    class Indexed:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, str]:
            return {"text": "hello"}

    trainer = onnxtrain.Trainer(folder, loss=loss)
    streams = [(Rows(), "'messages'"), (lambda: iter(CHAT_ROWS), "'messages'")]
    if loss == "next_token":
        assert [trained(folder, loss, data) for data, _ in streams] == [trained(folder, loss, CHAT_ROWS)] * 2
        streams.clear()
    for data, held in (*streams, (Indexed(), "'text'")):
        with raises_sentence("texts_for_model", texts=held):
            trainer.fit(data, progress=False)


@pytest.mark.parametrize("make", [list, tuple, iter])
@pytest.mark.parametrize(
    ("loss", "row", "message"),
    [
        (
            "kto",
            {"prompt": "Hi", "completion": "Hello"},
            "holds 'prompt', 'completion'; .* prompt, completion and label",
        ),
        ("kto", {"prompt": "Hi", "label": True}, "holds 'prompt', 'label'; a row needs prompt, completion and label"),
        (
            "dpo",
            {"prompt": "Hi", "chosen": "Hello"},
            "holds 'prompt', 'chosen'; a row needs prompt, chosen and rejected",
        ),
        ("next_token", {"prompt": "Hi"}, "holds 'prompt'; a row needs messages, prompt and completion"),
    ],
)
def test_a_first_row_without_a_column(folder: Path, make: Any, loss: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"row 0 of the dataset {message}"):
        onnxtrain.Trainer(folder, loss=loss).fit(make([row, *ROWS[loss]]), progress=False)


@pytest.mark.thorough
def test_a_dataset_without_a_column(folder: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets are not installed")
    data = datasets.Dataset.from_list([{"prompt": "Hi", "completion": "Hello"}] * 3)
    with pytest.raises(DataError, match="row 0 of the dataset holds 'prompt', 'completion'; a row needs prompt, compl"):
        onnxtrain.Trainer(folder, loss="kto").fit(data, progress=False)


@pytest.mark.parametrize("loss", ["next_token", "dpo"])
def test_a_stream_of_rows_is_as_a_list(folder: Path, loss: str) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets are not installed")
    stream = datasets.Dataset.from_list(ROWS[loss]).to_iterable_dataset()
    assert trained(folder, loss, stream) == trained(folder, loss, ROWS[loss])


def test_the_weight_of_a_row_multiplies_its_loss(folder: Path) -> None:
    """The row without an answer is left out with its weight."""
    trainer = onnxtrain.Trainer(folder, loss="next_token")
    rows, weights = [CHAT_ROWS[0], NO_ANSWER, CHAT_ROWS[1]], [3.0, 100.0, 0.5]
    first, second = (trainer.evaluate([row])["loss"] for row in (rows[0], rows[2]))
    both = trainer.evaluate(rows)["loss"]
    share = (both - second) / (first - second)  # of the tokens to learn
    found = trainer.evaluate(rows, sample_weight=weights, batch_size=1)
    assert found == {"loss": pytest.approx(3 * share * first + 0.5 * (1 - share) * second, rel=1e-4)}
    pairs = onnxtrain.Trainer(folder, loss="dpo")
    reference = [pairs.evaluate(PAIRS, sample_weight=given)["loss"] for given in ([1, 1, 1], [2, 0, 1], [0, 0, 0])]
    np.testing.assert_allclose(reference, np.log(2) * np.array([1, 1, 0]), rtol=1e-6)


@pytest.mark.parametrize("loss", ["next_token", "dpo"])
def test_training_with_weights(folder: Path, loss: str) -> None:
    rows = ROWS[loss]
    plain = trained(folder, loss, rows)
    losses, values = trained(folder, loss, rows, sample_weight=np.ones(len(rows)))
    np.testing.assert_allclose(losses, plain[0], rtol=1e-6)
    np.testing.assert_allclose(np.frombuffer(values, np.float32), np.frombuffer(plain[1], np.float32), atol=1e-5)
    before = onnxtrain.Trainer(folder, loss=loss).parameters["mix"].tobytes()
    assert trained(folder, loss, rows, sample_weight=np.zeros(len(rows))) == ([0.0, 0.0], before)
    one = trained(folder, loss, iter(rows), sample_weight=[1.0] + [0.0] * (len(rows) - 1))
    assert one[1] not in (plain[1], before)


def test_weights_go_with_the_rows_that_are_held_out(folder: Path) -> None:
    rows, weights = CHAT_ROWS * 2, np.repeat([0.0, 1.0], len(CHAT_ROWS))
    trainer = onnxtrain.Trainer(folder, loss="next_token")
    row = trainer.fit(rows, sample_weight=weights, validation=0.5, epochs=1, progress=False).rows[0]
    assert 0 < row["val_loss"] != trainer.evaluate(CHAT_ROWS)["loss"]
    assert "val_perplexity" not in row


def test_a_checkpoint_knows_its_weights(folder: Path, tmp_path: Path) -> None:
    def train(weight: float, **options: Any) -> None:
        trainer = onnxtrain.Trainer(folder, loss="next_token")
        weights = [weight, 1.0, 1.0, 1.0]
        trainer.fit(CHAT_ROWS, sample_weight=weights, checkpoint=tmp_path / "c", progress=False, **options)

    train(1.0, epochs=1)
    with pytest.raises(CheckpointError, match="data"):
        train(2.0, epochs=2, resume=True)
    train(1.0, epochs=2, resume=True)


@pytest.mark.parametrize(
    ("loss", "data", "weights", "message"),
    [
        (
            "next_token",
            CHAT_ROWS,
            [1, 2],
            "sample_weight has 2 weights, but the dataset has 4 rows; give one per row",
        ),
        (
            "dpo",
            ComparisonData(PAIRS),
            np.ones((3, 1)),
            "it needs one finite number of at least 0 per example",
        ),
        ("next_token", CHAT_ROWS, [1, -2, 1, 1], "sample_weight"),
        ("next_token", CHAT_ROWS, "trust", "sample_weight is 'trust', but the dataset has no column of weights"),
    ],
)
def test_wrong_weights(folder: Path, loss: str, data: Any, weights: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        onnxtrain.Trainer(folder, loss=loss).fit(data, sample_weight=weights, progress=False)


def test_packed_rows_have_no_weight(tmp_path: Path) -> None:
    inputs = "input_ids, int64[N, T] segment_ids"
    language_model(tokenizer(tmp_path) / "model.onnx", inputs=inputs)
    trainer = onnxtrain.Trainer(tmp_path, loss="next_token")
    for data in (pack([[1, 2, 3], [4, 5]], 6), ChatData(CHAT_ROWS, pack=128)):
        with raises_sentence("weights_of_packed_rows"):
            trainer.fit(data, sample_weight=[1.0, 2.0], progress=False)
