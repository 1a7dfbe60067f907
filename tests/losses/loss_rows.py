"""A row for each loss: data, values of its options, and its formula; a loss without a row fails one test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx


class Row(NamedTuple):
    """Data of a loss for the tests that every loss has.

    Attributes:
        model: Returns a model whose output fits the loss.
        x: Its input.
        targets: Targets of each kind.
        options: Values of options that only this loss has, by name; ``OPTIONS`` has those of several losses.
        formula: The loss in NumPy, of the output, the targets and the options, for losses that no test compares with
            PyTorch.
    """

    model: Callable[[], onnx.ModelProto]
    x: np.ndarray
    targets: tuple[np.ndarray, ...]
    options: Mapping[str, list[Any]] = {}
    formula: Callable[..., Any] | None = None


RANDOM = np.random.default_rng(0)
ROWS, CLASSES, STEPS = 12, 4, 5

# The first rows have a single class, whose weight may be 0; the next ones are ignored. Some batches have weight 0.
LABELS = np.array([0, 0, 0, 1, 1, 2, 3, 2, 1, 3, 2, 1])
IGNORED = np.array([0, 0, -100, -100, -100, 2, 3, -100, 1, 3, 2, 1])
WEIGHTS = np.array([1, 0, 2, 1, 0.5, 3, 1, 1, 0, 1, 2, 1], np.float32)


def dense():
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 3] x) => (float[n, 4] y)
        <float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}> { y = MatMul(x, w) }""")


def by_step():
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 5, 3] x) => (float[n, 5, 4] y)
        <float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}> { y = MatMul(x, w) }""")


def cosines():
    """A model whose outputs are as small as cosines: those of a head of zeros have no direction."""
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 3] x) => (float[n, 4] y)
        <float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}, float ten = {10}>
        { h = MatMul(x, w) y = Div(h, ten) }""")


def rates():
    """A model whose outputs are above 0, by an Exp."""
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 3] x) => (float[n, 4] y)
        <float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}> { h = MatMul(x, w) y = Exp(h) }""")


def apart():
    """A model whose outputs differ where its weights are 0."""
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 3] x) => (float[n, 4] y)
        <float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}, float[4] b = {0.5, -0.3, 0.1, 1.2}>
        { h = MatMul(x, w) y = Add(h, b) }""")


