"""Parameters that PyTorch's optimizing exporter computes away are named; without optimization steps equal PyTorch's."""

import copy
import warnings

import numpy as np
import pytest

import onnxtrain
from zoo.exported_modules import module_class

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
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        loss = F.mse_loss(network(rows), targets)
        np.testing.assert_allclose(trainer.train_step(rows.numpy(), targets.numpy()), loss.item(), rtol=2e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
