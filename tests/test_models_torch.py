"""Whole models against PyTorch: gradients of every parameter in float64, and fifty training steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.losses import SoftmaxCrossEntropy
from zoo.gradients import Elements, distinct
from zoo.trained import ZOO, export, torch_gradients

nn = pytest.importorskip("torch").nn
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


def _check(name: str, exporter: str, opset: int, dynamic: bool, folder: Path) -> None:
    entry = ZOO[name]
    module = distinct(entry.build())
    optimize = name not in ("resnet", "mobilenet_v2")  # else batch normalization is merged into the weights
    path = export(entry, folder / f"{name}.onnx", exporter, opset, dynamic, optimize, module)
    # Softmax cross-entropy is built on the logits that a final Softmax gets.
    oracle = torch_gradients(entry, module=nn.Sequential(*list(module)[:-1]) if name == "mlp_softmax" else module)
    rule, mode = onnxtrain.Momentum(1.0, alpha=0.0), "train" if entry.training else "frozen"
    training = onnxtrain.training_model(str(path), loss=_loss_of(entry), optimizer=rule, batch_norm=mode)
    session = onnxtrain.TrainingSession(training)
    exported = onnx.load(path)
    elements = Elements(module)
    positions = elements.positions(exported)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in exported.graph.initializer}
    inputs = dict(zip(entry.input_names, (x.numpy() for x in entry.example()), strict=True))
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    target = entry.targets(runtime.run(None, inputs)[0].shape)
    result = session.step({**inputs, "target": target, "learning_rate": np.float32(1.0)})
    assert float(result["loss"]) == pytest.approx(oracle.loss, rel=1e-4)
    # With alpha = 0 and T = 0 the momentum V is the gradient.
    gradients = {key: session.state.get(f"{key}/V", np.zeros(shapes[key])) for key in positions}
    assert elements.worst_error(gradients, positions, oracle.gradients) < 2e-3


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
