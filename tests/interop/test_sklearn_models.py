"""Scikit-learn models exported by skl2onnx train on their probabilities and keep their tail."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from zoo.sklearn_models import sklearn_models

pytest.importorskip("skl2onnx")
pytestmark = pytest.mark.torch

CLASSIFIERS = [f"mlp_classifier_{kind}{tail}" for kind in ("binary", "classes") for tail in ("", "_zipmap")]


@pytest.fixture(scope="module", params=[11, 15, 18, 21])
def models(request):
    return sklearn_models(request.param)


def _log_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
    return float(-np.mean(np.log(probabilities[np.arange(len(labels)), labels])))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_train_on_their_probabilities_and_keep_their_tail(models, name: str, tmp_path) -> None:
    entry = models[name]
    trainer = onnxtrain.Trainer(entry.model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(0.01))
    before = entry.estimator.predict_proba(entry.inputs)
    first = trainer.train_step(entry.inputs, entry.targets)
    assert first == pytest.approx(_log_loss(before, entry.targets), rel=1e-3)
    losses = [trainer.train_step(entry.inputs, entry.targets) for _ in range(60)]
    assert losses[-1] < 0.8 * first
    trainer.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    assert [n.SerializeToString() for n in saved.graph.node] == [n.SerializeToString() for n in entry.model.graph.node]
    session = onnxruntime.InferenceSession(tmp_path / "tuned.onnx", providers=["CPUExecutionProvider"])
    label, probabilities = session.run(None, {"X": entry.inputs})
    if name.endswith("_zipmap"):
        probabilities = np.array([[row[key] for key in sorted(row)] for row in probabilities])
    assert _log_loss(probabilities, entry.targets) == pytest.approx(
        trainer.evaluate((entry.inputs, entry.targets))["loss"], rel=1e-4
    )
    np.testing.assert_array_equal(label, probabilities.argmax(axis=1))


@pytest.mark.parametrize("activation", ["relu", "tanh", "logistic", "identity"])
def test_regressors_train(models, activation: str) -> None:
    entry = models[f"mlp_regressor_{activation}"]
    trainer = onnxtrain.Trainer(entry.model, loss="mean_squared_error", optimizer=onnxtrain.Adam(0.01))
    targets = entry.targets.reshape(-1, 1)
    losses = [trainer.train_step(entry.inputs, targets) for _ in range(60)]
    assert losses[0] == pytest.approx(np.mean((entry.estimator.predict(entry.inputs) - entry.targets) ** 2), rel=1e-3)
    assert losses[-1] < 0.7 * losses[0]
