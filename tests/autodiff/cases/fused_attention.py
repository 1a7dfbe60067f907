"""Attention of this project's domain, which a graph pass emits for a model's own."""

import numpy as np

from autodiff.case import Case, case, normal

BATCH, QUERIES, KEYS, HEADS, SIZE, VALUE_SIZE = 2, 3, 5, 2, 4, 6
QKV = (
    normal(BATCH, QUERIES, HEADS, SIZE),
    normal(BATCH, KEYS, HEADS, SIZE, seed=1),
    normal(BATCH, KEYS, HEADS, VALUE_SIZE, seed=2),
)
PACKED = normal(BATCH, QUERIES, 3, HEADS, SIZE, seed=8)
FORBIDDEN = np.random.default_rng(0).random((QUERIES, KEYS)) < 0.4
FORBIDDEN[:, 1] = False
CAUSAL = np.where(np.tril(np.ones((QUERIES, KEYS))) > 0, 0, -np.inf)
EMPTY_ROW = np.where(np.arange(QUERIES)[:, None] == 1, -np.inf, normal(QUERIES, KEYS, seed=3))
KEPT = "abc"


def attention(label: str, *inputs: np.ndarray | None, **options) -> Case:
    """Create a case; by default the bias is a mask without a gradient, so that the kernel computes the others."""
    return case("Attention", *inputs, domain="onnxtrain", label=f"fused-{label}", **{"scale": 0.5, **options})


def masked(label: str, bias: np.ndarray, **options) -> Case:
    return attention(label, *QKV, bias, wrt=KEPT, **options)


def packed(label: str, *inputs: np.ndarray, **options) -> Case:
    """Create a case with queries, keys and values in one tensor."""
    return case("PackedAttention", *inputs, domain="onnxtrain", label=f"fused-{label}", scale=0.5, **options)


CASES = [
    attention("plain", *QKV),
    attention("opset-17", *QKV, opset=17, outputs=2, wrt=KEPT),
    attention("log-sum", *QKV, outputs=2),
    attention("bias-gradient", *QKV, normal(BATCH, HEADS, QUERIES, KEYS, seed=4)),
    attention("bias-gradient-repeated", *QKV, normal(HEADS, 1, KEYS, seed=4), outputs=2),
    attention("bias-gradient-number", *QKV, normal(seed=4)),
    masked("masked", np.where(FORBIDDEN, -np.inf, normal(QUERIES, KEYS, seed=5))),
    masked("masked-zero-empty-rows", np.where(FORBIDDEN, -np.inf, 0), zero_empty_rows=1),
    masked("causal", CAUSAL),
    masked("repeated-bias", normal(BATCH, 1, 1, KEYS, seed=6)),
    masked("empty-row", EMPTY_ROW, zero_empty_rows=1),
    packed("plain", PACKED),
    packed("log-sum", PACKED, outputs=2),
    packed("bias-gradient", PACKED, normal(HEADS, QUERIES, QUERIES, seed=9)),
    packed("masked", PACKED, CAUSAL[:, :QUERIES], wrt="a", zero_empty_rows=1),
    masked("large-scores", 30 * normal(QUERIES, KEYS, seed=7)),
]
