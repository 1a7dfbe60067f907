"""Running variance of batch normalization: ONNX uses the population variance, PyTorch the sample variance."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxtrain

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("rows", [2, 5, 64])
def test_the_share_of_the_batch_is_larger_in_pytorch_by_n_over_n_minus_1(rows):
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[n, 3] x) => (float[n, 3] y) {
        y = BatchNormalization <momentum = 0.9> (x, scale, bias, mean, variance) }"""
    model = parser.parse_model(text)
    first = {"scale": np.ones(3), "bias": np.zeros(3), "mean": np.zeros(3), "variance": np.full(3, 2.0)}
    model.graph.initializer.extend(
        numpy_helper.from_array(value.astype(np.float32), name) for name, value in first.items()
    )
    trainer = onnxtrain.Trainer(
        model, loss="mean_squared_error", optimizer="sgd(lr=0.0)", batch_norm="train", train=["scale", "bias"]
    )
    x = np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32)
    trainer.train_step(x, np.zeros_like(x))
    found = np.asarray(trainer.executor.states["variance"])
    layer = torch.nn.BatchNorm1d(3, momentum=0.1)
    layer.running_var.fill_(2.0)
    layer(torch.from_numpy(x))
    share, theirs = found - 0.9 * 2.0, layer.running_var.numpy() - 0.9 * 2.0
    np.testing.assert_allclose(theirs, share * rows / (rows - 1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(share, 0.1 * x.var(axis=0), rtol=1e-4, atol=1e-6)
