"""Chats as people have them: files of other forms, several with weights, rows that cannot be read, and streams."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import DataError, OptionError
from onnxtrain.plugins.text import ChatData, ComparisonData, text_stream
from onnxtrain.plugins.text.chat_data import _read
from onnxtrain.plugins.text.comparison_data import Group, read_groups
from onnxtrain.plugins.text.rows import Row, read_rows
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer
from plugins.text.chats import CHATS, GENERATION, TEMPLATES, language_model, tokenizer, write_rows

pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

ROWS: list[dict[str, Any]] = [{"messages": chat} for chat in CHATS]
SHARED = [
    {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}[message["role"]], "value": message["content"]}
            for message in chat
        ]
    }
    for chat in CHATS
]
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tokenizer(tmp_path_factory.mktemp("model"))
    language_model(found / "model.onnx")
    return found


def messages(source: Any) -> list[Any]:
    """The chats or texts of a source; a sentence for each row that cannot be read."""
    rows = read_rows(source)
    return [str(row) if isinstance(row, DataError) else row.messages or row.text for row in rows]


def write(path: Path, rows: Any) -> Path:
    """Write rows in the form of the path's ending."""
    content = json.dumps(rows) if ".json" in path.suffixes else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


@pytest.mark.parametrize("name", ["d.json", "d.json.gz", "d.jsonl.gz", "d.ndjson.gz", "d.jsonl", "D.JSON"])
def test_files_of_every_ending(tmp_path: Path, name: str) -> None:
    assert messages(write(tmp_path / name.lower(), ROWS)) == CHATS


def test_a_long_array_is_read_in_parts(tmp_path: Path) -> None:
    rows = [{"text": "w " * (number * 977 % 40_000), "n": number} for number in range(120)]
    (tmp_path / "d.json").write_text("\ufeff \n" + json.dumps(rows, indent=2) + "\n")
    assert messages(tmp_path / "d.json") == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"messages": []}', "holds no array of rows; it needs [...], or a row on each line."),
        ('[{"text": "a"}, {"text": b}]', "row 1 of '{}' is not JSON: Expecting value."),
        ('[{"text": "a"}', "row 1 of '{}' is not JSON: it ends before its array does."),
        ("", "row 0 of '{}' is not JSON: it ends before its array does."),
        ('[{"text": "a"}]\n[{"text": "b"}]', "'{}' goes on behind its array; it needs one array."),
    ],
)
def test_arrays_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(DataError, match=re.escape(message.replace("{}", str(path)))):
        messages(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "a b"}\n' * 100)
    for content in (b"no gzip", whole[:-9]):
        (tmp_path / "d.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"'.*d\.jsonl\.gz' cannot be read"):
            messages(tmp_path / "d.jsonl.gz")


def test_conversations_of_sharegpt() -> None:
    assert messages(SHARED) == CHATS
    call = {"from": "function_call", "value": "f()"}, {"from": "observation", "value": "3"}
    row = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}, *call], "tools": ""}
    (found,) = messages([row])
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool"]
    wrong = {"conversations": [{"from": "narrator", "value": "It rains."}]}
    assert messages([wrong]) == [
        "message 1 of conversations of row 0 of the dataset is from 'narrator'; it needs 'human', 'gpt', 'system' or "
        "'tool'."
    ]


def test_alpaca_without_a_chat_template(tmp_path: Path) -> None:
    """Its own prompt; with a template a message of the user, behind the system's."""
    plain = ChatTokenizer.open(tokenizer(tmp_path, None))
    row = Row.of(ALPACA, "row 0")
    (found,) = plain.encode([row], answers=True)
    assert found is not None
    assert plain.encoder.decode(found[0].ids.tolist()).startswith(
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n"
        "### Response:\n3"
    )
    ((start, end),) = found[1]
    assert row.plain is not None
    assert (row.plain.text + "</s>")[start:end] == "3</s>"
    short = Row.of({**ALPACA, "input": math.nan, "system": "Be brief."}, "row 0")
    assert short.plain is not None
    assert "Input" not in short.plain.text
    assert short.plain.text.startswith("Be brief.\n\n### Instruction:\nAdd.")
    assert [message["role"] for message in short.messages or ()] == ["system", "user", "assistant"]


