"""Tokens that PyTorch's exporter copied for each example train as the one parameter that they are in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


class ClassToken(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.zeros(1, 1, 6))
        self.layer = torch.nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0]


class Biases(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(6, 2, add_bias_kv=True, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class State(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LSTM(6, 5, batch_first=True)
        self.h, self.c = (torch.nn.Parameter(torch.randn(1, 1, 5)) for _ in range(2))

    def forward(self, x):
        return self.layer(x, tuple(state.expand(-1, len(x), -1).contiguous() for state in (self.h, self.c)))[0]


class FusedHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.nn.Parameter(torch.randn(1, 2, 2, 3))
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        heads = self.layer(x).view(len(x), -1, 2, 3).transpose(1, 2).reshape(len(x) * 2, -1, 3)
        keys = torch.cat([self.keys.expand(len(x), -1, -1, -1).reshape(len(x) * 2, 2, 3), heads], 1)
        return (torch.softmax(heads @ keys.transpose(1, 2), -1) @ keys).view(len(x), 2, -1, 3)


@pytest.mark.parametrize("network", [ClassToken, Biases, State, FusedHeads])
def test_steps_equal_pytorch(network, tmp_path):
    torch.manual_seed(0)
    subject = network()
    for name, parameter in subject.named_parameters():
        if name != "token":  # the exporter leaves out biases of zeros, and merges equal ones
            parameter.data = torch.randn_like(parameter) * 0.5
    path, rng = tmp_path / "model.onnx", np.random.default_rng(0)
    options = {"dynamo": True, "external_data": False, "verbose": False, "opset_version": 18}
    torch.onnx.export(subject.eval(), (torch.randn(4, 5, 6),), path, **options)
    subject.train()
    optimizer = torch.optim.SGD(subject.parameters(), lr=0.1, momentum=0.9)
    trainer = onnxtrain.Trainer(path, loss="mse", optimizer="sgd(lr=0.1, momentum=0.9)")
    for _ in range(4):
        x = rng.normal(size=(4, 5, 6)).astype(np.float32)
        prediction = subject(torch.from_numpy(x))
        y = rng.normal(size=prediction.shape).astype(np.float32)
        loss = torch.nn.functional.mse_loss(prediction, torch.from_numpy(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.train_step(x, y) == pytest.approx(loss.item(), rel=1e-5)
    turned = rng.permutation(4)
    found, other = (onnxtrain.predict(trainer.model(), part) for part in (x, x[turned]))
    np.testing.assert_allclose(found[turned], other, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found, subject(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-5)
