"""Reinforcement of language models: what is sampled, how it is rewarded, that the reward rises, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from distributed.threads import in_threads
from onnxtrain.errors import DataError, OptionError
from onnxtrain.plugins.text.generation import generate, next_scores
from plugins.text.chats import language_model, tokenizer, write_rows
from zoo import language_model as zoo

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers are not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

PROMPTS = ["Say a", "Say it again", "What?"]


def count_of_e(prompts, completions, **columns):
    return [text.count("e") / 4 for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tokenizer(tmp_path_factory.mktemp("grpo") / "folder")
    language_model(made / "model.onnx")
    return made


def trainer(folder, loss="grpo", **options):
    return onnxtrain.Trainer(folder, loss=loss, **{"optimizer": "adam(lr=0.05)", **options})


def train(learner, prompts=PROMPTS, reward=count_of_e, **options):
    given = {"max_steps": 1, "batch_size": 2, "num_generations": 4, "max_completion_length": 4, **options}
    return onnxtrain.text.grpo(learner, prompts, reward, **given)


@pytest.mark.parametrize("loss", ["grpo", "grpo(beta=0.01, loss_type=grpo)"])
def test_rewards_rise(folder, loss):
    seen = []
    found = train(trainer(folder, loss), max_steps=30, num_generations=8, on_step=seen.append)
    assert seen == found
    assert [row["step"] for row in found] == [*range(1, 31)]
    first, last = (np.mean([row["reward"] for row in part]) for part in (found[:4], found[-4:]))
    assert first < 0.2
    assert last > 0.6
    assert ("kl" in found[0]) == ("beta" in loss)
    assert all(row.get("kl", 0) >= 0 for row in found)


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_other_columns_of_a_file_reach_the_rewards(folder, tmp_path, ending):
    if ending == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            arrow.table({"prompt": PROMPTS, "answer": ["a", "b", "c"]}), tmp_path / "d.parquet"
        )
    elif ending == "csv":
        lines = [f"{prompt},{answer}" for prompt, answer in zip(PROMPTS, "abc", strict=True)]
        (tmp_path / "d.csv").write_text("\n".join(["prompt,answer", *lines]))
    else:
        write_rows(tmp_path / "d.jsonl", [{"prompt": p, "answer": a} for p, a in zip(PROMPTS, "abc", strict=True)])
    seen = set()

    def reward(prompts, completions, answer, **columns):
        seen.update(zip(prompts, answer, strict=True))
        return (1.0 for _ in prompts)  # any iterable

    train(trainer(folder), tmp_path / f"d.{ending}", reward, batch_size=3)
    assert seen == set(zip(PROMPTS, "abc", strict=True))


def test_reward_functions_of_one_name_are_told_apart(folder):
    (row,) = train(
        trainer(folder), PROMPTS, [lambda prompts, value=value, **_: [value] * len(prompts) for value in (1, 3)]
    )
    assert {name: row[name] for name in row if "lambda" in name} == {
        "rewards/<lambda>/mean": 1,
        "rewards/<lambda>_2/mean": 3,
    }


def test_a_prompt_that_fills_the_model_is_refused(folder, tmp_path):
    """Its answer would be empty."""
    model = onnx.load(folder / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_value = 12
    fixed = tokenizer(tmp_path / "fixed")
    onnx.save(model, fixed / "model.onnx")
    long = "What is two and two? Guten Tag " * 2
    with pytest.raises(DataError, match=r"row 1 of the prompts has \d+ tokens, but the model takes 12 with the answer"):
        train(trainer(fixed), ["a", long])
    rows = [{"prompt": long, "completion": " Four"}]
    for callback in (onnxtrain.callbacks.Answers(rows), onnxtrain.callbacks.Samples(long)):
        with pytest.raises(
            DataError, match=r"the prompt .* tokens, but the model takes 12 with the answer; shorten it"
        ):
            trainer(fixed, "next_token").fit([{"text": "Guten Tag"}], epochs=1, callbacks=[callback], progress=False)


def test_several_processes_are_refused(folder):
    def trained(communicator):
        learner = trainer(folder, distributed=communicator, threads=1)
        with pytest.raises(OptionError, match=r"^grpo samples .* in one process, but 2 train together; leave distrib"):
            train(learner)

    in_threads(2, trained)


def test_samples_and_steps_repeat_with_their_seed(folder):
    one, same, other = (train(trainer(folder), max_steps=3, seed=seed, num_iterations=2) for seed in (1, 1, 2))
    assert one == same != other


def test_the_reference_is_the_model_without_adapters(folder):
    learner = trainer(folder, "grpo(beta=0.1)", lora=onnxtrain.Lora(rank=4, targets="all-linear"))
    found = train(learner, max_steps=4)
    assert found[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert found[-1]["kl"] > 1e-6


def test_what_reward_functions_get(folder):
    """Messages become messages, texts stay texts; other columns of the rows come along."""
    seen = []

    def reward(prompts, completions, completion_ids, answer, **more):
        seen.append((prompts, completions, completion_ids, answer))
        return [None, *range(len(prompts) - 1)]

    def zero(prompts, completions, **columns):
        return [0.5] * len(prompts)

    chat = [{"role": "user", "content": "Say a"}]
    rows = [{"prompt": chat, "answer": "a"}, {"prompt": "Say b", "answer": "b"}]
    (row,) = train(trainer(folder), rows, [reward, zero], reward_weights=[1, 2])
    ((prompts, completions, ids, answers),) = seen
    assert len(prompts) == len(completions) == len(ids) == len(answers) == 8
    for prompt, completion, answer in zip(prompts, completions, answers, strict=True):
        assert prompt == (chat if answer == "a" else "Say b")
        (text,) = [completion] if answer == "b" else [message["content"] for message in completion]
        assert isinstance(text, str)
    assert row["rewards/reward/mean"] == 3
    assert row["reward"] == pytest.approx(sum(range(7)) / 8 + 1)


class Words:
    """A model of two tokens that counts up, and notes what it is asked."""

    length, rows = None, None

    def __init__(self):
        self.asked = []

    def begin(self):
        pass

    def keep(self, rows):
        pass

    def __call__(self, ids):
        self.asked.append(np.array(ids))
        return np.eye(9)[ids[:, -1] + 1] * 5


def test_prompts_of_one_length_are_one_batch():
    model = Words()
    assert generate(model, [[1], [5, 2], [6]], 9, {8}) == [[2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8], [7, 8]]
    assert [len(rows) for rows in model.asked] == [2, 2, 1, 1, 1, 1, 1] + [1] * 6
    assert generate(model, [[1], [6]], 2) == [[2, 3], [7, 8]]


def test_samples_have_the_probabilities_of_the_model():
    counts = np.bincount([row[0] for row in generate(Words(), [[3]] * 4000, 1, temperature=4.0)], minlength=9) / 4000
    expected = np.exp(np.eye(9)[4] * 5 / 4)
    assert np.abs(counts - expected / expected.sum()).max() < 0.03
    assert {row[0] for row in generate(Words(), [[3]] * 50, 1, temperature=100.0, top_k=1)} == {4}


@pytest.mark.parametrize("fixed", [False, True])
def test_a_batch_continues_as_each_row_alone(tmp_path, fixed):
    """With a cache, and with a batch size that the file fixes."""
    model = zoo.language_model()
    if fixed:
        model = onnx.load(language_model(tmp_path / "model.onnx"))
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 2
    learner = onnxtrain.Trainer(model, loss="next_token", output="logits")
    scores = next_scores(learner)
    prompts = [[3, 4, 5], [7, 8, 2], [5], [4, 4, 4], [9, 2, 3]]
    together = generate(scores, prompts, 5, {6})
    assert together == [answer for prompt in prompts for answer in generate(scores, [prompt], 5, {6})]
    for prompt, answer in zip(prompts, together, strict=True):
        known = list(prompt)
        for token in answer:
            ids = np.array([known] * (2 if fixed else 1))
            logits = learner.predict({"input_ids": ids, "attention_mask": np.ones_like(ids)})
            logits = logits["logits"] if isinstance(logits, dict) else logits
            assert token == int(logits[0, -1].argmax())
            known.append(token)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_steps": 0}, OptionError, "max_steps is 0; it needs an integer of at least 1."),
        ({"num_generations": 1}, OptionError, "num_generations is 1; it needs an integer of at least 2."),
        ({"use_genai": True}, OptionError, "onnxruntime-genai cannot sample here: it needs adapters"),
        ({"reward": []}, OptionError, "reward_funcs is .*; it needs a function of"),
        ({"reward_weights": [1, 2]}, OptionError, "needs a finite number for each of the 1 reward functions"),
        ({"reward": lambda **given: [1]}, DataError, "returned 1 rewards for 8 completions"),
        ({"reward": lambda **given: ["a"] * 8}, DataError, "it needs a list of numbers"),
        ({"reward": lambda **given: [float("inf")] * 8}, DataError, "returned inf; a reward is a finite number"),
        ({"prompts": []}, DataError, "There are no prompts; give a list of texts"),
        ({"prompts": [{"text": "a"}]}, DataError, "row 0 of the prompts is a row with 'text'; it needs a text"),
        ({"prompts": [3]}, DataError, "row 0 of the prompts is a number; it needs a text, or a column prompt."),
    ],
    ids=str,
)
def test_refusals(folder, options, error, message):
    with pytest.raises(error, match=message):
        train(trainer(folder), **options)


def test_the_python_of_the_page(folder, monkeypatch, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "language_models.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", page.partition("## Reinforcement")[2].partition("\n## ")[0], re.DOTALL)
    (tmp_path / "folder").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    short = block.replace("max_steps=100", "max_steps=2").replace("max_completion_length=64", "max_completion_length=4")
    exec(
        short.replace("lora=onnxtrain.Lora(rank=8)", 'lora=onnxtrain.Lora(rank=8, targets="*")'),
        {"onnxtrain": onnxtrain},
    )
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_another_loss_and_texts_to_fit_are_refused(folder):
    with pytest.raises(OptionError, match=r"with the loss next_token; give Trainer\(..., loss=\"grpo\"\)."):
        train(trainer(folder, "next_token"))
    with pytest.raises(DataError, match=r"samples; call onnxtrain.text.grpo"):
        trainer(folder).fit([{"prompt": "Say a"}])
