"""Parameters that PyTorch's optimizing exporter computes away are named; without optimization steps equal PyTorch's."""

import copy
import warnings

import numpy as np
import pytest

import onnxtrain
from zoo.exporting import module_class

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

F = torch.nn.functional


def parameter(*shape):
    return torch.nn.Parameter(torch.randn(shape) * 0.3)


def module(forward, **parts):
    return module_class(torch, forward, last=torch.nn.Linear(8, 3), **parts)


CASES = {
    "weight norm": (
        lambda: module(
            lambda self, x: self.last(self.own(x)),
            own=torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8)),
        ),
        r"computed mul from the parameters own.*original0, own.*original1 and",
    ),
    "cosine": (
        lambda: module(
            lambda self, x: self.scale.exp() * F.normalize(x, dim=-1) @ F.normalize(self.w, dim=0),
            w=parameter(8, 3),
            scale=parameter(),
        ),
        r"computed exp, div_1 from the parameters scale, w and",
    ),
    "gate": (
        lambda: module(lambda self, x: self.last(x * self.gate.sigmoid()), gate=parameter(8)),
        r"computed sigmoid from the parameter gate and",
    ),
    "relative positions": (
        lambda: module(
            lambda self, x: self.last(x + self.table[self.places]), table=parameter(3), places=torch.arange(8) % 3
        ),
        r"computed index from the parameter table and",
    ),
    "within a call": (
        lambda: module(lambda self, x: self.last(torch.logaddexp(x, self.shift)), shift=parameter(8)),
        r"computed val_\d+ from the parameter shift and",
    ),
    "factor of one": (
        lambda: module(lambda self, x: self.last(x * self.one), one=torch.nn.Parameter(torch.tensor(1.0))),
        r"lacks 1 parameter of the PyTorch program \(one\)",
    ),
    "scale of one more": (
        lambda: module(lambda self, x: self.last(F.rms_norm(x, (8,)) * (1 + self.scale)), scale=parameter(8)),
        r"computed add.* from the parameter scale and",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name != "gate" else ()) for name in CASES]
)
def test_the_optimizing_exporter_loses_them_with_a_hint(name, tmp_path):
    torch.manual_seed(0)
    build, sentence = CASES[name]
    network = build()
    rows, targets = torch.randn(6, 8), torch.randn(6, 3)
    for optimize in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                copy.deepcopy(network), (rows,), tmp_path / f"{optimize}.onnx", optimize=optimize, verbose=False
            )
    with pytest.warns(onnxtrain.errors.TrainingHint, match=sentence):
        onnxtrain.Trainer(tmp_path / "True.onnx", loss="mse")
    trainer = onnxtrain.Trainer(tmp_path / "False.onnx", loss="mse", optimizer=onnxtrain.SGD(0.1))
    assert not any("The exporter computed" in hint for hint in trainer.hints)
    check_losses(trainer, network, rows, targets, 3)


def check_losses(trainer, network, rows, targets, steps):
    """Compare the losses of some steps with PyTorch's."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(steps):
        loss = F.mse_loss(network(rows), targets)
        np.testing.assert_allclose(trainer.train_step(rows.numpy(), targets.numpy()), loss.item(), rtol=2e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


CONSTANTS = {
    "interpolation": lambda: module(
        lambda self, x: (
            self.last(F.interpolate(x[:, None], size=8, mode="linear", align_corners=True)[:, 0] * 2)
            + F.interpolate(self.last(x)[:, None], size=5, mode="linear")[:, 0, :3]
        )
    ),
    "compared": lambda: module(lambda self, x: torch.lerp(x, self.last(x)[:, :1], self.part), part=parameter(8)),
    "recurrent": lambda: module(
        lambda self, x: self.last(self.own(x[:, None])[0][:, 0]), own=torch.nn.LSTM(8, 8, batch_first=True)
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "compared" else pytest.mark.thorough) for n in CONSTANTS]
)
def test_what_is_computed_from_constants_is_not_trained(name, tmp_path):
    torch.manual_seed(0)
    network = CONSTANTS[name]()
    rows = torch.randn(6, 8)
    targets = torch.randn_like(network(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(network), (rows,), tmp_path / "model.onnx", optimize=name != "compared", verbose=False
        )
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="mse", optimizer=onnxtrain.SGD(0.1))
    assert not any("The exporter computed" in hint for hint in trainer.hints)
    check_losses(trainer, network, rows, targets, 4)
