"""Quantization of attention with a mask: its infinite or huge numbers must not take the steps of the scores."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest

import onnxtrain

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6, 8)).astype(np.float32)
PADDED = (np.arange(6) >= RNG.integers(2, 7, (32, 1))).astype(np.float32)[:, None]
WEIGHTS = {name: RNG.normal(scale=0.5, size=(8, 8)).astype(np.float32) for name in ("q", "k", "v")}

MASKED = {
    "added infinities": "at = Greater(padded, half) m = Where(at, low, zero) t = Add(s, m)",
    "infinities in the scores": "at = Greater(padded, half) t = Where(at, low, s)",
    "added numbers": "m = Mul(padded, low) t = Add(s, m)",
}

CASES = [
    *(("added infinities", -np.inf), ("infinities in the scores", -np.inf), ("added infinities", -1e4)),
    *(("added numbers", -1e4), ("added numbers", float(np.finfo(np.float32).min))),
]


def attention(masked, low):
    text = (
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 6, 8] x, float[N, 1, 6] padded) => (float[N, 8] y) '
        "<float zero = {0}, float half = {0.5}, float c = {0.35355338}> "
        "{ a = MatMul(x, q) b = MatMul(x, k) d = MatMul(x, v) bt = Transpose<perm = [0, 2, 1]>(b) "
        f"u = MatMul(a, bt) s = Mul(u, c) {MASKED[masked]} p = Softmax<axis = -1>(t) o = MatMul(p, d) "
        "y = ReduceMean<keepdims = 0>(o, axes) }"
    )
    model = onnx.parser.parse_model(text)
    arrays = {**WEIGHTS, "low": np.array(low, np.float32), "axes": np.array([1])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    return model


@pytest.mark.parametrize(("masked", "low"), CASES)
def test_scores_keep_their_steps(masked, low, caplog):
    model, data = attention(masked, low), {"x": X, "padded": PADDED}
    expected = onnxtrain.predict(model, data)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        quantized = onnxtrain.quantize(model, data)
    assert "nodes stay in float: masks of infinite or huge numbers leave their other values no steps" in caplog.text
    found = onnxtrain.predict(quantized, data)
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    assert sum(node.op_type == "QuantizeLinear" for node in quantized.graph.node) >= 5
    trainer = onnxtrain.Trainer(quantized, loss="mse", optimizer="adam(lr=1e-3)", qat=True)
    losses = [trainer.train_step(data, np.zeros((32, 8), np.float32)) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_large_numbers_without_a_softmax_are_quantized(caplog):
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        onnxtrain.quantize(onnxtrain.examples.mlp((8, 8, 3)), 1e6 * X[:, 0])
    assert "stay in float" not in caplog.text
