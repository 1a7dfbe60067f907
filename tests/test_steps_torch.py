"""Fifty training steps against PyTorch's gradients and the pages' formulas in float64.

Both start every step from the same weights and states (ours are copied over): float32 rounding grows
chaotically over steps, and would hide what is compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from zoo.trained import ZOO, export, match_parameters, torch_loss

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 50
KINK = 2e-6
"""Models with Relu inputs at the rounding error of float32, whose sign, and hence gradient, is arbitrary."""
MOST_AT_KINKS = 10


def adam(r, t, x, g, v, h, *, alpha=0.9, beta=0.999, epsilon=1e-6):
    alpha, beta, epsilon = (float(np.float32(number)) for number in (alpha, beta, epsilon))
    v_new = alpha * v + (1 - alpha) * g
    h_new = beta * h + (1 - beta) * g * g
    rate = r * np.sqrt(1 - beta**t) / (1 - alpha**t) if t > 0 else r
    return x - rate * v_new / (np.sqrt(h_new) + epsilon), v_new, h_new


def momentum(r, t, x, g, v, *, alpha=0.9, beta=1.0):
    v_new = float(np.float32(alpha)) * v + (beta if t > 0 else 1.0) * g
    return x - r * v_new, v_new


def adagrad(r, t, x, g, h, *, epsilon=1e-6):
    h_new = h + g * g
    return x - r * g / (np.sqrt(h_new) + float(np.float32(epsilon))), h_new


OPTIMIZERS = {
    "adam": (onnxtrain.Adam(1e-3), adam, ("V", "H")),
    "momentum": (onnxtrain.Momentum(1e-2), momentum, ("V",)),
    "adagrad": (onnxtrain.Adagrad(1e-2), adagrad, ("H",)),
}
MODELS = {
    "mlp_relu": ("torchscript", 17),
    "lenet5": ("torchscript", 17),
    "resnet_train": ("torchscript", 17),
    "distilbert": ("dynamo", 18),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_fifty_steps(name: str, optimizer: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    exporter, opset = MODELS[name]
    path = export(entry, tmp_path / "model.onnx", exporter, opset=opset, dynamic=True)
    settings, rule, states = OPTIMIZERS[optimizer]
    mode = "train" if entry.training else "frozen"
    trainer = onnxtrain.Trainer(str(path), loss="softmax_cross_entropy", optimizer=settings, batch_norm=mode)
    module = entry.build().train(entry.training)
    matches = match_parameters(onnx.load(path), module)
    trained = {key: match for key, match in matches.items() if key in trainer.parameters}
    assert {match.name for match in trained.values()} == dict(module.named_parameters()).keys()
    rate = float(np.float32(settings.learning_rate))
    at_kinks = 0
    for step in range(STEPS):
        inputs = entry.example(batch=4, seed=step)
        if entry.vocabulary:  # torch gives the padding token 0 no gradient; exporters do not write that down
            inputs = (inputs[0].clamp(min=1), *inputs[1:])
        before = {key: np.array(value) for key, value in trainer.executor.session.state.items()}
        _copy_weights(module, trained, before)
        loss, gradients, target, nearest = _torch_step(entry, module, inputs, step)
        found = trainer.train_step(tuple(x.numpy() for x in inputs), target)
        assert found == pytest.approx(loss, rel=1e-5)
        if nearest < KINK:
            at_kinks += 1
            continue
        for key, match in trained.items():
            gradient = gradients[match.name].T if match.transposed else gradients[match.name]
            gradient = gradient.reshape(before[key].shape)
            old = [before[f"{key}/{state}"].astype(np.float64) for state in states]
            expected = rule(rate, int(before["T"]), before[key].astype(np.float64), gradient, *old)
            for state, value in zip((key, *(f"{key}/{s}" for s in states)), expected, strict=True):
                error = np.linalg.norm(trainer.executor.session.state[state] - value)
                assert error <= 1e-4 * max(np.linalg.norm(value), 1e-6), f"step {step}: {state}"
    assert at_kinks <= MOST_AT_KINKS


class NearestKink(TorchDispatchMode):
    """Notes the smallest input, by magnitude, of any Relu that runs."""

    def __init__(self):
        super().__init__()
        self.distance = np.inf

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function in (torch.ops.aten.relu.default, torch.ops.aten.relu_.default):
            self.distance = min(self.distance, arguments[0].abs().min().item())
        return function(*arguments, **(keywords or {}))


def _torch_step(entry, module, inputs, step):
    with NearestKink() as nearest:
        output = module(*inputs)
    target = entry.targets(tuple(output.shape), seed=step + 1)
    loss = torch_loss("softmax_cross_entropy", output, torch.from_numpy(target), entry.class_axis)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    named = zip(parameters, gradients, strict=True)
    found = {key: gradient.numpy().astype(np.float64) for key, gradient in named}
    return loss.item(), found, target, nearest.distance


def _copy_weights(module, trained, before) -> None:
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for key, match in trained.items():
            array = before[key].T if match.transposed else before[key]
            parameters[match.name].copy_(torch.from_numpy(np.array(array)).reshape(parameters[match.name].shape))
