"""One training with native kernels and one in standard operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

import onnxtrain

ONE_THREAD_WITH_KERNELS = onnxtrain.RuntimeOptions(threads=1, kernels=True)


def trained_both_ways(
    proto: onnx.ModelProto, train: str | Sequence[str], inputs: np.ndarray, targets: np.ndarray
) -> list[tuple[list[float], onnxtrain.Trainer]]:
    """The losses of ten steps, and the trainer, in standard operators and with kernels."""
    trained = []
    for kernels in (False, None):
        trainer = onnxtrain.Trainer(
            proto,
            loss="mean_squared_error",
            optimizer=onnxtrain.Momentum(0.05, 0.9),
            train=train,
            options=onnxtrain.RuntimeOptions(kernels=kernels),
        )
        trained.append(([trainer.train_step(inputs, targets) for _ in range(10)], trainer))
    return trained


def recomputed(
    proto: onnx.ModelProto, pattern: str, train: Sequence[str], inputs: np.ndarray, targets: np.ndarray
) -> list[str]:
    """The nodes of a step with kernels that compute again what a pattern names; losses must not depend on that.

    Nodes are named by their first output.
    """
    for node in proto.graph.node:
        node.name = node.output[0]
    losses = []
    for recompute in ((), pattern):
        trainer = onnxtrain.Trainer(
            proto, loss="mean_squared_error", train=train, recompute=recompute, options=ONE_THREAD_WITH_KERNELS
        )
        losses.append([trainer.train_step(inputs, targets) for _ in range(3)])
    assert losses[0] == losses[1]
    nodes = onnxtrain.lower(trainer.training_model(), kernels=True).graph.node
    return [node.op_type for node in nodes if node.name.startswith("again/")]
