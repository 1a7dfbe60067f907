"""A convolutional network trained in bfloat16, beside PyTorch's autocast on the same weights and images."""

import numpy as np
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.runtime import native
from zoo import convolutional

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

STEPS = 12


def test_a_network_learns_as_under_autocast(monkeypatch):
    """Each loss is as near that of float32 as PyTorch's: both within a hundredth of the first loss."""
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    random = np.random.default_rng(5)
    x, y = random.standard_normal((8, 16, 28, 28)).astype(np.float32), random.integers(0, 5, 8)
    model = convolutional.model()
    weights = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    options = {"loss": "softmax_cross_entropy", "optimizer": "sgd(lr=0.05)", "threads": 1}
    trainer = onnxtrain.Trainer(model, precision="bfloat16", **options)
    found = [float(trainer.train_step(x, y)) for _ in range(STEPS)]
    exact, autocast = (of_torch(weights, x, y, rounded=rounded) for rounded in (False, True))
    assert exact[-1] < 0.7 * exact[0]
    bound = 0.01 * exact[0]
    for losses in (found, autocast):
        assert losses != exact
        np.testing.assert_allclose(losses, exact, atol=bound)


def of_torch(weights, x, y, *, rounded):
    given = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights.items()}
    optimizer = torch.optim.SGD(given.values(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            h = torch.conv2d(torch.tensor(x), given["w0"], given["b0"], padding=1).relu()
            h = torch.conv2d(h, given["w1"], stride=2, padding=1).relu()
            h = torch.conv2d(h, given["w2"]).relu().mean((2, 3)) @ given["w3"]
        loss = torch.nn.functional.cross_entropy(h.float(), torch.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
