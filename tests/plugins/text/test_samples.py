"""Samples of text during training: what they say, when, and that they change nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import callbacks
from onnxtrain.errors import DataError, OptionError
from onnxtrain.plugins.text.samples import continued, text_generator
from plugins.text.chats import CHATS, language_model, tokenizer, write_rows
from sentences import raises_sentence
from zoo import language_model as zoo

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

FIT = {"epochs": 2, "batch_size": 2, "progress": False}


@pytest.fixture
def files(tmp_path):
    language_model(tokenizer(tmp_path / "folder") / "model.onnx")
    write_rows(tmp_path / "chat.jsonl", [{"messages": chat} for chat in CHATS] * 3)
    return tmp_path


def trainer(files, **options):
    return onnxtrain.Trainer(files / "folder", **{"loss": "next_token", "optimizer": "adam(lr=0.05)", **options})


def words(files):
    return tokenizers.Tokenizer.from_file(str(files / "folder" / "tokenizer.json"))


def test_samples_are_the_most_probable_tokens(files):
    """The model reads one token, so that each token of the answer follows from the one before it."""
    lines = []
    samples = callbacks.Samples("And a smile?", tokens=12, show=lines.append)
    own = trainer(files)
    own.fit(files / "chat.jsonl", callbacks=[samples], **FIT)
    assert [row["step"] for row in samples.rows] == [3, 6]
    known = words(files)
    asked = known.encode(
        "<|im_start|>user\nAnd a smile?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    ).ids
    wanted = []
    for _ in range(12):
        ids = np.array([asked + wanted])
        token = int(own.predict({"input_ids": ids, "attention_mask": np.ones_like(ids)})[0, -1].argmax())
        if token in (known.token_to_id("</s>"), known.token_to_id("<|im_end|>")):
            break
        wanted.append(token)
    assert samples.rows[-1]["answer"] == known.decode(wanted)
    assert lines[-1].startswith("step 6: And a smile? -> ")
    assert len(lines[-1].splitlines()) == 1


def test_losses_that_compare_answers_have_samples_too(files):
    """The rows of an example are joined for the loss; a sample is one row, by the weights that are trained."""
    pairs = [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [{"role": "assistant", "content": "No."}]}
        for chat in CHATS
    ]
    samples = callbacks.Samples("And a smile?", tokens=6)
    own = trainer(files, loss="dpo", lora=onnxtrain.Lora(rank=4, targets="all-linear"))
    own.fit(pairs * 3, callbacks=[samples], **FIT)
    own.save(files / "tuned.onnx")
    (files / "folder" / "model.onnx").write_bytes((files / "tuned.onnx").read_bytes())
    same = callbacks.Samples("And a smile?", tokens=6, every=1)
    trainer(files, optimizer="sgd(lr=1e-30)").fit(files / "chat.jsonl", callbacks=[same], **FIT)
    assert samples.rows[-1]["answer"] == same.rows[0]["answer"] != samples.rows[0]["answer"]


def test_losses_on_scores_have_no_samples(files):
    with raises_sentence("samples_need_tokens", what="samples", got="multiple_negatives"):
        trainer(files, loss="multiple_negatives").fit(
            [{"query": each, "positive": "b"} for each in "acde"], callbacks=[callbacks.Samples("a")], **FIT
        )


def test_a_tokenizer_without_template_continues_the_text(files):
    samples = callbacks.Samples("Say hello", tokens=3)
    (files / "folder" / "tokenizer_config.json").write_text("{}")
    rows = write_rows(files / "text.jsonl", [{"text": "Say hello to all"}] * 4)
    own = trainer(files)
    own.fit(rows, callbacks=[samples], **FIT)
    ids = np.array([words(files).encode("Say hello").ids])
    first = int(own.predict({"input_ids": ids, "attention_mask": np.ones_like(ids)})[0, -1].argmax())
    assert samples.rows[-1]["answer"].startswith(words(files).decode([first]).split("\ufffd")[0])


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (4, [4, 6]), (3, [3, 6]), (None, [3, 6])])
def test_steps_with_samples(files, every, steps):
    samples = callbacks.Samples(["a", "b"], every=every, tokens=1)
    trainer(files).fit(files / "chat.jsonl", callbacks=[samples], **FIT)
    assert [(row["step"], row["prompt"]) for row in samples.rows] == [(step, name) for step in steps for name in "ab"]


def test_samples_do_not_change_the_training(files):
    plain, sampled = trainer(files), trainer(files)
    plain.fit(files / "chat.jsonl", **FIT)
    sampled.fit(files / "chat.jsonl", callbacks=[callbacks.Samples("a", every=1, tokens=2)], **FIT)
    for name, value in plain.parameters.items():
        assert np.array_equal(sampled.parameters[name], value)


def test_a_model_of_fixed_length(files, monkeypatch):
    model = onnx.load(files / "folder" / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_value = 24
    onnx.save(model, files / "folder" / "model.onnx")
    made = []
    monkeypatch.setattr(
        "onnxtrain.plugins.text.samples.continued",
        lambda *given: made.append((given[0], continued(*given))) or made[-1][1],
    )
    samples = callbacks.Samples("And a smile?", tokens=40)
    trainer(files).fit(write_rows(files / "c.jsonl", [{"text": "Four."}] * 4), callbacks=[samples], **FIT)
    assert len(made) == 2
    assert all(len(asked) + len(answer) <= 24 for asked, answer in made)
    assert len(made[0][0]) < 24


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"bits": 4}, marks=pytest.mark.thorough), {"dtype": "float16"}], ids=str
)
def test_a_cache_gives_the_tokens_of_the_whole_sequence(settings, tmp_path):
    """A model of onnxruntime-genai's builder reads each token once; the same tokens follow from the whole sequence."""
    onnx.save(zoo.language_model(**settings), tmp_path / "model.onnx")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(zoo.WORDS)}, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ids = np.tile(np.arange(8) + 3, (4, 1))
    data = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    samples = callbacks.Samples(["t3 t4 t5", "t7"], every=20, tokens=4, tokenizer=words)
    own = onnxtrain.Trainer(tmp_path / "model.onnx", loss="next_token", output="logits", optimizer="adam(lr=0.01)")
    own.fit(data, epochs=20, batch_size=2, callbacks=[samples], progress=False)
    assert [row["answer"] for row in samples.rows[-2:]] == ["t6 t7 t8 t9", "t8 t9 t10 t10"] or settings
    for prompt, row in (([3, 4, 5], samples.rows[-2]), ([7], samples.rows[-1])):
        known = list(prompt)
        for _ in range(4):
            inputs = {"input_ids": np.array([known]), "attention_mask": np.ones((1, len(known)), int)}
            known.append(int(own.predict(inputs)["logits"][0, -1].argmax()))
        assert row["answer"] == words.decode(known[len(prompt) :])
    generator = text_generator(own, words)
    assert generator._model._caches


