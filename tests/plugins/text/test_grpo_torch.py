"""Group relative policy optimization against TRL: the same samples give the same advantages and losses."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import numpy as np
import pytest

import onnxtrain
from onnxtrain.plugins.text.reading import reference
from onnxtrain.plugins.text.reinforcement import Answers, advantages_of
from plugins.text.chats import tokenizer
from plugins.text.test_preferences_torch import PLAIN, RATE, exported, network

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),  # of PyTorch, its exporter, PEFT and TRL, about themselves
]

STEPS = 4


def reward(prompts, completions, **columns):
    return [len(set(text)) / 4 for text in completions]


def recorded(model, folder, **settings):
    """The samples and the losses of TRL's trainer."""
    samples, losses = [], []

    class Recording(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            found = super()._generate_and_score_completions(inputs)
            samples.append({name: value.clone() for name, value in found.items()})
            return found

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            losses.append(loss.item())
            return loss

    arguments = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_steps=STEPS,
        **PLAIN,
        **settings,
    )
    words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    rows = datasets.Dataset.from_list([{"prompt": f"What is {number} and two?"} for number in range(6)])
    with contextlib.redirect_stdout(None):
        Recording(model=model, args=arguments, train_dataset=rows, reward_funcs=reward, processing_class=words).train()
    return samples, losses


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.5, "temperature": 0.7},
        pytest.param({"beta": 0.04, "loss_type": "grpo", "epsilon": 0.05}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_losses_are_those_of_trl(tmp_path, settings):
    folder = tokenizer(tmp_path / "words")
    path = exported(tmp_path / "model.onnx", "LlamaForCausalLM")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    model = peft.get_peft_model(network(), config)
    model.save_pretrained(tmp_path / "first", save_embedding_layers=False)
    samples, expected = recorded(model, folder, num_iterations=2, **settings)
    learner = onnxtrain.Trainer(
        path,
        loss=onnxtrain.losses.GRPO(**settings),
        optimizer=f"adamw(lr={RATE}, weight_decay=0.01)",
        lora=onnxtrain.Lora(adapter=tmp_path / "first"),
    )
    before, losses = reference(learner.config), []
    for sample in samples[: STEPS // 2]:
        found = {name: value.numpy() for name, value in sample.items()}
        rows = {
            kind: [
                ids[mask == 1].tolist() for ids, mask in zip(found[f"{kind}_ids"], found[f"{kind}_mask"], strict=True)
            ]
            for kind in ("prompt", "completion")
        }
        answers = Answers(rows["prompt"], rows["completion"], found["advantages"])
        inputs, targets = answers.arrays(learner.objective.inputs, 0)
        targets[:, 2] = learner.predict(inputs)
        (targets[:, 3],) = before(inputs, 8).values()
        losses += [learner.train_step(inputs, targets) for _ in range(2)]
    assert len(losses) == len(expected) == STEPS
    assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) < 1e-4
    assert np.abs(losses).max() > 1e-3


@pytest.mark.sweep
def test_advantages_are_those_of_trl(tmp_path):
    folder = tokenizer(tmp_path / "words")
    samples, _ = recorded(network(), folder)
    words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for sample in samples:
        texts = words.batch_decode(sample["completion_ids"], skip_special_tokens=True)
        rewards = np.array(reward([], texts)).reshape(-1, 4)
        assert np.allclose(advantages_of(rewards).reshape(-1), sample["advantages"], atol=1e-4)


@pytest.mark.sweep
def test_genai_samples_with_the_current_adapter(tmp_path):
    """The most probable tokens after some steps are those of the trainer, also for prompts of several lengths."""
    pytest.importorskip("onnxruntime_genai")
    words, checkpoint = tokenizer(tmp_path / "words"), tmp_path / "checkpoint"
    network().save_pretrained(checkpoint)
    transformers.PreTrainedTokenizerFast.from_pretrained(words).save_pretrained(checkpoint)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", "checkpoint", "-o", "folder"]
    subprocess.run([*command, "-p", "fp32", "-e", "cpu", "-c", "cache"], cwd=tmp_path, check=True, capture_output=True)
    settings = json.loads((tmp_path / "folder" / "genai_config.json").read_text())
    settings["search"] |= {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2}  # not what the policy samples from
    (tmp_path / "folder" / "genai_config.json").write_text(json.dumps(settings))
    lora = onnxtrain.Lora(rank=4, targets="all-linear")
    learner = onnxtrain.Trainer(tmp_path / "folder", loss="grpo", optimizer="adam(lr=0.02)", lora=lora)
    seen = []

    def few(prompts, completions, completion_ids, **columns):
        seen.append((list(prompts), completion_ids))
        return [-len(set(ids)) for ids in completion_ids]

    prompts = ["What is one?", "Say a", "Say b"]
    given = {"max_completion_length": 6, "batch_size": 3, "num_generations": 2}
    onnxtrain.text.grpo(learner, prompts, few, max_steps=3, use_genai=True, **given)
    onnxtrain.text.grpo(learner, prompts, few, max_steps=1, use_genai=True, top_k=1, **given)
    onnxtrain.text.grpo(learner, prompts, few, max_steps=1, use_genai=False, top_k=1, num_iterations=1, **given)
    assert [len(ids) for _, ids in seen] == [6] * 5
    first, second = (dict(zip(*each, strict=True)) for each in seen[-2:])
    assert first == second  # rewards of equal answers are equal, so that nothing was learned between them