def test_nan_in_columns_that_nothing_reads(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a", "score": NaN, "rank": Infinity}\n{"text": "b", "tools": NaN}\n')
    assert messages(tmp_path / "d.jsonl") == ["a", "b"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "score": NaN, "margin": NaN}\n')
    (group,) = read_groups(tmp_path / "p.jsonl", "rewards")
    assert not isinstance(group, DataError)
    assert group.numbers == [0.0]
    assert messages([{"text": math.nan, "prompt": "a", "completion": "b"}]) == ["ab"]


def test_several_files_with_weights(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", [{"text": f"a{number}"} for number in range(4)])
    second = write(tmp_path / "b.json", [{"text": "b0"}, {"text": "b1"}])
    assert messages([first, str(second)]) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert messages({first: 0.5, second: 2}) == ["a1", "a3", "b0", "b0", "b1", "b1"]
    assert messages([second, second]) == ["b0", "b0", "b1", "b1"]
    assert messages({first: 1.5}) == ["a0", "a1", "a1", "a2", "a3", "a3"]
    (tmp_path / "b.json").write_text('[{"txt": "b0"}]')
    assert messages([first, second])[-1].startswith(f"row 0 of '{second}' holds 'txt'; a row needs")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (0, "is 0; it needs a finite number above 0"),
        (-1.5, "is -1.5; it needs"),
        ("2", "is '2'; it needs"),
        (True, "is True; it needs"),
        (0.1, "has the weight 0.1, which takes none of its 4 rows; leave it out"),
    ],
)
def test_weights_that_take_nothing(folder: Path, tmp_path: Path, weight: Any, message: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": f"a{number}"} for number in range(4)])
    with pytest.raises((DataError, OptionError), match=re.escape(message)):
        onnxtrain.Trainer(folder, loss="next_token").fit({path: weight}, epochs=1, progress=False)


def learned(rows: Any, folder: Path) -> list[str]:
    words = ChatTokenizer.open(folder)
    found = _read(ChatData(rows, folder), words, None)
    return [words.encoder.decode(row["ids"][row["learned"]].tolist()) for row in map(found.row, range(len(found)))]


@pytest.mark.parametrize("template", [TEMPLATES["chatml"], GENERATION])
def test_messages_of_weight_0_are_not_learned(tmp_path: Path, template: str) -> None:
    """As in the files of OpenAI's fine-tuning."""
    words = tokenizer(tmp_path, template)
    ask = {"role": "user", "content": "What?"}
    answers = [
        {"role": "assistant", "content": text, "weight": weight}
        for text, weight in zip("abc", (0, 1, None), strict=True)
    ]
    chat = [message for answer in answers for message in (ask, answer)]
    (found,) = learned([{"messages": chat}], words)
    assert "".join(found.split()) == "bc"
    with pytest.raises(DataError, match=r"weight of message 2 of messages of row 0 .* is 0.5; it is 0 for an answer"):
        learned([{"messages": [ask, {**answers[0], "weight": 0.5}]}], words)


def test_history_and_system_messages(folder: Path, tmp_path: Path) -> None:
    """Earlier answers of an instruction are learned, too; no column of a chat is dropped in silence."""
    row = {"instruction": "What?", "output": "Four.", "history": [["Say it.", "Tag"]], "system": "Be brief."}
    (found,) = messages([row])
    assert [message["content"] for message in found] == ["Be brief.", "Say it.", "Tag", "What?", "Four."]
    assert learned([row], folder)[0].split() == ["Tag", "Four."]
    asked = {"prompt": CHATS[0][:1], "completion": CHATS[0][1:], "system": "Be brief."}
    assert messages([asked]) == [[{"role": "system", "content": "Be brief."}, *CHATS[0]]]
    pair = {"prompt": CHATS[0][:1], "chosen": CHATS[0][1:], "rejected": CHATS[0][1:], "system": "Be brief."}
    (group,) = read_groups([pair], "pairs")
    assert isinstance(group, Group)
    assert [each.messages[0]["role"] for each in group.rows] == ["system", "system"]  # type: ignore[union-attr, index]
    assert messages([{"prompt": "a", "completion": "b", "system": "c"}]) == [
        "row 0 of the dataset has a system message, but its prompt is a text; it needs a list of messages."
    ]
    assert messages([{**row, "history": [["a"]]}]) == [
        "history of row 0 of the dataset is [['a']]; it needs a list of pairs, [question, answer]."
    ]
    plain = tokenizer(tmp_path / "plain", None)
    with pytest.raises(DataError, match="row 0 of the dataset is a chat, but the tokenizer has no chat template"):
        learned([row], plain)


def test_several_files_train(folder: Path, tmp_path: Path) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.json.gz", SHARED)
    losses = []
    for data in (ROWS * 3, [str(first), first, second], {first: 2, second: 1.0}):
        trainer = onnxtrain.Trainer(folder, loss="next_token", optimizer="sgd(lr=0.1)")
        losses.append(trainer.fit(data, epochs=1, progress=False).rows[0]["loss"])
    assert losses[0] == losses[1] == losses[2]


WRONG = [
    "{",
    '{"messages": 3}',
    '{"text": "a\\ud800 b"}',
    '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
]


def test_broken_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    """Lines that are no JSON, rows of no form, chats that the template refuses, halves of characters."""
    words = tokenizer(tmp_path, TEMPLATES["instructions"])
    lines = [json.dumps(ROWS[0]), *WRONG, json.dumps(ROWS[1]), '{"messages": [{"role": "user", "content": "a"}]}']
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    data = ChatData(tmp_path / "d.jsonl", words, skip_broken=True)
    found = _read(data, ChatTokenizer.open(words), None)
    assert found.kept == [0, 5]
    assert found.read == 7
    assert found.hints == (
        f"'{tmp_path}/d.jsonl': 4 of 7 rows cannot be read and are skipped, for example: "
        f"line 2 of '{tmp_path}/d.jsonl' is not JSON: Expecting property name enclosed in double quotes at character "
        "2.",
        f"'{tmp_path}/d.jsonl': 1 of 7 rows have no answer to learn and are left out.",
    )
    for number in range(4):
        lines.pop(1)
        (tmp_path / "d.jsonl").write_text("\n".join(lines))
        if number == 2:
            with pytest.raises(DataError, match=r"line 2 of .* cannot be rendered: Roles must alternate"):
                _read(ChatData(tmp_path / "d.jsonl", words), ChatTokenizer.open(words), None)
    (tmp_path / "d.jsonl").write_text("{")
    with pytest.raises(DataError, match="has nothing to learn: 1 of 1 rows cannot be read, for example: line 1 of"):
        _read(data, ChatTokenizer.open(words), None)


def test_broken_pairs_are_skipped(folder: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": "Say hello.", "chosen": word, "rejected": "No"} for word in ("Guten Tag", "Hello", "Four")]
    rows = [pairs[0], {"prompt": "a"}, {**pairs[1], "chosen": "a\ud800"}, *pairs[1:]]
    data = ComparisonData(write_rows(tmp_path / "d.jsonl", rows), skip_broken=True)
    found = []
    for given in (pairs, data):
        trainer = onnxtrain.Trainer(folder, loss="dpo", optimizer="sgd(lr=0.1)")
        found.append(trainer.fit(given, epochs=1, batch_size=3, progress=False).rows[0]["loss"])
    assert found[0] == found[1]
    assert any("2 of 5 rows cannot be read and are skipped" in hint for hint in trainer.hints)


def test_on_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.json", [*SHARED, {"text": 3}])
    several = f"{tmp_path / 'a.jsonl'}=2,{tmp_path / 'b.json'}"
    fit = ("fit", str(folder), "--loss", "next_token", "--batch-size", "1", "--output", str(tmp_path / "out.onnx"))
    assert main([*fit, "--data", several]) == 2
    assert "text of row 2" in capsys.readouterr().err
    assert main([*fit, "--data", several, "--skip-broken"]) == 0
    shown = capsys.readouterr()
    assert "6 steps" in shown.out
    assert "1 of 7 rows cannot be read and are skipped" in shown.err
    assert main([*fit, "--data", str(tmp_path / "[ab].json*"), "--skip-broken"]) == 0
    assert "4 steps" in capsys.readouterr().out
    assert main([*fit, "--data", f"{several},{tmp_path / 'b.json'}"]) == 2
    assert f"'{tmp_path / 'b.json'}' is named twice; name it once, with a weight" in capsys.readouterr().err
    assert main([*fit, "--data", several.replace("=2", "=0")]) == 2
    assert "needs a finite number above 0" in capsys.readouterr().err


class Forms:
    """Streams of the same rows: how they are made, and how many epochs they last."""

    @staticmethod
    def function(rows: list[Any]) -> Any:
        return lambda: iter(rows)

    @staticmethod
    def generator(rows: list[Any]) -> Any:
        return (row for row in rows)

    @staticmethod
    def iterable(rows: list[Any]) -> Any:
        class Rows:
            def __iter__(self) -> Iterator[Any]:
                return iter(rows)

        return Rows()

    @staticmethod
    def hugging_face(rows: list[Any]) -> Any:
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
        return datasets.Dataset.from_list(rows).to_iterable_dataset()


FORMS = ["function", "generator", "iterable", pytest.param("hugging_face", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("form", FORMS)
def test_a_long_stream_is_read_as_it_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Two epochs; every row counts once in each, and blocks of rows are what a list of them is."""
    monkeypatch.setattr(text_stream, "HELD", 4)
    rows = [
        {"text": f"{word} and {word} {number}"} for number, word in enumerate(["Guten", "Tag", "Four", "Hello"] * 3)
    ]
    trainer = onnxtrain.Trainer(folder, loss="next_token", optimizer="sgd(lr=0.1)")
    history = trainer.fit(getattr(Forms, form)(rows[:10]), epochs=2, batch_size=2, progress=False)
    assert [row["step"] for row in history.rows] == [5, 10]
    again = onnxtrain.Trainer(folder, loss="next_token", optimizer="sgd(lr=0.1)")
    whole = again.fit(rows[:10], epochs=2, batch_size=2, progress=False)
    assert history.rows[-1]["loss"] == pytest.approx(whole.rows[-1]["loss"], rel=0.1)
    found = again.evaluate(getattr(Forms, form)(rows[:10]))
    assert found["loss"] == pytest.approx(again.evaluate(rows[:10])["loss"], rel=1e-6)


def test_an_endless_stream_begins_to_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "HELD", 4)

    class Stop(onnxtrain.callbacks.Callback):
        def on_step_end(self, state: Any) -> None:
            if state.step == 3:
                state.request_stop("enough")

    taken: list[int] = []

    def rows() -> Iterator[Any]:
        for number in itertools.count():
            taken.append(number)
            yield ROWS[number % 2]

    trainer = onnxtrain.Trainer(folder, loss="next_token")
    trainer.fit(ChatData(rows, max_length=30), batch_size=2, epochs=1, callbacks=[Stop()], progress=False)
    assert len(taken) < 20
