"""Steps equal PyTorch's where its program stops gradients: at ``detach`` and at the padding row of embeddings."""

import copy
import warnings

import numpy as np
import pytest

import onnxtrain
from sentences import warns_sentence
from zoo.exporting import module_class

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

F = torch.nn.functional
ROWS = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32))
TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 4, (6, 5)))
TARGETS = torch.from_numpy(np.random.default_rng(2).normal(size=(6, 3)).astype(np.float32))


def rows(forward, **parts):
    parts = {"first": torch.nn.Linear(4, 4), "last": torch.nn.Linear(4, 3), **parts}
    return module_class(torch, lambda self, x: self.last(forward(self, self.first(x), x)), **parts), ROWS


def tokens(forward, **parts):
    parts = {"table": torch.nn.Embedding(9, 4, padding_idx=0), "last": torch.nn.Linear(4, 3), **parts}
    return module_class(torch, forward, **parts), TOKENS


def parameter(*shape):
    return torch.nn.Parameter(torch.randn(*shape))


CASES = {
    "straight through": lambda: rows(lambda self, z, x: z + (z.round() - z).detach()),
    "one branch": lambda: rows(lambda self, z, x: z * z.sigmoid().detach()),
    "the other branch": lambda: rows(lambda self, z, x: z.sigmoid().detach() * z),
    "a value and itself": lambda: rows(lambda self, z, x: z * z.detach()),
    "a whole layer": lambda: rows(lambda self, z, x: self.second(x) + z.detach(), second=torch.nn.Linear(4, 4)),
    "twice": lambda: rows(lambda self, z, x: z.tanh() + z.detach() * z.sigmoid().detach()),
    "behind a reshape": lambda: rows(lambda self, z, x: z - z.reshape(-1, 2, 2).detach().reshape(-1, 4) / 2),
    "for two readers": lambda: rows(lambda self, z, x: (lambda y: y.sin() * z + y * z.cos())(z.exp().detach())),
    "several nodes of a call": lambda: rows(lambda self, z, x: z + F.gelu(z.detach()) + F.hardswish(z).detach()),
    "a normalization": lambda: rows(
        lambda self, z, x: F.layer_norm(z, (4,), self.scale.detach(), self.shift),
        scale=parameter(4),
        shift=parameter(4),
    ),
    "a parameter": lambda: rows(lambda self, z, x: z * self.scale.detach() + self.scale, scale=parameter(4)),
    "a parameter and itself": lambda: rows(
        lambda self, z, x: F.layer_norm(z, (4,), self.scale, self.scale.detach()), scale=parameter(4)
    ),
    "a matrix product": lambda: rows(lambda self, z, x: z @ z.T.detach() @ z),
    "parts": lambda: rows(lambda self, z, x: torch.cat([part.detach() * z[:, :2] for part in z.split(2, 1)], 1)),
    "three sources": lambda: rows(lambda self, z, x: torch.cat([z[:, :1], z.sin()[:, :1].detach(), z[:, 2:]], 1)),
    "a selection": lambda: rows(lambda self, z, x: torch.where(z > 0, z.detach(), z * 2)),
    "padding": lambda: tokens(lambda self, ids: self.last(self.table(ids).mean(1))),
    "padding, largest": lambda: tokens(lambda self, ids: self.last(self.table(ids).amax(1))),
    "padding, tied": lambda: tokens(
        lambda self, ids: F.linear(self.table(ids).mean(1), self.table.weight)[:, :3] + self.last.bias
    ),
    "padding, last row": lambda: tokens(
        lambda self, ids: self.last(self.table(ids).mean(1)), table=torch.nn.Embedding(4, 4, padding_idx=-1)
    ),
    "counts": lambda: tokens(
        lambda self, ids: self.last(self.table(ids).mean(1)), table=torch.nn.Embedding(9, 4, scale_grad_by_freq=True)
    ),
    "counts and padding": lambda: tokens(
        lambda self, ids: self.last(self.table(ids).mean(1)), table=torch.nn.Embedding(9, 4, 1, scale_grad_by_freq=True)
    ),
    "padding and detached": lambda: tokens(
        lambda self, ids: self.last((self.table(ids) * self.table(ids).mean(1, keepdim=True).detach()).mean(1))
    ),
}


QUICK = ("straight through", "a value and itself", "padding, tied", "counts and padding")


@pytest.mark.parametrize(
    ("name", "optimize"),
    [
        pytest.param(name, optimize, marks=() if optimize and name in QUICK else pytest.mark.thorough)
        for name in CASES
        for optimize in (True, False)
    ],
)
def test_steps_equal_pytorchs(name, optimize, tmp_path):
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (inputs,), path, input_names=["x"], optimize=optimize, verbose=False)
    plain = trained(copy.deepcopy(module), inputs)
    trainer = onnxtrain.Trainer(path, loss="mse", optimizer=onnxtrain.SGD(0.1))
    for _ in range(3):
        trainer.train_step(inputs.numpy(), TARGETS.numpy())
    values = trainer.state_dict()
    held = {key: value for key, value in plain.items() if key in values}
    assert len(held) >= 2
    for key, value in held.items():
        np.testing.assert_allclose(values[key], value, rtol=2e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("optimize", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_table_with_max_norm_is_named(optimize, tmp_path):
    module, inputs = tokens(
        lambda self, ids: self.last(self.table(ids).mean(1)), table=torch.nn.Embedding(9, 4, max_norm=0.5)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (inputs,), tmp_path / "model.onnx", optimize=optimize, verbose=False)
    with warns_sentence("max_norm"):
        onnxtrain.Trainer(tmp_path / "model.onnx", loss="mse")


def trained(module, inputs):
    """The parameters after three steps of SGD in PyTorch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(module(inputs), TARGETS).backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in module.named_parameters()}
