"""Rows of texts: the tokens and answers of transformers, every form of rows and files, lengths, and refusals."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

import onnxtrain
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.data.map_dataset import by_length
from onnxtrain.errors import CheckpointError, DataError, OptionError
from onnxtrain.plugins.text import ChatData
from onnxtrain.plugins.text.rows import Row
from onnxtrain.plugins.text.tokenizer_files import ChatTokenizer
from plugins.text.chats import CHATS, ENDED, GENERATION, TEMPLATES, THINKING, language_model, tokenizer, write_rows
from sentences import raises_sentence, warns_sentence

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

ROWS = [{"messages": chat} for chat in CHATS]


def spec(name, shape=("N", "T"), dtype=np.int64):
    return TensorSpec(name, np.dtype(dtype), shape)


SPECS = (spec("input_ids"), spec("attention_mask"))


def read(source, *specs, **options):
    """All rows as (ids, labels) without padding."""
    found = []
    for batch in open_dataset(ChatData(source, **options), specs or SPECS).batches(3):
        ids, masks = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        for row, mask, labels in zip(ids, masks, batch.targets, strict=True):
            size = int(mask.sum())
            assert mask[:size].all()
            assert (labels[size:] == -100).all()
            assert set(np.unique(labels[:size][labels[:size] != row[:size]])) <= {-100}
            found.append((row[:size].tolist(), labels[:size].tolist()))
    return found


def learned(folder, rows):
    """The text that is learned of each row."""
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [words.decode([one for one in labels if one >= 0], skip_special_tokens=False) for _, labels in rows]


def of_transformers(folder):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.torch
def test_marked_answers_are_those_of_transformers(tmp_path):
    folder = tokenizer(tmp_path, GENERATION)
    theirs = of_transformers(folder)
    for given, (ids, labels) in zip(CHATS, read(ROWS, tokenizer=folder), strict=True):
        wanted = theirs.apply_chat_template(given, return_dict=True, return_assistant_tokens_mask=True)
        assert ids == wanted["input_ids"]
        assert [int(one >= 0) for one in labels] == wanted["assistant_masks"]
    assert read(ROWS, tokenizer=theirs) == read(ROWS, tokenizer=folder)


@pytest.mark.torch
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_follow_the_generation_prompt_of_transformers(tmp_path, name):
    """Tokens behind the rendered question, up to the rendered answer: how TRL masks prompts of conversations."""
    folder = tokenizer(tmp_path, TEMPLATES[name])
    theirs = of_transformers(folder)

    def size(chat, **options):
        return len(theirs.apply_chat_template(chat, return_dict=True, **options)["input_ids"])

    for given, (ids, labels) in zip(CHATS, read(ROWS, tokenizer=folder), strict=True):
        assert ids == theirs.apply_chat_template(given, return_dict=True)["input_ids"]
        mask = np.zeros(len(ids), bool)
        for index, message in enumerate(given):
            if message["role"] == "assistant":
                mask[size(given[:index], add_generation_prompt=True) : size(given[: index + 1])] = True
        assert [one >= 0 for one in labels] == mask.tolist()


@pytest.mark.torch
def test_the_environment_of_templates_is_that_of_transformers(tmp_path):
    """tojson, strftime_now, loop controls, spaces around blocks, tools and options."""
    template = (
        "{%- for message in messages %}\n    {%- if loop.index > 3 %}{% break %}{% endif %}\n"
        "{{ message | tojson }}|{{ tools | tojson(indent=1) }}|{{ mood | upper }}\n{% endfor %}\n"
        "{{ strftime_now('%Y') }}{{ eos_token }}{{ documents is none }}{{ bos_token }}"
    )
    folder = tokenizer(tmp_path, template)
    tools = [{"type": "function", "function": {"name": "f", "description": "Größe <b>"}}]
    row = {"messages": CHATS[1], "tools": json.dumps(tools), "chat_template_kwargs": {"mood": "glad"}}
    ((ids, _),) = read([row], tokenizer=folder, train_on="all")
    assert ids == of_transformers(folder).apply_chat_template(CHATS[1], tools=tools, mood="glad")["input_ids"]


def test_learned_text(tmp_path):
    folder = tokenizer(tmp_path)
    rows = read(ROWS, tokenizer=folder)
    assert learned(folder, rows) == [
        "Four.<|im_end|>\n",
        "Guten Tag, schöne Grüße!<|im_end|>\nSure: \U0001f600 \U0001f600<|im_end|>\n",
    ]
    everything = read(ROWS, tokenizer=folder, train_on="all")
    assert [labels for _, labels in everything] == [ids for ids, _ in rows]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}


@pytest.mark.parametrize(
    ("template", "chat", "wanted"),
    [
        (
            THINKING,
            CHATS[1],
            "Guten Tag, schöne Grüße!<|im_end|>\n<think>\n\n</think>\n\nSure: \U0001f600 \U0001f600<|im_end|>\n",
        ),
        (ENDED, CHATS[1], "Guten Tag, schöne Grüße!<|im_end|>\nSure: \U0001f600 \U0001f600<|im_end|>\n<|endoftext|>"),
        (
            THINKING,
            [
                {"role": "user", "content": "Two?"},
                {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nYes,\ntwo."},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "<think>\nMore?\n</think>\n\nThree."},
            ],
            "Yes,\ntwo.<|im_end|>\n<think>\nMore?\n</think>\n\nThree.<|im_end|>\n",
        ),
        (
            THINKING,
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Rain?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "dry"},
                {"role": "assistant", "content": "No."},
            ],
            '\n<call>{"name": "weather", "arguments": {"city": "Bonn"}}</call><|im_end|>\n'
            "<think>\n\n</think>\n\nNo.<|im_end|>\n",
        ),
        (
            ENDED,
            [
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": "<b>[1]"},
                {"role": "user", "content": "Two"},
                {"role": "assistant", "content": "two"},
            ],
            "<b>[1]<|im_end|>\ntwo<|im_end|>\n<|endoftext|>",
        ),
        (
            TEMPLATES["chatml"],
            [
                {"role": "user", "content": "Two?"},
                {"role": "assistant", "content": "Yes."},
                {"role": "assistant", "content": "Two."},
            ],
            "Yes.<|im_end|>\nTwo.<|im_end|>\n",  # without the words that ask for an answer
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.role }}:\n{{ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}",
            CHATS[1],
            "Guten Tag, schöne Grüße!;Sure: \U0001f600 \U0001f600;",
        ),
    ],
    ids=["thinking", "ended", "thoughts", "tools", "marks", "two answers", "another beginning"],
)
def test_answers_that_change_where_messages_follow(tmp_path, template, chat, wanted):
    """The labels of earlier answers are their text in the whole chat."""
    folder = tokenizer(tmp_path, template)
    row = {"messages": chat, "tools": [CALL]} if "Rain?" in str(chat) else {"messages": chat}
    rows = read([row], tokenizer=folder)
    assert learned(folder, rows) == [wanted]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper if loop.last else m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "{{ messages | length }}{% for m in messages %}{{ m.role }}: {{ m.content | upper }};{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    ],
    ids=["another text", "another beginning and other words"],
)
def test_answers_that_are_not_found_are_refused(tmp_path, template):
    folder = tokenizer(tmp_path, template)
    with raises_sentence(
        "row_cannot_be_rendered", label="row 0 of the dataset", reason="in another way when the others fol"
    ):
        read([{"messages": CHATS[1]}], tokenizer=folder)


@pytest.mark.parametrize(
    "row", [{"text": "a\ud800b"}, {"messages": [*CHATS[1], {"role": "user", "content": "\udfff"}]}]
)
def test_halves_of_characters_are_refused(tmp_path, row):
    with raises_sentence("half_a_character", what="row 1 of the dataset"):
        read([ROWS[0], row], tokenizer=tokenizer(tmp_path))


def test_prompts_and_completions(tmp_path):
    folder = tokenizer(tmp_path)
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt, completion = "What is two?", " It is two."
    ((ids, labels),) = read([{"prompt": prompt, "completion": completion}], tokenizer=folder)
    assert ids == words.encode(f"{prompt}{completion}</s>").ids  # with <s>, as the tokenizer adds it
    before = len(words.encode(prompt).ids)
    assert labels == [-100] * before + ids[before:]
    ((ids, labels),) = read([{"text": "Plain."}], tokenizer=folder)
    assert ids == labels == words.encode("Plain.</s>").ids
    ((again, _),) = read([{"text": "Plain.</s>"}], tokenizer=folder)
    assert again == ids


def test_forms_of_a_chat(tmp_path):
    folder = tokenizer(tmp_path)
    question, answer = CHATS[0]
    chat = read([ROWS[0]], tokenizer=folder)
    assert read([{"prompt": [question], "completion": [answer]}], tokenizer=folder) == chat
    task = {"instruction": question["content"], "output": answer["content"]}
    assert read([task], tokenizer=folder) == chat
    assert read([{**task, "input": ""}], tokenizer=folder) == chat
    with_more = [{"role": "user", "content": f"{question['content']}\n\nQuickly."}, answer]
    assert read([{**task, "input": "Quickly."}], tokenizer=folder) == read([{"messages": with_more}], tokenizer=folder)
    several = {"prompt": CHATS[1][:1], "completion": CHATS[1][1:]}
    (text,) = learned(folder, read([several], tokenizer=folder))
    assert text.startswith("Guten Tag")
    assert "And a smile?" in text  # a completion of several messages is learned as a whole, as in TRL


def test_files_hold_the_same_rows(tmp_path):
    folder = tokenizer(tmp_path / "model")
    pairs = [{"prompt": "a, b", "completion": ' "c"\nd'}, {"prompt": "e", "completion": " f"}]
    wanted = read(pairs, tokenizer=folder)
    assert read(write_rows(tmp_path / "d.jsonl", pairs), tokenizer=folder) == wanted
    (tmp_path / "d.csv").write_text('id,prompt,completion\n1,"a, b"," ""c""\nd"\n2,e," f"\n')
    assert read(tmp_path / "d.csv", tokenizer=folder) == wanted
    texts = read([{"text": "one"}, {"text": "two two"}], tokenizer=folder)
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo two")
    assert read(tmp_path / "d.txt", tokenizer=folder) == texts


def test_parquet_and_datasets(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    folder = tokenizer(tmp_path / "model")
    rows = [{"messages": chat, "number": 1} for chat in CHATS]
    rows[1]["messages"] = [{**message, "tool_calls": None} for message in CHATS[1]]
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    wanted = read(ROWS, tokenizer=folder)
    assert read(tmp_path / "d.parquet", tokenizer=folder) == wanted
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    assert read(datasets.Dataset.from_list(ROWS), tokenizer=folder) == wanted
    assert read(datasets.Dataset.from_list(ROWS).to_iterable_dataset(), tokenizer=folder) == wanted


def test_chat_templates_of_a_folder(tmp_path):
    other = "{% for message in messages %}{{ message.role[0] + message.content }}{% endfor %}"
    plain = read(ROWS, tokenizer=tokenizer(tmp_path / "a", other), train_on="all")
    named = [{"name": "tool_use", "template": "{{ x() }}"}, {"name": "default", "template": other}]
    assert read(ROWS, tokenizer=tokenizer(tmp_path / "b", named), train_on="all") == plain
    folder = tokenizer(tmp_path / "c", None)
    (folder / "chat_template.jinja").write_text(other)
    assert read(ROWS, tokenizer=folder / "tokenizer.json", train_on="all") == plain
    (folder / "chat_template.jinja").rename(folder / "mine.jinja")
    assert read(ROWS, tokenizer=folder, chat_template=folder / "mine.jinja", train_on="all") == plain
    with raises_sentence("no_chat_template", what="row 0 of the dataset"):
        read(ROWS, tokenizer=folder)
    del named[1]
    with raises_sentence(
        "no_default_template", what=f"'{tmp_path}/d/tokenizer_config.json'", got=["tool_use"], wanted="default"
    ):
        read(ROWS, tokenizer=tokenizer(tmp_path / "d", named))


def test_length_and_rows_without_answers(tmp_path):
    folder = tokenizer(tmp_path)
    full = read(ROWS, tokenizer=folder)
    size = len(full[0][0])
    data = ChatData([*ROWS, {"messages": CHATS[0][:1]}], folder, max_length=size)
    dataset = open_dataset(data, SPECS)
    assert dataset.size == 2
    assert len(full[1][0]) > size
    lost = len(full[1][0]) - size
    total = sum(len(ids) for ids, _ in full) + len(
        read([{"messages": CHATS[0][:1]}], tokenizer=folder, train_on="all")[0][0]
    )
    assert list(dataset.hints) == [
        f"the dataset: 1 of 3 rows are longer than {size} tokens and are cut; {lost} of {total} tokens are lost "
        "(max_length=).",
        "the dataset: 1 of 3 rows have no answer to learn and are left out.",
    ]
    with raises_sentence("nothing_to_learn", few="none of the 2 rows has an answer within"):
        read(ROWS, tokenizer=folder, max_length=4)
    (folder / "genai_config.json").write_text(json.dumps({"model": {"context_length": size}}))
    assert [len(ids) for ids, _ in read(ROWS, tokenizer=folder)] == [size, size]


def test_batches_are_padded_to_their_longest_row_and_hold_similar_lengths(tmp_path):
    folder = tokenizer(tmp_path)
    rng = np.random.default_rng(0)
    rows = [{"text": "a b " * int(size)} for size in rng.integers(1, 60, 64)]
    dataset = open_dataset(ChatData(rows, folder), [*SPECS, spec("position_ids", dtype=np.int32)])
    batches = list(dataset.batches(8, shuffle=True, seed=1, epoch=2))
    for batch in batches:
        lengths = batch.inputs["attention_mask"].sum(1)
        assert lengths.max() == batch.inputs["input_ids"].shape[1]
        assert batch.inputs["position_ids"].tolist() == [list(range(lengths.max()))] * 8
    sizes = [batch.inputs["input_ids"].size for batch in batches]
    assert sum(sizes) < 0.7 * sum(batch.inputs["input_ids"].size for batch in dataset.batches(8))
    assert sorted(sizes) not in (sizes, sizes[::-1])
    rest = list(dataset.batches(8, shuffle=True, seed=1, epoch=2, start=5))
    assert [b.inputs["input_ids"].tolist() for b in rest] == [b.inputs["input_ids"].tolist() for b in batches[5:]]
    fixed = open_dataset(ChatData(rows, folder), [spec("input_ids", ("N", 40)), spec("attention_mask", ("N", 40))])
    assert {batch.inputs["input_ids"].shape for batch in fixed.batches(8)} == {(8, 40)}


def test_an_order_by_length_has_every_example_once():
    lengths = np.random.default_rng(0).integers(1, 100, 1234)
    order = by_length(lengths, 8)
    assert sorted(order.tolist()) == list(range(1234))
    spread = [np.ptp(lengths[order[start : start + 8]]) for start in range(0, 1232, 8)]
    assert np.mean(spread) < 10


def test_packed_rows(tmp_path):
    folder = tokenizer(tmp_path)
    specs = [spec("input_ids"), spec("position_ids")]
    dataset = open_dataset(ChatData(ROWS * 3, folder, pack=128), specs)
    rows = read(ROWS * 3, tokenizer=folder)
    (batch,) = dataset.batches(10)
    assert batch.inputs["input_ids"].shape[1] == 128
    assert len(batch.inputs["input_ids"]) < 6
    assert (batch.targets >= 0).sum() == sum(sum(one >= 0 for one in labels) for _, labels in rows)
    with raises_sentence("mask_marks_padding_only", what="attention_mask", got=("N", "T")):
        open_dataset(ChatData(ROWS, folder, pack=64), SPECS)


def test_a_trainer_takes_a_file_beside_a_tokenizer(tmp_path):
    path = language_model(tokenizer(tmp_path / "model") / "model.onnx")
    write_rows(tmp_path / "chat.jsonl", ROWS * 8)
    trainer = onnxtrain.Trainer(tmp_path / "model", loss="next_token", optimizer="adam(lr=0.05)")
    history = trainer.fit(tmp_path / "chat.jsonl", validation=0.25, epochs=4, batch_size=4, progress=False)
    last = history.rows[-1]
    assert last["loss"] < 0.5 * history.rows[0]["loss"]
    assert last["val_perplexity"] == pytest.approx(np.exp(last["val_loss"]))
    by_metric = trainer.evaluate(ROWS, metrics="perplexity")
    assert by_metric["perplexity"] == pytest.approx(trainer.evaluate(ROWS)["perplexity"], rel=1e-5)
    trainer.save(tmp_path / "model" / "tuned.onnx")
    alone = onnxtrain.evaluate(tmp_path / "model" / "tuned.onnx", ROWS, loss="next_token")
    assert alone["loss"] == pytest.approx(by_metric["loss"], rel=1e-5)
    assert path.exists()
    assert onnxtrain.predict(tmp_path / "model", str(tmp_path / "chat.jsonl")).shape[0] == 16
    again = pickle.loads(pickle.dumps(trainer))
    assert again.evaluate(ROWS)["loss"] == pytest.approx(by_metric["loss"], rel=1e-5)
    other = onnxtrain.Trainer(tmp_path / "model", loss="softmax_cross_entropy(axis=-1)")
    with raises_sentence(
        "texts_and_loss",
        what=f"'{tmp_path}/chat.jsonl'",
        got="softmax_cross_entropy",
        reads="the logits at each token with this token",
    ):
        other.fit(tmp_path / "chat.jsonl", progress=False)
    with warns_sentence("rows_are_cut", limit=30):
        trainer.fit(ChatData(ROWS, max_length=30), progress=False)
    assert any("longer than 30 tokens" in hint for hint in trainer.hints)


def test_a_tuple_of_rows_is_as_a_list(tmp_path):
    language_model(tokenizer(tmp_path) / "model.onnx")
    losses = []
    for rows in (ROWS, tuple(ROWS)):
        trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="next_token", optimizer="sgd(lr=0.1)")
        losses.append(trainer.fit(rows, epochs=1, progress=False).rows[0]["loss"])
    assert losses[0] == losses[1]


def test_a_resumed_training_takes_the_same_batches(tmp_path):
    language_model(tokenizer(tmp_path / "model") / "model.onnx")
    rows = write_rows(tmp_path / "chat.jsonl", [*ROWS * 8, {"text": "a b c d"}])
    found = []
    for name, resume in (("first", False), ("second", False), ("second", True)):
        trainer = onnxtrain.Trainer(tmp_path / "model", loss="next_token")
        epochs = 1 if name == "second" and not resume else 2
        options = {"checkpoint": tmp_path / name, "resume": resume, "progress": False}
        trainer.fit(rows, epochs=epochs, batch_size=3, **options)
        found.append(trainer.parameters["mix"].tobytes())
    assert found[0] == found[2] != found[1]
    write_rows(tmp_path / "chat.jsonl", ROWS * 8)
    with pytest.raises(CheckpointError, match="data"):
        onnxtrain.Trainer(tmp_path / "model", loss="next_token").fit(
            rows, epochs=2, batch_size=3, checkpoint=tmp_path / "second", resume=True, progress=False
        )


def test_the_loss_is_that_of_the_learned_tokens(tmp_path):
    """Padding and questions do not count, whatever the batch."""
    language_model(tokenizer(tmp_path) / "model.onnx")
    trainer = onnxtrain.Trainer(tmp_path, loss="next_token")
    rows = read(ROWS, tokenizer=tmp_path)
    logits = [
        trainer.predict({"input_ids": [ids], "attention_mask": np.ones((1, len(ids)), int)})[0] for ids, _ in rows
    ]
    terms = []
    for scores, (_, labels) in zip(logits, rows, strict=True):
        scores = scores.astype(np.float64)
        log = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        terms += [-log[place - 1, label] for place, label in enumerate(labels) if label >= 0 and place]
    for size in (1, 2):
        assert trainer.evaluate(ROWS, batch_size=size)["loss"] == pytest.approx(np.mean(terms), rel=1e-5)


WRONG = {
    '{"messages": []}': r"messages of line 1 of '.*' is empty; it needs a list of messages",
    '{"messages": [{"content": "a"}]}': r"message 1 of messages of line 1 of '.*' has no role",
    '{"messages": [{"role": "user"}]}': r"message 1 of messages of line 1 of '.*' has no content",
    '{"prompt": "a"}': r"line 1 of '.*' holds 'prompt'; a row needs messages, prompt and completion",
    '{"prompt": "a", "completion": 3}': r"prompt of line 1 of '.*' is a text; it needs a list of messages",
    '{"instruction": 1, "output": "b"}': r"instruction of line 1 of '.*' is a number; it needs a text",
    "[1]": r"line 1 of '.*' is a list; a row needs messages",
    "{": r"line 1 of '.*' is not JSON",
    "": r"'.*' has nothing to learn: there are no rows",
    '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 3}': r"chat_template_kwargs of line 1",
    '{"messages": [{"role": "user", "content": 5}]}': r"content of message 1 of messages .* is a number; it needs",
    '{"messages": [{"role": "user", "content": [5]}]}': r"line 1 of '.*' cannot be rendered: .*concatenate",
    '{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}': (
        "none of the 1 rows has an answer, which is a message of the role 'assistant', a completion"
    ),
    '{"text": "a"}\n{"text": b}': r"line 2 of '.*' is not JSON: Expecting value at character 10\.$",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_rows(tmp_path, line):
    (tmp_path / "d.jsonl").write_text(line)
    with pytest.raises(DataError, match=WRONG[line]):
        read(tmp_path / "d.jsonl", tokenizer=tokenizer(tmp_path))


def test_wrong_options(tmp_path):
    folder = tokenizer(tmp_path)
    with raises_sentence("train_on_option", what="train_on", got="some"):
        ChatData(ROWS, train_on="some")
    with raises_sentence("tokens_at_least_2", what="max_length", got=1):
        ChatData(ROWS, max_length=1)
    with pytest.raises(OptionError, match="pack is 0; it needs at least 2 tokens"):
        ChatData(ROWS, pack=0)
    with raises_sentence("pack_too_long", what="pack", got=999999999999, wanted=16777216):
        ChatData(ROWS, pack=999_999_999_999)
    with pytest.raises(OptionError, match=r"max_length is 2\.5; it needs an integer"):
        ChatData(ROWS, max_length=2.5)
    with pytest.raises(OptionError, match="pack is True; it needs an integer"):
        ChatData(ROWS, pack=True)
    with raises_sentence("chat_template_option", what="chat_template", got=3):
        ChatData(ROWS, chat_template=3)
    (tmp_path / "d.json").write_text("[{}]")
    with raises_sentence("not_an_array_file", need="numpy.savez"):
        open_dataset(tmp_path / "d.json", SPECS)
    with raises_sentence("chat_template_cannot_be_used", what="chat_template", reason="Unexpected end of template"):
        read(ROWS, tokenizer=tokenizer(tmp_path / "open", "{% generation %}"))
    with raises_sentence("max_length_of_model", what="max_length", got=50, wanted=40):
        read(ROWS, spec("input_ids", ("N", 40)), spec("attention_mask", ("N", 40)), tokenizer=folder, max_length=50)
    with raises_sentence("texts_need_tokenizer", what="the dataset"):
        read(ROWS)
    with pytest.raises(DataError, match=r"There is no file '.*tokenizer\.json'"):
        read(ROWS, tokenizer=tmp_path / "elsewhere" / "tokenizer.json")
    with raises_sentence("no_template_file", what="chat_template", got=tmp_path / "no.jinja"):
        read(ROWS, tokenizer=folder, chat_template=folder / "no.jinja")
    with pytest.raises(DataError, match=r"There is no file '.*no\.jsonl'"):
        read(tmp_path / "no.jsonl", tokenizer=folder)
    with raises_sentence("texts_need_one_input", inputs="'a', 'b'"):
        open_dataset(ChatData(ROWS, folder), [spec("a"), spec("b")])
    (tmp_path / "d.csv").write_text("a,b\n1,2\n")
    with raises_sentence(
        "columns_of_texts",
        what=f"'{tmp_path}/d.csv'",
        got=["a", "b"],
        wanted="prompt and completion, or instruction and output, or text",
    ):
        read(tmp_path / "d.csv", tokenizer=folder)
    with raises_sentence("rows_of_texts", what="data", got="a number"):
        read(3, tokenizer=folder)


def test_an_inconsistent_template_is_refused(tmp_path):
    """It shortens earlier answers, as templates of models that think do."""
    template = (
        "{% for message in messages %}{{ message.role + ':' }}{% if message.role == 'assistant' and not loop.last %}"
        "{{ message.content[:3] }}{% else %}{{ message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    folder = tokenizer(tmp_path, template)
    with raises_sentence(
        "row_cannot_be_rendered", label="row 1 of the dataset", reason="the chat template renders the first"
    ):
        read(ROWS, tokenizer=folder)
    assert len(read(ROWS, tokenizer=folder, train_on="all")) == 2
    changed = "{% set x %}{% generation %}{{ messages[1].content }}{% endgeneration %}{% endset %}{{ x | upper }}"
    with raises_sentence("row_cannot_be_rendered", reason="changes the text of a {% generation %}"):
        read(ROWS, tokenizer=tokenizer(tmp_path, changed))


@pytest.mark.parametrize(
    ("row", "begin", "end"),
    [
        ({"text": "<s>Hello"}, "<s>", "</s>"),
        ({"text": "<s><s>Hello</s>"}, "<s><s>", "</s>"),
        ({"text": "Hello"}, "<s>", "</s>"),
        ({"prompt": "<s>Hel", "completion": "lo"}, "<s>", "</s>"),
    ],
)
def test_a_text_that_has_the_special_tokens_gets_no_second_ones(tmp_path, row, begin, end):
    folder = tokenizer(tmp_path)
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", words.token_to_id("<s>")), ("</s>", words.token_to_id("</s>"))]
    )
    words.save(str(folder / "tokenizer.json"))
    ((encoded, _),) = ChatTokenizer.open(folder).encode([Row.of(row, "line 1")], answers=True)
    expected = words.encode(f"{begin}Hello{end}", add_special_tokens=False).ids
    assert encoded.ids.tolist() == expected
