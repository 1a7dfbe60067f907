"""ArcFace and CosFace: ten steps as PyTorch takes them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.editing.layers import Cosine

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = pytest.mark.torch


def arcface(cosine, labels, scale, margin):
    """By the angle itself, as a reader of the paper writes it."""
    angle = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
    turned = torch.where(
        angle + margin < torch.pi, torch.cos(angle + margin), cosine - margin * torch.sin(torch.tensor(margin))
    )
    there = functional.one_hot(labels, cosine.shape[1]).bool()
    return functional.cross_entropy(scale * torch.where(there, turned, cosine), labels)


def cosface(cosine, labels, scale, margin):
    return functional.cross_entropy(scale * (cosine - margin * functional.one_hot(labels, cosine.shape[1])), labels)


@pytest.mark.parametrize(
    ("text", "function", "options"),
    [
        ("arcface(scale=16, margin=0.5)", arcface, (16.0, 0.5)),
        ("arcface(scale=64, margin=1.2)", arcface, (64.0, 1.2)),
        ("cosface(scale=16, margin=0.35)", cosface, (16.0, 0.35)),
    ],
)
def test_ten_steps(text, function, options):
    random = np.random.default_rng(0)
    model = onnxtrain.append(onnxtrain.examples.mlp((6, 16, 8), activation="tanh"), Cosine(20))
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    trainer = onnxtrain.Trainer(model, loss=text, optimizer=onnxtrain.SGD(0.05, momentum=0.9))
    network = {name: torch.tensor(array.astype(np.float64), requires_grad=True) for name, array in weights.items()}
    optimizer = torch.optim.SGD(network.values(), lr=0.05, momentum=0.9)
    for _ in range(10):
        x, y = random.normal(size=(12, 6)).astype(np.float32), random.integers(0, 20, 12)
        h = functional.linear(torch.tensor(x).double(), network["layer1.weight"], network["layer1.bias"])
        h = functional.linear(torch.tanh(h), network["layer2.weight"], network["layer2.bias"])
        cosine = functional.normalize(h) @ functional.normalize(network["head.weight"]).T
        loss = function(cosine, torch.tensor(y), *options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.train_step(x, y) == pytest.approx(float(loss.detach()), rel=2e-4)
    for name, tensor in network.items():
        np.testing.assert_allclose(trainer.parameters[name], tensor.detach().numpy(), rtol=2e-4, atol=2e-5)
