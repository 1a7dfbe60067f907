"""LoRA of a small language model on a new kind of text, beside PEFT from the same initial adapter on the same batches.

A Llama of 111,000 parameters learns the characters of Python's manual (`pydoc_data`), trained by onnxtrain. Its adapter
then learns scikit-learn's descriptions of data sets: by onnxtrain on the ONNX file, and by PEFT on the PyTorch module
with the same weights. Source of LoRA: Hu et al., "LoRA: low-rank adaptation of large language models", 2021.
"""

from __future__ import annotations

import importlib.resources
import logging
import tempfile
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import peft
import torch
import transformers

import onnxtrain

LETTERS, LENGTH, BATCH = 128, 64, 16
STEPS, TUNING = 1500, 300


class Logits(torch.nn.Module):
    """The logits of tokens, and nothing else."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute logits [N, T, V]."""
        return self.inner(input_ids=input_ids, use_cache=False).logits


def llama(seed: int) -> torch.nn.Module:
    """A small Llama with random weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=LETTERS, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def windows(text: str) -> np.ndarray:
    """Cut a text into rows of characters [N, LENGTH + 1]."""
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int64)
    return codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)


def descriptions() -> str:
    """The texts on data sets in scikit-learn's package."""
    folder = importlib.resources.files("sklearn.datasets") / "descr"
    return "\n".join(file.read_text() for file in sorted(folder.iterdir(), key=str) if file.name.endswith(".rst"))


def batches(rows: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    """Rows of each step."""
    rng = np.random.default_rng(seed)
    return [rows[rng.choice(len(rows), BATCH, replace=False)] for _ in range(steps)]


def train(options, seed: int) -> dict[str, float]:
    """Train the model and both adapters; return perplexities per character, and the difference of the losses."""
    steps, tuning = (100, 20) if options.quick else (STEPS, TUNING)
    torch.set_num_threads(1)
    module, text = llama(seed), windows(descriptions())
    held_out, text = text[::5], np.delete(text, np.s_[::5], axis=0)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's exporter, about itself
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        folder = Path(name)
        example = torch.zeros(2, LENGTH, dtype=torch.int64)
        torch.onnx.export(
            Logits(module), (example,), folder / "llama.onnx", input_names=["input_ids"], output_names=["logits"],
            dynamo=True, dynamic_shapes={"input_ids": {0: "batch"}}, opset_version=18, external_data=False,
            optimize=False, verbose=False,
        )  # fmt: skip
        base = onnxtrain.Trainer(
            folder / "llama.onnx", loss="softmax_cross_entropy(axis=-1)", optimizer="adamw(lr=3e-3)", clip_norm=1.0,
            seed=seed, threads=1,
        )  # fmt: skip
        for rows in batches(windows("\n".join(topics.values())), steps, seed):
            base.train_step(rows[:, :-1], rows[:, 1:])
        base.save(folder / "base.onnx")
        trained = {key.removeprefix("inner."): torch.from_numpy(value) for key, value in base.get_weights().items()}
        module.load_state_dict(trained)

        torch.manual_seed(seed)
        settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        adapted = peft.get_peft_model(module, settings)
        adapted.save_pretrained(folder / "first", save_embedding_layers=False)
        ours = onnxtrain.Trainer(
            folder / "base.onnx", loss="softmax_cross_entropy(axis=-1)", optimizer="adamw(lr=5e-3, weight_decay=0.01)",
            lora=onnxtrain.Lora(adapter=folder / "first"), seed=seed, threads=1,
        )  # fmt: skip
        before = ours.evaluate(held_out[:, :-1], held_out[:, 1:])["loss"]
        chosen = batches(text, tuning, seed + 1)
        losses = [ours.train_step(rows[:, :-1], rows[:, 1:]) for rows in chosen]
        after = ours.evaluate(held_out[:, :-1], held_out[:, 1:])["loss"]
        peer_losses, peer = train_with_peft(adapted, chosen, held_out)
    return {
        "perplexity before": float(np.exp(before)),
        "perplexity, onnxtrain": float(np.exp(after)),
        "perplexity, PEFT": float(np.exp(peer)),
        "largest difference of a step's loss": float(np.abs(np.subtract(losses, peer_losses)).max()),
    }


def train_with_peft(
    model: torch.nn.Module, chosen: list[np.ndarray], held_out: np.ndarray
) -> tuple[list[float], float]:
    """Train PEFT's adapter; return the losses of the steps, and the loss of the held-out rows."""

    def loss_of(rows: np.ndarray) -> torch.Tensor:
        given = torch.from_numpy(rows)
        logits = model(input_ids=given[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, LETTERS), given[:, 1:].reshape(-1))

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.01)
    losses = []
    for rows in chosen:
        optimizer.zero_grad()
        loss = loss_of(rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, loss_of(held_out).item()