def by_history():
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 5, 3, 3] x) => (float[n, 5, 3, 4] y)
        <float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}> { y = MatMul(x, w) }""")


X = RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
SEQUENCES = RANDOM.normal(size=(ROWS, STEPS, 3)).astype(np.float32)
PAIRS = np.random.default_rng(1).normal(size=(ROWS, STEPS, 3, 3)).astype(np.float32)
WORDS = RANDOM.integers(0, CLASSES, (ROWS, STEPS))
WORDS_IGNORED = np.where(RANDOM.random((ROWS, STEPS)) < 0.4, -100, WORDS)
WORDS_IGNORED[2:4] = -100
NUMBERS = RANDOM.normal(size=(ROWS, CLASSES)).astype(np.float32)
SHARES = RANDOM.dirichlet(np.ones(CLASSES), ROWS).astype(np.float32)
ANSWERS = (RANDOM.random((ROWS, CLASSES)) > 0.5).astype(np.float32)
AMOUNTS = np.random.default_rng(2).gamma(2.0, 1.5, (ROWS, CLASSES)).astype(np.float32)
COUNTS = np.floor(AMOUNTS)
TEXTS = np.array([[1, 2], [3, -1], [2, 2], [1, 3], [-1, -1], [2, -1]] * 2)


def huber(z, t, delta=1.0):
    distance = np.abs(z - t)
    return np.mean(np.where(distance <= delta, distance**2 / 2, delta * (distance - delta / 2)))


def poisson(z, t, log_input=False):
    return np.mean(np.exp(z) - t * z if log_input else z - t * np.log(z + 1e-7))


def gamma(z, t, log_input=False):
    y = np.exp(z) if log_input else z
    return np.mean(2 * (np.log(y / t) + t / y - 1))


def pinball(z, t, q=0.5):
    return np.mean(np.maximum(q * (t - z), (q - 1) * (t - z)))


def msle(z, t):
    return np.mean((np.log(np.maximum(z, 1e-7) + 1) - np.log(np.maximum(t, 1e-7) + 1)) ** 2)


def cosine(z, t):
    cosines = np.sum(z * t, -1) / np.linalg.norm(z, axis=-1) / np.linalg.norm(t, axis=-1)
    return -np.mean(cosines)


def divergence(z, t):
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    return np.mean(np.sum(t * np.log(t / p), 1))


def hinge(z, t):
    return np.mean(np.maximum(1 - (2 * t - 1) * z, 0))


def categorical_hinge(z, t):
    one = np.eye(CLASSES)[t] if t.ndim == 1 else t
    return np.mean(np.maximum(np.max((1 - one) * z, 1) - np.sum(one * z, 1) + 1, 0))


def coral(z, t):
    levels = t[:, None] > np.arange(z.shape[1])
    log_p = -np.log1p(np.exp(-z))
    return -np.mean(np.sum(log_p * levels + (log_p - z) * (1 - levels), 1))


def tversky(z, t, alpha=0.5, beta=0.5):
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    there = np.eye(CLASSES)[t]
    both, wrong, missed = (np.sum(terms, 1) for terms in (p * there, p * (1 - there), (1 - p) * there))
    return np.mean(1 - (both + 1e-5) / (both + alpha * wrong + beta * missed + 1e-5))


LOSS_ROWS = {
    "softmax_cross_entropy": Row(dense, X, (LABELS, IGNORED, SHARES)),
    "focal": Row(dense, X, (LABELS, IGNORED, SHARES)),
    "distillation": Row(dense, X, (LABELS, IGNORED, SHARES)),
    "next_token": Row(by_step, SEQUENCES, (WORDS, WORDS_IGNORED)),
    "dice": Row(by_step, SEQUENCES, (WORDS, WORDS_IGNORED)),
    "ctc": Row(by_step, SEQUENCES, (TEXTS,)),
    "transducer": Row(by_history, PAIRS, (TEXTS,)),
    "arcface": Row(cosines, X, (LABELS,)),
    "cosface": Row(cosines, X, (LABELS,)),
    "binary_cross_entropy": Row(dense, X, (ANSWERS,)),
    "binary_focal": Row(dense, X, (ANSWERS,)),
    "mean_squared_error": Row(dense, X, (NUMBERS,), formula=lambda z, t: np.mean((z - t) ** 2)),
    "mean_absolute_error": Row(dense, X, (NUMBERS,), formula=lambda z, t: np.mean(np.abs(z - t))),
    "huber": Row(dense, X, (NUMBERS,), {"delta": [0.2]}, huber),
    "poisson": Row(rates, X, (COUNTS,), {"log_input": [True]}, poisson),
    "gamma": Row(rates, X, (AMOUNTS,), {"log_input": [True]}, gamma),
    "quantile": Row(dense, X, (NUMBERS,), {"q": [0.9]}, pinball),
    "log_cosh": Row(dense, X, (NUMBERS,), formula=lambda z, t: np.mean(np.log(np.cosh(z - t)))),
    "mean_absolute_percentage_error": Row(
        dense, X, (AMOUNTS,), formula=lambda z, t: 100 * np.mean(np.abs(z - t) / np.maximum(np.abs(t), 1e-7))
    ),
    "mean_squared_logarithmic_error": Row(rates, X, (AMOUNTS,), formula=msle),
    "cosine_similarity": Row(apart, X, (NUMBERS,), formula=cosine),
    "kl_divergence": Row(dense, X, (SHARES,), formula=divergence),
    "hinge": Row(dense, X, (ANSWERS,), formula=hinge),
    "squared_hinge": Row(dense, X, (ANSWERS,), formula=lambda z, t: np.mean(np.maximum(1 - (2 * t - 1) * z, 0) ** 2)),
    "categorical_hinge": Row(apart, X, (LABELS, SHARES), formula=categorical_hinge),
    "ordinal": Row(dense, X, (LABELS,), formula=coral),
    "tversky": Row(by_step, SEQUENCES, (WORDS,), {"alpha": [0.3], "beta": [0.7]}, tversky),
}

OPTIONS = {
    "class_weights": [(1.0, 2.0, 0.5, 3.0), (0.0, 2.0, 0.5, 1.0), {0: 0.0, 2: 4.0}],
    "label_smoothing": [0.2],
    "ignore_index": [-100],
    "reduction": ["sum"],
    "weight": [0.5],
    "chunk": [2],
    "gamma": [0.5],
    "alpha": [0.7, None],
    "positive_weight": [3.0],
    "temperature": [3.0],
    "mix": [0.0, 1.0, 0.3],
    "smooth": [1.0],
    "activation": ["softmax"],
    "background": [False],
    "blank": [0],
    "scale": [4.0],
    "margin": [0.2],
    "zero_infinity": [True],
}
