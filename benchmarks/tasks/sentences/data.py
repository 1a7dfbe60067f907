"""Token sequences, class 1 if a positive token occurs; and a small BERT with random weights."""

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification


def sentences(count: int = 500) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [N, 12], where they are [N, 12], and classes [N]."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 13, count)
    mask = (np.arange(12) < lengths[:, None]).astype(np.int64)
    tokens = rng.integers(10, 60, (count, 12)) * mask
    labels = rng.integers(0, 2, count)
    tokens[labels == 1, 2] = rng.integers(3, 6, (labels == 1).sum())
    return tokens, mask, labels


def bert() -> BertForSequenceClassification:
    """A BERT of two layers without dropout, so that both sides train identically."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=60, max_position_embeddings=16, attn_implementation="eager", **sizes)
    return BertForSequenceClassification(config).eval()
