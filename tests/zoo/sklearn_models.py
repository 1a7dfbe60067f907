"""Fitted scikit-learn models and their conversion by skl2onnx; nothing is imported before a call."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx


@dataclass(frozen=True)
class SklearnModel:
    """A scikit-learn model, its training data, and its conversion.

    Attributes:
        name: Estimator and options, the key in ``sklearn_models``.
        estimator: The fitted estimator.
        inputs: The training inputs, float32 [N, 6].
        targets: The training targets: int64 labels [N], or float32 values [N].
        model: The converted model: classifiers end in a label and probabilities.
    """

    name: str
    estimator: Any
    inputs: np.ndarray
    targets: np.ndarray
    model: onnx.ModelProto


def sklearn_models(opset: int = 18) -> dict[str, SklearnModel]:
    """Fitted scikit-learn models converted by skl2onnx: perceptrons, and a linear classifier in three forms.

    "_zipmap" ends in ai.onnx.ml.ZipMap (a sequence of maps, skl2onnx's default); the others return the
    probabilities as a tensor. LogisticRegression becomes ai.onnx.ml.LinearClassifier, whose weights are
    attributes, not initializers.
    """
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((120, 6)).astype(np.float32)
    values = (inputs @ generator.standard_normal(6) + np.sin(inputs[:, 0])).astype(np.float32)
    labels = {"binary": (values > 0).astype(np.int64), "classes": np.digitize(values, [-1.0, 1.0])}
    options: dict[str, Any] = {"hidden_layer_sizes": (8, 6), "max_iter": 20, "random_state": 0}
    cases: list[tuple[str, Any, np.ndarray, bool]] = [
        (f"mlp_regressor_{activation}", MLPRegressor(activation=activation, **options), values, False)
        for activation in ("relu", "tanh", "logistic", "identity")
    ]
    for kind, target in labels.items():
        for suffix, zipmap in (("", False), ("_zipmap", True)):
            cases.append((f"mlp_classifier_{kind}{suffix}", MLPClassifier(**options), target, zipmap))
            cases.append((f"logistic_regression_{kind}{suffix}", LogisticRegression(), target, zipmap))
    models = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few iterations to converge
        for name, estimator, target, zipmap in cases:
            estimator.fit(inputs, target)
            model = convert_sklearn(
                estimator,
                initial_types=[("X", FloatTensorType([None, inputs.shape[1]]))],
                # Version 3 of ai.onnx.ml is the newest that skl2onnx writes.
                target_opset={"": opset, "ai.onnx.ml": 1 if opset < 15 else 3},
                options={id(estimator): {"zipmap": zipmap}} if target.dtype == np.int64 else None,
            )
            models[name] = SklearnModel(name, estimator, inputs, target, model)
    return models
