"""Checks of files from other frameworks' exporters: trainable parameters, gradient, three steps, saving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import onnxtrain


def elements(arrays: Mapping[str, np.ndarray]) -> list[float]:
    """The elements of arrays, one after the other."""
    return [value for array in arrays.values() for value in np.asarray(array, np.float32).reshape(-1).tolist()]


def check_steps(
    model: onnx.ModelProto,
    weights: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    loss: float,
    x: np.ndarray,
    target: np.ndarray,
    path: Path,
    *,
    computed: bool = False,
) -> None:
    """Compare a file with the framework that it comes from.

    Args:
        model: The file.
        weights: The framework's trainable weights; no two elements are equal.
        gradients: Their gradients of the mean squared error.
        loss: The framework's mean squared error.
        x: Inputs.
        target: Targets.
        path: Where the trained model is saved.
        computed: True if the exporter computed some tensors from weights, so that only their number is compared.
    """
    expected, slopes = elements(weights), elements({name: gradients[name] for name in weights})
    gradient_of = dict(zip(expected, slopes, strict=True))
    assert len(gradient_of) == len(expected), "two elements are equal"
    first = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=1.0)")
    start = {name: np.array(array) for name, array in first.parameters.items()}
    found = Counter(elements(start))
    if computed:
        assert found.total() == len(expected)
    else:
        # Recurrent layers of ONNX have two biases; an exporter fills the one that a framework lacks with zeros.
        assert found - Counter({0.0: found[0.0]}) == Counter(expected)
        assert all(array.any() for array in start.values())
    np.testing.assert_allclose(first.train_step(x, target), loss, rtol=1e-3)
    for name, before in start.items():
        known = np.array([gradient_of.get(value, np.nan) for value in elements({name: before})])
        moved = (before - first.parameters[name]).reshape(-1)
        of_weights = ~np.isnan(known)
        scale = float(np.linalg.norm(known[of_weights]))
        assert np.linalg.norm(moved[of_weights] - known[of_weights]) <= 0.01 * scale + 1e-6, name
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.01)")
    losses = [trainer.train_step(x, target) for _ in range(3)]
    assert losses[2] < losses[0]
    trainer.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (predicted,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(predicted, trainer.predict(x), rtol=1e-3, atol=1e-4)
