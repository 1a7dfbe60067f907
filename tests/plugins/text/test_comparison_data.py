"""Rows of texts that losses compare: their forms, tokens, references and targets, commands, and refusals."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses import LOSSES
from onnxtrain.losses.groups import GroupLoss
from onnxtrain.plugins.text import ChatData, ComparisonData
from onnxtrain.plugins.text.comparison_data import FORMS, Comparisons
from plugins.text.chats import CHATS, language_model, tokenizer, write_rows

pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

PAGE = Path(__file__).parents[3] / "docs" / "language_models.md"
PAIRS: list[dict[str, Any]] = [
    {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [{"role": "assistant", "content": f"No, {number}."}]}
    for number, chat in enumerate(CHATS * 6)
]
QUERIES = [{"query": f"What is {n}?", "positive": f"{n} is so", "negative": ["no", f"not {n + 1}"]} for n in range(6)]
GROUPS = [name for name, loss in LOSSES.items() if issubclass(loss, GroupLoss) and loss.texts != "prompts"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with its tokenizer, beside a file of preferences."""
    monkeypatch.chdir(tmp_path)
    language_model(tokenizer(tmp_path / "folder") / "model.onnx")
    write_rows(tmp_path / "prefs.jsonl", PAIRS)
    return tmp_path / "folder"


def opened(rows: Any, kind: str, words: Path, *, names: tuple[str, ...] = ("labels",), **options: Any) -> Any:
    """The first batch of rows, and the hints about them."""
    shapes = dict.fromkeys(("input_ids", "attention_mask", *names), ("N", "k", "T"))
    shapes |= {"last": ("N", "k"), "chosen_labels": ("N", "T")}
    specs = [TensorSpec(name, np.dtype(np.int64), shapes[name]) for name in ("input_ids", "attention_mask", *names)]
    source = Comparisons(ComparisonData(rows, words, **options), kind, has_reference=False)
    dataset = open_dataset(source, specs, need_target=kind in ("rewards", "embeddings", "ranking"))
    return next(iter(dataset.batches(64))), dataset.hints


