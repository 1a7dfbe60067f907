"""Attention and rotary embedding, differentiated through their ONNX function bodies."""

import numpy as np

from autodiff.case import Case, case, normal

BATCH, HEADS, QUERIES, KEYS, VALUE_SIZE = 2, 4, 3, 5, 6
SIZE = 16  # the body scales queries and keys by the root of 1 / √16 each, which single precision has exactly


def heads(count: int, length: int, size: int, seed: int) -> np.ndarray:
    """[batch, heads, length, size]."""
    return normal(BATCH, count, length, size, seed=seed)


def flat(count: int, length: int, size: int, seed: int) -> np.ndarray:
    """[batch, length, heads * size]."""
    return normal(BATCH, length, count * size, seed=seed)


def attention(label: str, *inputs: np.ndarray | None, **options) -> Case:
    return case("Attention", *inputs, label=f"{label}-{options.get('opset', 23)}", **{"opset": 23, **options})


def qkv(key_heads: int = HEADS, keys: int = KEYS) -> list[np.ndarray]:
    return [
        heads(HEADS, QUERIES, SIZE, 0),
        heads(key_heads, keys, SIZE, 1),
        heads(key_heads, keys, VALUE_SIZE, 2),
    ]


FLAT = [flat(HEADS, QUERIES, SIZE, 0), flat(2, KEYS, SIZE, 1), flat(2, KEYS, VALUE_SIZE, 2)]
MASK = normal(QUERIES, KEYS, seed=3)
ALLOWED = np.random.default_rng(0).random((BATCH, 1, QUERIES, KEYS)) > 0.3
ALLOWED[..., 0] = True
PAST = [heads(HEADS, 2, SIZE, 4), heads(HEADS, 2, VALUE_SIZE, 5)]
COSINES, SINES = np.cos(normal(8, 2)), np.sin(normal(8, 2))
POSITIONS = np.array([[0, 2, 1], [5, 7, 3]])

# Where angles are differentiated, the rule has to know whether heads are an axis of their own.
RANK_KNOWN = ("static", "dynamic")

CASES = [
    attention("plain", *qkv()),
    attention("plain", *qkv(), opset=24),
    attention("causal", *qkv(), is_causal=1),
    attention("causal", *qkv(keys=QUERIES), is_causal=1, opset=24),
    attention("grouped", *qkv(key_heads=2), scale=0.3),
    attention("flat", *FLAT, q_num_heads=HEADS, kv_num_heads=2),
    attention("flat", *FLAT, q_num_heads=HEADS, kv_num_heads=2, opset=24),
    attention("mask", *qkv(), MASK),
    attention("mask-allowed", *qkv(), ALLOWED),
    attention("mask-allowed", *qkv(), ALLOWED, opset=24, is_causal=1),
    attention("softcap", *qkv(), softcap=1.5),
    attention("past", *qkv(), None, *PAST, outputs=3),
    attention("past-causal", *qkv(keys=QUERIES), None, *PAST, outputs=3, is_causal=1, opset=24),
    case("RotaryEmbedding", normal(2, 3, 3, 4), COSINES, SINES, POSITIONS, opset=23, label="heads", shapes=RANK_KNOWN),
    case(
        "RotaryEmbedding",
        normal(2, 3, 8),
        COSINES,
        SINES,
        POSITIONS,
        opset=23,
        label="flat-interleaved",
        shapes=RANK_KNOWN,
        num_heads=2,
        interleaved=1,
    ),
    case(
        "RotaryEmbedding",
        normal(2, 3, 3, 6),
        COSINES,
        SINES,
        POSITIONS,
        opset=24,
        label="partial",
        shapes=RANK_KNOWN,
        rotary_embedding_dim=4,
    ),
    case(
        "RotaryEmbedding",
        normal(2, 3, 3, 4),
        normal(2, 3, 2, seed=1),
        normal(2, 3, 2, seed=2),
        opset=23,
        label="no-positions",
        shapes=RANK_KNOWN,
    ),
    case(
        "RotaryEmbedding",
        normal(2, 3, 12),
        COSINES,
        SINES,
        POSITIONS,
        opset=23,
        label="flat-partial",
        shapes=RANK_KNOWN,
        num_heads=2,
        rotary_embedding_dim=4,
    ),
    case(
        "RotaryEmbedding",
        normal(2, 3, 8),
        COSINES,
        SINES,
        POSITIONS,
        opset=23,
        label="constant-angles",
        wrt=["a"],
        num_heads=2,
    ),
]
