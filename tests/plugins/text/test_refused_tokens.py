"""Refusals of data for language models: tokens that the model lacks, empty batches, losses that are not for texts."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxtrain
from onnxtrain import adapters, examples
from onnxtrain.errors import DataError, ModelError, OptionError
from plugins.text.chats import CHATS, language_model, tokenizer, write_rows
from sentences import raises_sentence
from zoo import language_model as zoo

IDS = np.random.default_rng(0).integers(0, zoo.WORDS, (4, 8))
DATA = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "labels": IDS}


def trainer(**options):
    return onnxtrain.Trainer(zoo.language_model(), **{"loss": "next_token", "output": "logits", **options})


def with_token(value):
    ids = IDS.copy()
    ids[2, 3] = value
    return {**DATA, "input_ids": ids}


@pytest.mark.parametrize("token", [-1, -3, zoo.WORDS, 1000])
def test_tokens_that_the_model_lacks(token):
    data = with_token(token)
    inputs = {name: data[name] for name in ("input_ids", "attention_mask")}
    message = rf"'input_ids'.* has the value {token} at example 2, but the model looks it up in a table of 40 rows"
    own = trainer()
    with pytest.raises(DataError, match=message):
        own.fit(data, epochs=1, batch_size=4, progress=False)
    with pytest.raises(DataError, match=message):
        own.train_step(inputs, IDS)
    with pytest.raises(DataError, match=message):
        own.predict(inputs)
    with pytest.raises(DataError, match=message):
        onnxtrain.predict(zoo.language_model(), inputs)
    with pytest.raises(DataError, match=message):
        own.evaluate(data)


@pytest.mark.parametrize(
    ("nodes", "output", "limited"),
    [
        ("y = Gather(t, i)", "float[N, 2, 3]", True),
        ("j = Cast<to = 7>(i)  k = Unsqueeze(j, last)  y = Gather(t, k)", "float[N, 2, 1, 3]", True),
        ("h = Identity(t)  y = Gather(h, i)", "float[N, 2, 3]", True),
        ("y = Gather<axis = 1>(t, i)", "float[4, N, 2]", False),  # columns
        ("h = Exp(t)  y = Gather(h, i)", "float[N, 2, 3]", False),  # no table of embeddings
        ("y = Gather(sizes, i)", "int64[N, 2, 2]", False),  # integers
    ],
)
def test_only_embeddings_limit_their_inputs(nodes, output, limited):
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> f (int64[N, 2] i) => ({output} y)
        <int64[1] last = {{-1}}, int64[4, 2] sizes = {{0, 1, 2, 3, 4, 5, 6, 7}}> {{ {nodes} }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "t"))
    if limited:
        with pytest.raises(DataError, match="has the value -2 at example 0"):
            onnxtrain.predict(model, np.array([[-2, 0]]))
    else:
        onnxtrain.predict(model, np.array([[-2, 0]]))


@pytest.mark.parametrize("loss", ["next_token", "next_token(chunk=4)"])
def test_empty_batches(loss):
    own = trainer(loss=loss)
    none = {name: DATA[name][:0] for name in ("input_ids", "attention_mask")}
    with raises_sentence("batch_is_empty", what="input 'input_ids' of the batch", got=(0, 8)):
        own.train_step(none, IDS[:0])
    short = {name: DATA[name][:, :0] for name in ("input_ids", "attention_mask")}
    with raises_sentence("batch_without_tokens", what="input 'input_ids' of the batch", got=(4, 0)):
        own.train_step(short, IDS[:, :0])
    with pytest.raises(DataError, match="at least one example is needed"):
        own.fit({**none, "labels": IDS[:0]}, epochs=1, progress=False)


def test_empty_batches_of_other_models():
    own = onnxtrain.Trainer(examples.mlp((4, 3)), loss="cross_entropy")
    with raises_sentence("batch_is_empty", what="input 'input' of the batch", got=(0, 4)):
        own.train_step(np.zeros((0, 4), np.float32), np.zeros(0, int))


@pytest.mark.thorough
def test_logits_in_chunks_where_the_model_declares_no_shapes():
    """The model has no shapes between its nodes: those of the logits and of the matrix tell the rows'."""
    inputs = {name: DATA[name] for name in ("input_ids", "attention_mask")}
    losses = [
        [trainer(loss=loss).train_step(inputs, IDS) for _ in range(2)] for loss in ("next_token", "next_token(chunk=5)")
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_logits_that_cannot_be_computed_in_chunks():
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> f (int64[N, T] i, float[N, 5, 6] w) => (float[N, T, 6] logits) {
        e = Gather(t, i)  logits = MatMul(e, w) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 5), np.float32), "t"))
    message = (
        r"one matrix for all rows.*they come from MatMul of 'e' \['N', 'T', 5\], 'w' \['N', 5, 6\]\. Leave chunk out"
    )
    with pytest.raises(OptionError, match=message):
        onnxtrain.Trainer(model, loss="next_token(chunk=2)")


