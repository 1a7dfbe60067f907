"""Models whose graph has Gradient nodes: predicted, trained and lowered without a training_info."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import TrainingInfoError

TEXT = """<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
    m (float[N,2] x) => (float[N,1] y, float[N,2] dy) <float[2,1] w = {1, 2}> {
    a = MatMul(x, w)  y = Tanh(a)  s = ReduceSum <keepdims=0> (y)
    dy = ai.onnx.preview.training.Gradient <xs = ["x"], y = "s"> (x) }"""
MODEL = onnx.parser.parse_model(TEXT)
X = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
Y = np.tanh(X @ [[1.0], [2.0]])
DY = (1 - Y**2) * [[1.0, 2.0]]


@pytest.mark.parametrize("as_file", [False, True])
def test_lowering_gives_a_model_that_any_runtime_runs(as_file, tmp_path):
    model = MODEL
    if as_file:
        model = tmp_path / "model.onnx"
        onnx.save(MODEL, model)
    lowered = onnxtrain.lower(model)
    onnx.checker.check_model(lowered, full_check=True)
    assert {node.domain for node in lowered.graph.node} == {""}
    assert [value.name for value in lowered.graph.input] == ["x"]
    session = onnxruntime.InferenceSession(lowered.SerializeToString(), providers=["CPUExecutionProvider"])
    y, dy = session.run(["y", "dy"], {"x": X})
    np.testing.assert_allclose(y, Y, rtol=1e-5)
    np.testing.assert_allclose(dy, DY, rtol=1e-4, atol=1e-6)


def test_predictions_have_the_gradients():
    trainer = onnxtrain.Trainer(MODEL, loss="mse", optimizer="sgd(lr=0.1)")
    for found in (onnxtrain.predict(MODEL, X), onnxtrain.predict_all(MODEL, X), trainer.predict(X)):
        np.testing.assert_allclose(found["y"], Y, rtol=1e-5)
        np.testing.assert_allclose(found["dy"], DY, rtol=1e-4, atol=1e-6)
    trainer.fit(X, np.zeros((5, 1), np.float32), epochs=3, progress=False)
    after, w = trainer.predict(X), trainer.parameters["w"]
    np.testing.assert_allclose(after["dy"], (1 - np.tanh(X @ w) ** 2) * w.T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(onnxtrain.predict(trainer.model(), X)["dy"], after["dy"], rtol=1e-4)


def test_a_loss_on_a_gradient_trains_the_lowered_model():
    trainer = onnxtrain.Trainer(onnxtrain.lower(MODEL), loss="mse", output="dy", optimizer="sgd(lr=0.01)")
    losses = [trainer.train_step(X, np.ones((5, 2), np.float32)) for _ in range(20)]
    assert losses[0] == pytest.approx(((DY - 1) ** 2).mean(), rel=1e-5)
    assert losses[-1] < losses[0]


def test_a_model_without_either_is_refused():
    with pytest.raises(TrainingInfoError, match="has no training_info; write one"):
        onnxtrain.lower(onnxtrain.examples.mlp((2, 1)))
