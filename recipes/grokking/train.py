"""Grokking: a network learns a + b modulo 97 from half of all pairs, and generalizes after it has memorized them.

A network of two layers with quadratic activation, full batches, cross-entropy and weight decay. Sources: Power et al.,
"Grokking: generalization beyond overfitting on small algorithmic datasets", 2022, which trains a transformer; Gromov,
"Grokking modular arithmetic", 2023, which has this
network with squared error.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

import onnxtrain
from network import Network

MODULUS, WIDTH, STEPS = 97, 256, 3000


def network(width: int, seed: int) -> onnx.ModelProto:
    """`pair` [N, 2] (int64) to `scores` [N, 97]: (U[a] + V[b])^2 W."""
    net = Network(seed)
    net.normal("U", 0.5, MODULUS, width)
    net.normal("V", 0.5, MODULUS, width)
    net.normal("W", 1 / width, width, MODULUS)
    for name, place, table in (("a", 0, "U"), ("b", 1, "V")):
        column = net.node("Gather", "pair", net.constant(f"{name}.column", place, np.int64), output=name, axis=1)
        net.node("Gather", table, column, output=f"{name}.row")
    hidden = net.node("Add", "a.row", "b.row", output="hidden")
    net.node("MatMul", net.node("Mul", hidden, hidden, output="square"), "W", output="scores")
    return net.model({"pair": ("N", 2)}, {"scores": ("N", MODULUS)}, TensorProto.INT64)


def train(options, seed: int) -> dict[str, float]:
    """Train, and return accuracies, and the steps that it took to 99 % of the pairs of both halves."""
    width, rate, decay, steps = (128, 0.01, 2.0, 300) if options.quick else (WIDTH, 0.003, 0.5, STEPS)
    rng = np.random.default_rng(seed)
    pairs = np.stack(np.meshgrid(np.arange(MODULUS), np.arange(MODULUS)), axis=-1).reshape(-1, 2)
    rng.shuffle(pairs)
    sums = pairs.sum(axis=1) % MODULUS
    half = len(pairs) // 2
    trainer = onnxtrain.Trainer(
        network(width, seed),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.AdamW(rate, weight_decay=decay),
        seed=seed,
        threads=1,
    )
    reached = {"memorized": np.inf, "generalized": np.inf}
    for step in range(1, steps + 1):
        trainer.train_step(pairs[:half], sums[:half])
        if step % 10 == 0:
            right = trainer.predict(pairs).argmax(axis=1) == sums
            accuracies = {"memorized": right[:half].mean(), "generalized": right[half:].mean()}
            reached = {name: min(reached[name], step if accuracies[name] > 0.99 else np.inf) for name in reached}
    return {
        "accuracy on unseen pairs, %": 100 * float(accuracies["generalized"]),
        "steps to 99 % of the training pairs": reached["memorized"],
        "steps to 99 % of unseen pairs": reached["generalized"],
    }