def test_generation_ends():
    scores = {1: 2, 2: 3, 3: 4, 4: 4}

    def last(ids):
        return np.eye(5)[scores[ids[-1]]]

    assert continued([1], last, 9, {4}, None) == [2, 3]
    assert continued([1], last, 2, set(), None) == [2, 3]
    assert continued([1], last, 9, set(), 3) == [2, 3]
    assert continued([1, 2, 3], last, 9, set(), 3) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: callbacks.Samples(""), "prompts of Samples is ''; it needs a text"),
        (lambda: callbacks.Samples(["a", 3]), "prompts of Samples is .* it needs a text, or several"),
        (lambda: callbacks.Samples("a", every=0), "every of Samples is 0; it needs an integer of at least 1"),
        (lambda: callbacks.Samples("a", tokens=True), "tokens of Samples is True; it needs an integer"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_other_models_have_no_samples():
    own = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="cross_entropy")
    data = np.zeros((4, 4), np.float32), np.arange(4) % 3
    with raises_sentence("tokenizer_unknown"):
        own.fit(*data, callbacks=[callbacks.Samples("a")], progress=False)
    with pytest.raises(DataError, match="texts become integers"):
        own.fit(
            *data,
            callbacks=[callbacks.Samples("a", tokenizer=tokenizers.Tokenizer(tokenizers.models.BPE()))],
            progress=False,
        )


KILLED = """
import os, signal, sys
import onnxtrain
class Kill(onnxtrain.callbacks.Callback):
    def on_step_end(self, state):
        if state.step == {step}:
            os.kill(os.getpid(), signal.SIGKILL)
lora = onnxtrain.Lora(rank=2, targets="*", dropout=0.1)
trainer = onnxtrain.Trainer("folder", loss="next_token", lora=lora)
trainer.fit("chat.jsonl", epochs=3, batch_size=2, validation="chat.jsonl", checkpoint="kept", checkpoint_every=1,
            save_best="val_perplexity", resume={resume}, progress=False, callbacks=[Kill()])
trainer.save("out.onnx_adapter")
"""


def run_killed(files, step, *, resume=False):
    code = KILLED.format(step=step, resume=resume)
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=files, capture_output=True, text=True)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [2, 5])
def test_a_killed_training_on_chats_resumes_with_the_same_bits(files, step):
    """In the first and in the second epoch; the best adapter is the same, too."""
    other = files / "other"
    other.mkdir()
    for name in ("folder", "chat.jsonl"):
        (other / name).symlink_to(files / name)
    whole = run_killed(other, -1)
    assert whole.returncode == 0, whole.stderr
    assert run_killed(files, step).returncode == -signal.SIGKILL
    again = run_killed(files, -1, resume=True)
    assert again.returncode == 0, again.stderr
    for name in ("out.onnx_adapter", "kept/best.onnx_adapter"):
        assert (files / name).read_bytes() == (other / name).read_bytes()