def scorer(path: Path, *, types: bool = False) -> Path:
    """Write a model of one score for each row of tokens: the sum of the tokens' own."""
    more = ", int64[N, T] token_type_ids" if types else ""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        f (int64[N, T] input_ids, int64[N, T] attention_mask{more}) => (float[N, 1] score)
        <int64[1] axis = {{1}}> {{
            e = Gather(words, input_ids)  m = Cast<to=1>(attention_mask)  k = Unsqueeze(m, two)  w = Mul(e, k)
            score = ReduceSum<keepdims=0>(w, axis) }}""")
    values = np.random.default_rng(0).normal(size=(330, 1)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, "words"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2]), "two"))
    onnx.save(model, path)
    return path


def section() -> str:
    return PAGE.read_text().partition("## Preferences and rewards\n")[2].partition("\n## ")[0]


def test_every_loss_names_a_kind_of_rows():
    assert {LOSSES[name].texts for name in GROUPS} == set(FORMS) - {"prompts"}


def test_pairs_are_the_chats_of_both_answers(folder: Path):
    batch, hints = opened(PAIRS[:3], "pairs", folder)
    assert not hints
    assert batch.inputs["input_ids"].shape[:2] == (3, 2)
    for number, row in enumerate(PAIRS[:3]):
        for index, name in enumerate(("chosen", "rejected")):
            chat = ChatData([{"prompt": row["prompt"], "completion": row[name]}], folder)
            (one,) = open_dataset(chat, [TensorSpec("input_ids", np.dtype(np.int64), ("N", "T"))]).batches(1)
            size = one.targets.shape[1]
            assert batch.inputs["input_ids"][number, index, :size].tolist() == one.inputs["input_ids"][0].tolist()
            assert batch.inputs["labels"][number, index, :size].tolist() == one.targets[0].tolist()
            assert batch.inputs["attention_mask"][number, index].sum() == size
            assert (batch.inputs["labels"][number, index, size:] == -100).all()


def test_a_prompt_is_what_both_answers_begin_with(folder: Path):
    rows = [{"chosen": "Say it: yes please", "rejected": "Say it: no"}]
    given = [{"prompt": "Say it:", "chosen": " yes please", "rejected": " no"}]
    chats = [
        {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in PAIRS[:2]
    ]
    for one, other in ((rows, given), (chats, PAIRS[:2])):
        batches = [opened(each, "pairs", folder)[0].inputs for each in (one, other)]
        for name in batches[0]:
            np.testing.assert_array_equal(batches[0][name], batches[1][name])


def test_the_other_answer_of_kto_is_that_of_the_row_before(folder: Path):
    rows = [{"prompt": f"p{n}?\n", "completion": f" answer {n}", "label": n % 2 == 0} for n in range(3)]
    batch, _ = opened(rows, "judged", folder)
    for number, row in enumerate(rows):
        mixed = [{"prompt": row["prompt"], "completion": rows[number - 1]["completion"], "label": True}] * 2
        other, _ = opened(mixed, "judged", folder)
        size = int(other.inputs["attention_mask"][0, 0].sum())
        for name in ("input_ids", "labels"):
            np.testing.assert_array_equal(batch.inputs[name][number, 1, :size], other.inputs[name][0, 0, :size])


@pytest.mark.parametrize(("paired", "others"), [(0, [4, 0, 1, 2, 3]), (1, [4, 0, 1, 2, 3]), (2, [1, 0, 3, 2, 4])])
def test_answers_are_exchanged_among_the_rows_of_a_batch(folder: Path, paired: int, others: list[int]):
    rows = [{"prompt": "p\n", "completion": f" answer {n}", "label": True} for n in range(5)]
    data = Comparisons(ComparisonData(rows, folder), "judged", has_reference=False)
    data.paired = paired
    specs = [TensorSpec(name, np.dtype(np.int64), ("N", "K", "T")) for name in ("input_ids", "labels")]
    ids = data.examples(specs, need_target=False).batch(range(5))["input_ids"]
    assert [int(np.flatnonzero((ids[:, 0] == row).all(-1))[0]) for row in ids[:, 1]] == others


def test_rewards_are_of_whole_rows_with_a_margin(folder: Path):
    rows = [{"chosen": "yes", "rejected": "no no no", "margin": 0.5}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    batch, _ = opened(rows, "rewards", folder, names=("last",))
    assert batch.targets.tolist() == [0.5, 0.0]
    np.testing.assert_array_equal(batch.inputs["last"], batch.inputs["attention_mask"].sum(-1) - 1)
    ends = np.take_along_axis(batch.inputs["input_ids"], batch.inputs["last"][..., None], 2)
    assert (ends == 2).all()  # the token of the end


def test_queries_and_documents(folder: Path):
    batch, _ = opened([*QUERIES, QUERIES[2]], "embeddings", folder, names=())
    assert batch.inputs["input_ids"].shape[:2] == (7, 4)
    assert batch.targets.tolist() == [0, 1, 2, 3, 4, 5, 2]
    words = [{"text": text} for text in ("What is 0?", "0 is so", "no", "not 1")]
    plain = open_dataset(ChatData(words, folder), [TensorSpec("input_ids", np.dtype(np.int64), ("N", "T"))])
    (one,) = plain.batches(4)
    for index in range(4):
        size = int(batch.inputs["attention_mask"][0, index].sum())  # without the token of the end
        np.testing.assert_array_equal(batch.inputs["input_ids"][0, index, :size], one.inputs["input_ids"][index, :size])


def test_rerankers_read_pairs_of_texts(folder: Path):
    rows = [
        {"query": "a", "documents": ["b c", "d"], "labels": [2, 0.5]},
        {"query": "e", "positive": "f", "negative": ["g", "h"]},
    ]
    batch, _ = opened(rows, "ranking", folder, names=())
    assert batch.targets.tolist() == [[2, 0.5, -1], [1, 0, 0]]
    assert batch.inputs["attention_mask"][0, 2].sum() == 1  # a missing document
    import tokenizers

    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = words.encode("a", "b c").ids
    assert batch.inputs["input_ids"][0, 0, : len(ids)].tolist() == ids


@pytest.mark.parametrize(("kind", "names"), [("pairs", ("labels",)), ("rewards", ("last",))])
def test_equal_answers_give_a_hint(folder: Path, kind: str, names: tuple[str, ...]):
    rows = [PAIRS[0], {**PAIRS[1], "rejected": PAIRS[1]["chosen"]}]
    _, hints = opened(rows, kind, folder, names=names)
    text = "1 of 2 rows have chosen and rejected answers of the same tokens; they teach nothing."
    assert hints == (f"the dataset: {text}",)


def test_long_rows(folder: Path):
    batch, hints = opened(PAIRS[:4], "pairs", folder, max_length=30)
    assert batch.inputs["input_ids"].shape[2] <= 30
    assert hints == (
        "the dataset: 4 of 4 rows are longer than 30 tokens and are cut (max_length=).",
        "the dataset: 2 of 4 rows have no answer to learn and are left out.",
    )
    rows = [{"chosen": "a", "rejected": "b"}, {"chosen": "a " * 40, "rejected": "b"}]
    batch, hints = opened(rows, "rewards", folder, names=("last",), max_length=20)
    assert batch.size == 1
    assert hints == ("the dataset: 1 of 2 rows are longer than 20 tokens (max_length=) and are left out.",)


def test_long_texts_keep_the_token_at_their_end(folder: Path):
    """Texts with the tokens that a tokenizer adds; that some were cut is said."""
    import tokenizers

    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A [E]", special_tokens=[("[E]", 2)])
    words.save(str(folder / "tokenizer.json"))
    batch, hints = opened([*QUERIES, {**QUERIES[0], "query": "b" * 30}], "embeddings", folder, names=(), max_length=25)
    sizes = batch.inputs["attention_mask"].sum(-1)
    ends = np.take_along_axis(batch.inputs["input_ids"], sizes[..., None] - 1, 2)
    assert sizes.max() == 25
    assert (ends == 2).all()
    assert hints == ("the dataset: 1 of 7 rows are longer than 25 tokens and are cut (max_length=).",)


@pytest.mark.parametrize("adapters", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_reference_is_the_model_of_the_file(folder: Path, adapters: bool):
    lora = onnxtrain.Lora(rank=4, targets="all-linear", init="pissa") if adapters else None
    trainer = onnxtrain.Trainer(folder, loss="dpo", optimizer="adamw(lr=0.01)", lora=lora)
    assert trainer.evaluate("prefs.jsonl")["loss"] == pytest.approx(np.log(2), abs=1e-5)
    base = trainer.predict("prefs.jsonl")
    history = trainer.fit("prefs.jsonl", validation=0.25, epochs=3, batch_size=3, progress=False)
    assert history.rows[0]["loss"] < np.log(2)
    assert history.rows[-1]["val_rewards/accuracies"] == 1.0
    margins = 0.1 * (trainer.predict("prefs.jsonl") - base)
    found = trainer.evaluate("prefs.jsonl")["rewards/margins"]  # again with a reference of its own
    assert found == pytest.approx((margins[:, 0] - margins[:, 1]).mean(), abs=1e-4)


def test_cells_may_be_empty(folder: Path):
    """Tables have a column for all rows: a cell without a margin, or a negative, is null or empty."""
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin} for margin in (None, "", "0.5")]
    batch, _ = opened(rows, "rewards", folder, names=("last",))
    assert batch.targets.tolist() == [0, 0, 0.5]
    assert opened(rows, "pairs", folder)[0].size == 3
    queries = [{"query": text, "positive": "b", "negative": ""} for text in "ac"]
    assert opened(queries, "embeddings", folder, names=())[0].inputs["input_ids"].shape[:2] == (2, 2)


def test_rows_with_one_document_can_be_predicted(folder: Path):
    trainer = onnxtrain.Trainer(scorer(folder / "model.onnx", types=True).parent, loss="listnet")
    assert trainer.predict([{"query": "a", "documents": ["b"], "labels": [1]}]).shape == (1, 1)
    _, hints = opened([*QUERIES, {"query": "a", "documents": ["b"], "labels": [1]}], "ranking", folder, names=())
    assert hints == ("the dataset: 1 of 7 rows have one document, so that nothing is ranked.",)


@pytest.mark.thorough
def test_a_resumed_training_has_the_same_reference(folder: Path, tmp_path: Path):
    def trained(epochs: int, checkpoint: str, **options: Any) -> Any:
        trainer = onnxtrain.Trainer(folder, loss="kto", optimizer="adamw(lr=0.01)")
        rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2} for n, row in enumerate(PAIRS)]
        trainer.fit(rows, epochs=epochs, batch_size=4, checkpoint=tmp_path / checkpoint, progress=False, **options)
        return trainer.get_weights(flat=True)

    whole = trained(3, "one")
    trained(2, "two")
    np.testing.assert_array_equal(trained(3, "two", resume=True), whole)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", GROUPS)
def test_every_loss_trains_from_texts(folder: Path, tmp_path: Path, loss: str):
    kind, model = LOSSES[loss].texts, folder
    rows: list[dict[str, Any]] = PAIRS
    if kind == "judged":
        rows = [{**row, "completion": row["chosen"], "label": number % 2 == 0} for number, row in enumerate(PAIRS)]
    if kind in ("embeddings", "ranking"):
        rows = QUERIES
    if kind in ("rewards", "ranking"):
        model = scorer(folder / "model.onnx", types=kind == "ranking").parent
    lora = onnxtrain.Lora(rank=4, targets="all-linear") if loss in ("dpo", "orpo", "kto") else None
    trainer = onnxtrain.Trainer(model, loss=loss, optimizer="adamw(lr=0.02)", lora=lora)
    history = trainer.fit(rows, epochs=4, batch_size=3, progress=False)
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
    assert trainer.evaluate(tuple(rows))["loss"] == pytest.approx(trainer.evaluate(rows)["loss"])
    path = "adapter" if lora else "m.onnx"
    trainer.save(path)
    assert (tmp_path / path).exists()


def test_the_command_and_the_rows_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]):
    (block,) = re.findall(r"```sh\n(.*?)```", section(), re.DOTALL)
    assert main(shlex.split(block)[1:]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"epoch 3/3  loss [\d.]+  validation loss [\d.]+  validation rewards/accuracies [\d.]+", shown)
    rows = dict(re.findall(r"^\| (`.*?`) \| `(\{.*?\})`", section(), re.MULTILINE))
    named = {name: row for names, row in rows.items() for name in re.findall(r"`(\w+)`", names)}
    assert set(named) == set(GROUPS)
    for name, row in named.items():
        opened([json.loads(row)] * 2, LOSSES[name].texts, folder, names=())


@pytest.mark.thorough
def test_the_python_of_the_page(folder: Path):
    (block,) = re.findall(r"```py\n(.*?)```", section(), re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {"onnxtrain": onnxtrain, "pairs": PAIRS})
    assert Path("adapter/adapter_model.safetensors").exists()


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    code = main(["fit", *flags])
    shown = capsys.readouterr()
    return f"{shown.out}{shown.err}" if code == 0 else f"refused: {shown.err}"


@pytest.mark.thorough
def test_flags(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("d.csv").write_text("prompt;chosen;rejected\na;b c;d\na;e;f g\n")
    shown = run(
        capsys, "folder", "--data", "d.csv", "--loss", "orpo(beta=0.2)", "--delimiter", ";", "--max-length", "9"
    )
    assert "1 step" in shown
    shown = run(capsys, "folder", "--data", "prefs.jsonl", "--loss", "dpo", "--pack", "8")
    assert "--pack is '8', but 'prefs.jsonl' is read as texts to compare; leave it out." in shown
    shown = run(capsys, "folder", "--data", "prefs.jsonl", "--loss", "kto")
    assert (
        "line 1 of 'prefs.jsonl' holds 'prompt', 'chosen', 'rejected'; a row needs prompt, completion and label."
        in shown
    )
    shown = run(capsys, "folder", "--data", "prefs.jsonl", "--loss", "reward", "--new-head", "1", "--output", "r.onnx")
    assert "r.onnx" in shown


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("pairs", {"chosen": "a"}, "holds 'chosen'; a row needs prompt, chosen and rejected, or chosen and rejected."),
        ("pairs", ["a", "b"], "row 0 of the dataset is a list; a row needs prompt, chosen and rejected"),
        ("pairs", {"chosen": "a", "rejected": ["b"]}, "must both be texts, or both lists of messages"),
        ("pairs", {"chosen": "a", "rejected": "b"}, "has no prompt, and chosen and rejected begin differently"),
        ("pairs", {"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen of row 0 of .* is a number, but its"),
        ("rewards", {"chosen": "a", "rejected": "b", "margin": "x"}, "margin of row 0 of the dataset is 'x'"),
        ("pairs", {"prompt": CHATS[0], "chosen": [], "rejected": []}, "chosen of row 0 of the dataset is empty"),
        ("pairs", {"prompt": 1, "chosen": 2, "rejected": 3}, "prompt of row 0 .* is a number; it needs a list of"),
        ("judged", {"prompt": "a", "completion": "b", "label": 2}, "label of row 0 .* is 2; it needs true"),
        ("judged", {"prompt": "a", "completion": "b", "label": 1}, "has one row, but kto compares each with another"),
        ("embeddings", {"query": 1, "positive": "b"}, "query of row 0 of the dataset is a number; it needs a text"),
        ("ranking", {"query": "a", "documents": ["b"], "labels": [1, 2]}, "must be a list of 1 number of at least 0"),
        ("ranking", {"query": "a", "documents": [], "labels": []}, "documents of row 0 .* needs a text, or a list"),
        ("ranking", {"query": "a", "documents": ["b"], "labels": [1]}, "one document in each row; listnet and"),
        ("embeddings", {"query": "a", "positive": "b"}, "has one query, but multiple_negatives compares"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit(folder: Path, kind: str, row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        opened([row], kind, folder, names=())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ComparisonData("d.jsonl", max_length=1), OptionError, "max_length is 1; it needs an integer of at"),
        (
            lambda: onnxtrain.Trainer("folder", loss="next_token").fit(ComparisonData(PAIRS)),
            DataError,
            "holds texts to compare, but the loss next_token compares none; use dpo",
        ),
        (
            lambda: onnxtrain.Trainer("folder", loss="dpo").fit(ChatData(PAIRS)),
            DataError,
            "holds single texts, but the loss dpo compares several",
        ),
        (
            lambda: onnxtrain.Trainer("folder", loss="dpo").fit([{"text": "a"}]),
            DataError,
            "row 0 of the dataset holds 'text'; a row needs prompt, chosen and rejected",
        ),
        (
            lambda: onnxtrain.evaluate("folder", "prefs.jsonl", loss="dpo"),
            DataError,
            "a reference, the model before its training, and a file has none; measure it while training",
        ),
        (
            lambda: onnxtrain.Trainer(onnx.load("folder/model.onnx"), loss="dpo").fit(PAIRS),
            DataError,
            "the dataset holds texts; name the tokenizer of the model",
        ),
        (
            lambda: opened([QUERIES[0], {"query": "a", "positive": "b"}], "embeddings", Path("folder"), names=()),
            DataError,
            "row 1 of the dataset has 0 negatives, but the first row has 2",
        ),
    ],
)  # fmt: skip
def test_refusals(folder: Path, call: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
