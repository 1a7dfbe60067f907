"""Whole models against PyTorch: gradients of every parameter in float64, and fifty training steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from zoo import ZOO, export, match_parameters, parameter_gradients, torch_gradients

import onnxtrain
from onnxtrain.training.losses import SoftmaxCrossEntropy

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

QUICK = [
    ("mlp_relu", "torchscript", 11, True),
    ("mlp_gelu", "dynamo", 20, True),
    ("lenet5", "torchscript", 13, True),
    ("resnet", "torchscript", 17, False),
    ("resnet_train", "torchscript", 17, True),
    ("mobilenet_v2", "dynamo", 18, True),
    ("unet_transpose", "torchscript", 16, True),
    ("distilbert", "dynamo", 18, True),
    ("gpt2", "dynamo", 23, True),
    ("vit", "torchscript", 18, True),
]


def _loss_of(entry):
    if entry.target == "value":
        return "mean_squared_error"
    return SoftmaxCrossEntropy(axis=-1 if entry.target == "token" else 1)


def _without_softmax(entry):
    """The module that the loss is built on: softmax cross-entropy takes the logits before a final Softmax."""
    from torch import nn

    return nn.Sequential(*list(entry.build())[:-1])


def _check(name: str, exporter: str, opset: int, dynamic: bool, folder: Path) -> None:
    entry = ZOO[name]
    optimize = name not in ("resnet", "mobilenet_v2")  # else batch normalization is merged into the weights
    path = export(entry, folder / f"{name}.onnx", exporter, opset=opset, dynamic=dynamic, optimize=optimize)
    oracle = torch_gradients(entry, module=_without_softmax(entry) if name == "mlp_softmax" else None)
    training = onnxtrain.training_model(str(path), loss=_loss_of(entry), optimizer=onnxtrain.Momentum(1.0, alpha=0.0))
    session = onnxtrain.TrainingSession(training)
    exported = onnx.load(path)
    matches = match_parameters(exported, entry.build())
    before = {tensor.name: np.empty(tensor.dims) for tensor in exported.graph.initializer}
    inputs = dict(zip(entry.input_names, (x.numpy() for x in entry.example()), strict=True))
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    target = entry.targets(runtime.run(None, inputs)[0].shape)
    result = session.step({**inputs, "target": target, "learning_rate": np.float32(1.0)})
    assert float(result["loss"]) == pytest.approx(oracle.loss, rel=1e-4)
    # With alpha = 0 and T = 0 the momentum V is the gradient.
    gradients = {key: session.state.get(f"{key}/V", np.zeros(before[key].shape)) for key in matches}
    found = parameter_gradients(gradients, matches, oracle)
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in oracle.gradients.values()))
    for parameter, expected in oracle.gradients.items():
        # A key's bias has no influence on a softmax: what should be zero is compared with all gradients.
        scale = max(float(np.linalg.norm(expected)), 1e-4 * norm)
        error = np.linalg.norm(found[parameter] - expected) / scale
        assert error < 2e-3, f"{parameter}: relative error {error:.2g}"


@pytest.mark.parametrize(("name", "exporter", "opset", "dynamic"), QUICK)
def test_gradients_equal_torch(name: str, exporter: str, opset: int, dynamic: bool, tmp_path: Path) -> None:
    _check(name, exporter, opset, dynamic, tmp_path)


def _matrix():
    for name, entry in ZOO.items():
        if name == "mlp_dropout":
            continue  # random masks have no oracle
        for exporter in entry.exporters:
            for opset in entry.opsets(exporter):
                for dynamic in (True, False):
                    yield pytest.param(name, exporter, opset, dynamic, id=f"{name}-{exporter}-{opset}-{dynamic}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "exporter", "opset", "dynamic"), list(_matrix()))
def test_gradients_equal_torch_for_every_export(
    name: str, exporter: str, opset: int, dynamic: bool, tmp_path: Path
) -> None:
    _check(name, exporter, opset, dynamic, tmp_path)
