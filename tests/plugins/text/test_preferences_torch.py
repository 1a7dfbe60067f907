"""Preference losses and reward models against TRL: the same rows, adapters and optimizer give the same losses."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain
from onnxtrain.plugins.text import ComparisonData
from plugins.text.chats import tokenizer

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytest.importorskip("tokenizers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),  # of PyTorch, its exporter, PEFT and TRL, about themselves
]

STEPS, VOCABULARY, RATE = 20, 330, 3e-3

PLAIN = {
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "weight_decay": 0.01,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_strategy": "no",
}
"""Settings of TRL's trainers: AdamW at a constant rate without clipping, in float32, and silent."""

PAIRS = [
    {"prompt": f"What is {number} and two?\n", "chosen": f"It is {number + 2}.", "rejected": rejected}
    for number, rejected in enumerate(["No.", "I will not say what it is.", "Ask me again later!", "Seven"] * 4)
]
JUDGED = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in PAIRS[:4]
    for name in ("chosen", "rejected")
]


def network(kind: str = "LlamaForCausalLM"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="eager",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
    )
    return getattr(transformers, kind)(config).eval()


class Outputs(torch.nn.Module):
    """Logits, or scores by token, of tokens and nothing else: padding on the right changes no token before it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids):
        mask = torch.ones_like(input_ids)
        hidden = self.inner.model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
        return (self.inner.lm_head if hasattr(self.inner, "lm_head") else self.inner.score)(hidden)


def exported(path: Path, kind: str) -> Path:
    torch.onnx.export(
        Outputs(network(kind)),
        (torch.ones(2, 5, dtype=torch.int64),),
        str(path),
        input_names=["input_ids"],
        output_names=["logits"],
        dynamo=False,
        dynamic_axes={"input_ids": {0: "batch", 1: "tokens"}, "logits": {0: "batch", 1: "tokens"}},
        opset_version=18,
    )
    return path


def adapted(folder: Path, kind: str):
    """A model of PEFT whose adapter is not zero, and the folder of the adapter."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    model = peft.get_peft_model(network(kind), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


class Losses(onnxtrain.callbacks.Callback):
    def __init__(self):
        self.found = []

    def on_step_end(self, state):
        self.found.append(state.loss)


def losses_of_trl(trainer, config, model, rows, folder: Path, batch: int, **settings):
    found = []

    class Recording(trainer):
        def compute_loss(self, *arguments, **options):
            loss = super().compute_loss(*arguments, **options)
            found.append(loss.item())
            return loss

    arguments = config(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=batch,
        max_steps=STEPS,
        **PLAIN,
        **settings,
    )
    words = transformers.PreTrainedTokenizerFast.from_pretrained(folder, add_bos_token=True)
    with contextlib.redirect_stdout(None):
        Recording(
            model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=words
        ).train()
    return found


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo", "reward", "ipo", "simpo", "cpo"])
def test_losses_are_those_of_trl(tmp_path, name):
    folder = tokenizer(tmp_path / "words")
    kind = "LlamaForSequenceClassification" if name == "reward" else "LlamaForCausalLM"
    path, model = exported(tmp_path / "model.onnx", kind), adapted(tmp_path / "first", kind)
    rows, batch = JUDGED if name == "kto" else PAIRS, 4
    given = {"train_sampling_strategy": "sequential"}
    if name in ("dpo", "ipo"):
        trainer, config = trl.DPOTrainer, trl.DPOConfig
        given |= {"loss_type": ["ipo"]} if name == "ipo" else {}
    elif name in ("simpo", "cpo"):
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        trainer, config = CPOTrainer, CPOConfig
        if name == "simpo":
            given |= {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}
    elif name == "kto":
        trainer, config = trl.KTOTrainer, trl.KTOConfig
    elif name == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        trainer, config = ORPOTrainer, ORPOConfig
    else:
        trainer, config = trl.RewardTrainer, trl.RewardConfig
    expected = losses_of_trl(trainer, config, model, rows, folder, batch, **given)
    learner = onnxtrain.Trainer(
        path,
        loss=name,
        optimizer=f"adamw(lr={RATE}, weight_decay=0.01)",
        lora=onnxtrain.Lora(adapter=tmp_path / "first"),
    )
    kept = Losses()
    learner.fit(
        ComparisonData(rows, folder),
        batch_size=batch,
        epochs=-(-STEPS * batch // len(rows)),
        shuffle=False,
        callbacks=[kept],
        progress=False,
    )
    assert len(expected) == len(kept.found) == STEPS
    assert expected[-1] < expected[0] - 0.01
    assert max(abs(one - other) for one, other in zip(kept.found, expected, strict=True)) < 1e-4


@pytest.mark.parametrize("precision", ["fp32", pytest.param("int4", marks=pytest.mark.sweep)])
def test_folders_of_genai(tmp_path, precision):
    """A model of the builder, with its tokenizer beside it: the losses of the export, or ones that fall."""
    pytest.importorskip("onnxruntime_genai")
    words, checkpoint = tokenizer(tmp_path / "words"), tmp_path / "checkpoint"
    network().save_pretrained(checkpoint)
    transformers.PreTrainedTokenizerFast.from_pretrained(words).save_pretrained(checkpoint)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", "checkpoint", "-o", "folder"]
    command += ["-p", precision, "-e", "cpu", "-c", "cache"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    adapted(tmp_path / "first", "LlamaForCausalLM")

    def losses(model, **options):
        kept = Losses()
        trainer = onnxtrain.Trainer(
            model, loss="dpo", optimizer=f"adamw(lr={RATE})", lora=onnxtrain.Lora(adapter=tmp_path / "first")
        )
        data = ComparisonData(PAIRS, **options)
        trainer.fit(data, batch_size=4, epochs=2, shuffle=False, callbacks=[kept], progress=False)
        trainer.save(tmp_path / "tuned")
        return kept.found

    found = losses(tmp_path / "folder")
    assert found[-1] < found[0] - 0.005
    if precision == "fp32":
        expected = losses(exported(tmp_path / "model.onnx", "LlamaForCausalLM"), tokenizer=words)
        assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) < 1e-4
