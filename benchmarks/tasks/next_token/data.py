"""Sequences that count upwards from a random start, padded to one length; and a small GPT-2 with random weights."""

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def sequences(count: int = 320) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, 12], and where they are [N, 12]."""
    rng = np.random.default_rng(0)
    mask = (np.arange(12) < rng.integers(6, 13, count)[:, None]).astype(np.int64)
    step, start = rng.integers(1, 3, count), rng.integers(0, 30, count)
    return (start[:, None] + step[:, None] * np.arange(12)) % 30 * mask, mask


def gpt2() -> GPT2LMHeadModel:
    """A GPT-2 of two layers without dropout, so that both sides train identically."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_positions": 12, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(attn_implementation="eager", use_cache=False, **sizes, **dropout)).eval()


class _Logits(torch.nn.Module):
    """The model as a function of tokens and mask."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits [N, T, classes]."""
        return self.model(input_ids=tokens, attention_mask=mask).logits


def gpt2_file() -> str:
    """The same as an ONNX file, the starting point without PyTorch."""
    tokens, mask = (torch.tensor(array[:2]) for array in sequences())
    axes = {"input_ids": {0: "batch"}, "attention_mask": {0: "batch"}}
    names = {"input_names": list(axes), "output_names": ["logits"], "dynamic_axes": axes}
    torch.onnx.export(_Logits(), (tokens, mask), "gpt2.onnx", dynamo=False, **names)
    return "gpt2.onnx"
