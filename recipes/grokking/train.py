"""Grokking: a network learns a + b modulo 97 from half of all pairs, and generalizes after it has memorized them.

A network of two layers with quadratic activation, full batches, cross-entropy and weight decay. Sources: Power et al.,
"Grokking: generalization beyond overfitting on small algorithmic datasets", 2022, which trains a transformer; Gromov,
"Grokking modular arithmetic", 2023, which has this
network with squared error.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

MODULUS, WIDTH, STEPS = 97, 256, 3000


def network(width: int, seed: int) -> onnx.ModelProto:
    """`pair` [N, 2] (int64) to `scores` [N, 97]: (U[a] + V[b])^2 W."""
    rng = np.random.default_rng(seed)

    def tensor(name: str, scale: float, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((scale * rng.normal(size=shape)).astype(np.float32), name)

    nodes = [
        helper.make_node("Split", ["pair"], ["a", "b"], axis=1, num_outputs=2),
        helper.make_node("Squeeze", ["a", "one"], ["a.flat"]),
        helper.make_node("Squeeze", ["b", "one"], ["b.flat"]),
        helper.make_node("Gather", ["U", "a.flat"], ["u"]),
        helper.make_node("Gather", ["V", "b.flat"], ["v"]),
        helper.make_node("Add", ["u", "v"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "hidden"], ["square"]),
        helper.make_node("MatMul", ["square", "W"], ["scores"]),
    ]
    initializers = [
        tensor("U", 0.5, MODULUS, width),
        tensor("V", 0.5, MODULUS, width),
        tensor("W", 1 / width, width, MODULUS),
        numpy_helper.from_array(np.array([1]), "one"),
    ]
    graph = helper.make_graph(
        nodes,
        "modular addition",
        [helper.make_tensor_value_info("pair", TensorProto.INT64, ["N", 2])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", MODULUS])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


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
