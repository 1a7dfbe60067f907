"""One training with native kernels and one in standard operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

import onnxtrain


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