@pytest.mark.parametrize("given", [None, 3, ["model.onnx"]])
def test_models_that_are_none(given):
    for call in (onnxtrain.gradient, onnxtrain.inspect, lambda one: onnxtrain.Trainer(one, loss="mse")):
        with pytest.raises(ModelError, match=f"The model is a {type(given).__name__}; it needs a path or"):
            call(given)


@pytest.mark.parametrize("loss", ["mse", "bce", "cross_entropy"])
def test_losses_that_are_not_for_texts(tmp_path, loss):
    pytest.importorskip("tokenizers", reason="tokenizers are not installed")
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    path = language_model(tokenizer(tmp_path) / "model.onnx")
    rows = write_rows(tmp_path / "chat.jsonl", [{"messages": chat} for chat in CHATS])
    with raises_sentence("texts_and_loss"):
        onnxtrain.Trainer(path, loss=loss).fit(rows, epochs=1, progress=False)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, "line 1 of '.*' is a number; a row needs messages"),
        (None, "is null; a row needs messages"),
        ([1], "is a list; a row needs messages"),
        ("word", "is a text; a row needs messages"),
        ({"text": 3}, "text of line 1 of '.*' is a number; it needs a text"),
        ({"messages": 2.5}, "messages of line 1 of '.*' is a number; it needs a list"),
        ({"messages": [{"role": "user", "content": True}]}, "is true or false; it needs a text"),
    ],
)
def test_rows_of_other_kinds(tmp_path, row, message):
    pytest.importorskip("tokenizers", reason="tokenizers are not installed")
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    path = language_model(tokenizer(tmp_path) / "model.onnx")
    with pytest.raises(DataError, match=message):
        onnxtrain.Trainer(path, loss="next_token").fit(
            write_rows(tmp_path / "rows.jsonl", [row]), epochs=1, progress=False
        )


def test_the_rank_of_an_adapter_to_continue_with(tmp_path):
    file = tmp_path / "four.onnx_adapter"
    model = examples.mlp((4, 8, 3))
    onnxtrain.Trainer(model, loss="cross_entropy", lora=onnxtrain.Lora(rank=4, targets="*")).save(file)
    for rank in (4, 8):  # its own, and the default
        onnxtrain.Trainer(model, loss="cross_entropy", lora=onnxtrain.Lora(rank=rank, adapter=file))
    message = "rank of Lora is 16, but the adapter '.*' has rank 4, which continues; leave rank out"
    with pytest.raises(OptionError, match=message):
        onnxtrain.Trainer(model, loss="cross_entropy", lora=onnxtrain.Lora(rank=16, adapter=file))
    assert adapters.describe_adapter(file)


def test_tokens_per_second_are_in_the_history(tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers are not installed")
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    path = language_model(tokenizer(tmp_path) / "model.onnx")
    rows = write_rows(tmp_path / "chat.jsonl", [{"messages": chat} for chat in CHATS])
    history = onnxtrain.Trainer(path, loss="next_token").fit(rows, epochs=2, progress=False, run=tmp_path / "run")
    assert all(row["tokens_per_second"] > 0 for row in history.rows)
    assert "tokens per second" in (tmp_path / "run" / "report.html").read_text()
    plain = onnxtrain.Trainer(examples.mlp((4, 3)), loss="cross_entropy")
    history = plain.fit(np.zeros((4, 4), np.float32), np.arange(4) % 3, epochs=1, progress=False)
    assert "tokens_per_second" not in history.rows[0]
