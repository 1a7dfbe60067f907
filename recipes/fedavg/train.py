"""Federated averaging: rounds until the average of clients' weights classifies 97 % of MNIST's test images.

A hundred clients with 600 digits each; in every round ten of them train for one epoch in batches of ten (C = 0.1,
E = 1, B = 10) on the perceptron "2NN" with two hidden layers of 200. The digits of a client are drawn from all (IID) or
are two parts of 300 of the digits sorted by label. Source: McMahan et al., "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017, table 1. Over a network, `onnxtrain.flower` does the same.
"""

from __future__ import annotations

import numpy as np

import onnxtrain

GOAL, CHOSEN = 97.0, 10
RATES = {"IID": 0.1, "not IID": 0.05}


def clients(labels: np.ndarray, kind: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide examples among clients: the indices of each."""
    if kind == "IID":
        return np.array_split(rng.permutation(len(labels)), count)
    parts = np.array_split(np.argsort(labels, kind="stable"), 2 * count)
    order = rng.permutation(2 * count)
    return [np.concatenate([parts[a], parts[b]]) for a, b in order.reshape(count, 2)]


def rounds_to_goal(options, kind: str, seed: int, most: int) -> float:
    """Rounds until the test accuracy reaches the goal for the first time."""
    images, labels = options.images("mnist", "train", 6000 if options.quick else None)
    test = options.images("mnist", "t10k", 1000 if options.quick else None)
    rng = np.random.default_rng(seed)
    parts = clients(labels, kind, 20 if options.quick else 100, rng)
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.mlp((784, 200, 200, 10), seed=seed), loss="softmax_cross_entropy",
        optimizer=onnxtrain.SGD(RATES[kind]), seed=seed, threads=1,
    )  # fmt: skip
    images, test_images = (array.reshape(len(array), 784) for array in (images, test[0]))
    weights = trainer.get_weights(flat=True)
    goal = 80.0 if options.quick else GOAL
    for number in range(1, most + 1):
        total, examples = np.zeros(len(weights)), 0
        for client in rng.choice(len(parts), CHOSEN, replace=False):
            trainer.set_weights(weights)
            mine = rng.permutation(parts[client])
            for begin in range(0, len(mine), 10):
                trainer.train_step(images[mine[begin : begin + 10]], labels[mine[begin : begin + 10]])
            total += len(mine) * trainer.get_weights(flat=True)
            examples += len(mine)
        weights = (total / examples).astype(np.float32)
        trainer.set_weights(weights)
        if 100 * np.mean(trainer.predict(test_images).argmax(axis=1) == test[1]) >= goal:
            return number
    return float("nan")


def train(options, seed: int) -> dict[str, float]:
    """Train on both kinds of division."""
    most = (30, 60) if options.quick else (400, 2000)
    return {
        f"rounds, {kind}": rounds_to_goal(options, kind, seed, limit) for kind, limit in zip(RATES, most, strict=True)
    }
