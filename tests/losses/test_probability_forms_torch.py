"""Endings of PyTorch classifiers, by both exporters and quantized: the loss is that of the model's own outputs."""

import io
import warnings

import numpy as np
import onnx
import pytest

import onnxtrain

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn, F = torch.nn, torch.nn.functional

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


def frames(z):
    return torch.stack([z, -z, z * 0.5], 1)


def share(e, axis=1):
    return e / e.sum(axis, keepdim=True)


def experts(z):
    return torch.stack([z.softmax(1), (2 * z).softmax(1)], 1)


BINARY = {  # number of logits, ending
    "sigmoid": (3, torch.sigmoid),
    "squeeze": (1, lambda z: torch.sigmoid(z).squeeze(-1)),
    "column": (1, lambda z: torch.sigmoid(z)[:, 0]),
    "view": (1, lambda z: torch.sigmoid(z).view(-1)),
    "flatten": (1, lambda z: torch.sigmoid(z).flatten()),
    "slice": (3, lambda z: torch.sigmoid(z)[:, 1:]),
    "cat": (3, lambda z: torch.cat([torch.sigmoid(z), torch.sigmoid(-z)], 1)),
    "clamp": (3, lambda z: torch.sigmoid(z).clamp(1e-6, 1 - 1e-6)),
    "clamp from below": (3, lambda z: torch.sigmoid(z).clamp(min=1e-6)),
    "mean over frames": (3, lambda z: torch.sigmoid(frames(z)).mean(1)),
    "largest frame": (3, lambda z: torch.sigmoid(frames(z)).amax(1)),
    "one minus": (3, lambda z: 1 - torch.sigmoid(z)),
    "hardsigmoid": (3, F.hardsigmoid),
    "relu6": (3, lambda z: F.relu6(z + 3) / 6),
    "tanh": (3, lambda z: torch.tanh(z) / 2 + 0.5),
    "half of one plus tanh": (3, lambda z: 0.5 * (1 + torch.tanh(z))),
    "by hand": (3, lambda z: 1 / (1 + torch.exp(-z))),
    "exp over one plus exp": (3, lambda z: z.exp() / (1 + z.exp())),
    "exp of logsigmoid": (3, lambda z: F.logsigmoid(z).exp()),
    "softplus": (3, lambda z: 1 - torch.exp(-F.softplus(z))),
    "cauchy": (3, lambda z: torch.atan(z) / np.pi + 0.5),
    "probit": (3, lambda z: 0.5 * (1 + torch.erf(z / 2**0.5))),
    "ensemble": (3, lambda z: (torch.sigmoid(z) + torch.sigmoid(z * 2)) / 2),
    "mean of a stack": (3, lambda z: torch.stack([torch.sigmoid(z), torch.sigmoid(2 * z)]).mean(0)),
    "noisy or": (3, lambda z: 1 - torch.prod(1 - torch.sigmoid(frames(z)), 1)),
    "one class of a softmax": (2, lambda z: torch.softmax(z, 1)[:, 1]),
    "where": (3, lambda z: torch.where(z > -5, torch.sigmoid(z), torch.zeros_like(z))),
    "permute": (3, lambda z: torch.sigmoid(frames(z)).permute(0, 2, 1)),
    "pool": (4, lambda z: F.adaptive_avg_pool1d(torch.sigmoid(z).unsqueeze(1), 1).flatten(1)),
    "interpolate": (4, lambda z: F.interpolate(torch.sigmoid(z).unsqueeze(1), scale_factor=2, mode="linear")),
    "product": (3, lambda z: torch.sigmoid(z) * torch.sigmoid(z * 2)),
    "nan_to_num": (3, lambda z: torch.nan_to_num(torch.sigmoid(z))),
    "chunk": (4, lambda z: torch.sigmoid(z).chunk(2, 1)[1]),
    "lerp": (3, lambda z: torch.lerp(torch.sigmoid(z), torch.sigmoid(2 * z), 0.25)),
    "logsigmoid": (3, F.logsigmoid),
}

CLASSES = {
    "softmax": (3, lambda z: z.softmax(-1)),
    "squeeze": (3, lambda z: z.unsqueeze(2).softmax(1).squeeze(2)),
    "flatten": (3, lambda z: z[:, :, None, None].softmax(1).flatten(1)),
    "view": (3, lambda z: z[:, :, None].softmax(1).view(-1, 3)),
    "clamp": (3, lambda z: z.softmax(1).clamp(1e-6, 1 - 1e-6)),
    "plus epsilon": (3, lambda z: z.softmax(1) + 1e-8),
    "by hand": (3, lambda z: share(z.exp())),
    "minus the largest": (3, lambda z: share((z - z.amax(-1, keepdim=True)).exp(), -1)),
    "exp of log_softmax": (3, lambda z: z.log_softmax(1).exp()),
    "logsumexp": (3, lambda z: (z - torch.logsumexp(z, 1, keepdim=True)).exp()),
    "normalize": (3, lambda z: F.normalize(torch.sigmoid(z), p=1, dim=1)),
    "dirichlet": (3, lambda z: share(F.softplus(z) + 1)),
    "ensemble": (3, lambda z: (z.softmax(1) + (2 * z).softmax(1)) / 2),
    "mixture": (3, lambda z: 0.3 * z.softmax(1) + 0.7 * (2 * z).softmax(1)),
    "mean of a stack": (3, lambda z: experts(z).mean(1)),
    "experts": (3, lambda z: (z[:, :2].softmax(1).unsqueeze(2) * experts(z)).sum(1)),
    "experts by bmm": (3, lambda z: torch.bmm(z[:, :2].softmax(1).unsqueeze(1), experts(z)).squeeze(1)),
    "pair": (1, lambda z: torch.cat([1 - torch.sigmoid(z), torch.sigmoid(z)], 1)),
    "pair of columns": (1, lambda z: torch.stack([1 - torch.sigmoid(z[:, 0]), torch.sigmoid(z[:, 0])], 1)),
    "mean over frames": (3, lambda z: frames(z).softmax(2).mean(1)),
    "permute": (3, lambda z: frames(z).softmax(2).permute(0, 2, 1)),
    "index": (3, lambda z: z.softmax(1)[:, [2, 0, 1]]),
    "flip": (3, lambda z: z.softmax(1).flip(1)),
    "smoothed": (3, lambda z: 0.9 * z.softmax(1) + 0.1 / 3),
    "where": (3, lambda z: torch.where(z[:, :1] > 0, z.softmax(1), (2 * z).softmax(1))),
    "log_softmax": (3, lambda z: z.log_softmax(1)),
    "log": (3, lambda z: (z.softmax(1) + 1e-9).log()),
}
FORMS = [("bce", name) for name in BINARY] + [("cross_entropy", name) for name in CLASSES]

PROVED_BY_CONSTANTS = ("relu6", "dirichlet", "interpolate")
"""Forms whose quantized model lacks the Relu, the limits or the common term that prove them: a hint asks."""


class Network(nn.Module):
    def __init__(self, outputs, ending):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.ending = nn.Linear(4, outputs), ending

    def forward(self, x):
        return self.ending(self.layer(x))


def export(kind: str, name: str, *, dynamo: bool) -> onnx.ModelProto:
    network = Network(*(BINARY if kind == "bce" else CLASSES)[name]).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            shapes = ({0: torch.export.Dim("batch")},)
            return torch.onnx.export(network, (X,), dynamo=True, dynamic_shapes=shapes, verbose=False).model_proto
        buffer = io.BytesIO()
        axes = {"x": {0: "n"}, "y": {0: "n"}}
        torch.onnx.export(network, (X,), buffer, dynamo=False, input_names=["x"], output_names=["y"], dynamic_axes=axes)
    return onnx.load_from_string(buffer.getvalue())


def check(kind: str, name: str, model: onnx.ModelProto, **options) -> None:
    trainer = onnxtrain.Trainer(model, loss=kind, optimizer="sgd(lr=0.01)", **options)
    y = torch.tensor(trainer.predict(X.numpy())).double()
    log_y = y if name.startswith("log") and name != "logsumexp" else None
    y = y if log_y is None else log_y.exp()
    rng = np.random.default_rng(0)
    if kind == "bce":
        targets = rng.integers(0, 2, tuple(y.shape)).astype(np.float32)
        expected = F.binary_cross_entropy(y.clamp(0, 1), torch.tensor(targets).double())
    else:
        targets = rng.integers(0, min(y.shape[1], 3), tuple(np.delete(y.shape, 1)))
        log_y = y.log().clamp(min=-100) if log_y is None or not options else log_y.log_softmax(1)
        expected = F.nll_loss(log_y, torch.tensor(targets))
    assert trainer.evaluate(X.numpy(), targets)["loss"] == pytest.approx(float(expected), rel=2e-3)
    assert trainer.train_step(X.numpy(), targets) == pytest.approx(float(expected), rel=2e-3)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(("kind", "name"), FORMS)
def test_the_loss_is_that_of_the_model_s_outputs(kind: str, name: str, dynamo: bool):
    if (name, dynamo) == ("clamp", True) and kind == "cross_entropy":
        pytest.skip("the exporter fails")
    check(kind, name, export(kind, name, dynamo=dynamo))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(("kind", "name"), FORMS)
def test_the_loss_of_quantized_models_is_that_of_their_outputs(kind: str, name: str, dynamo: bool):
    if (name, dynamo) == ("clamp", True) and kind == "cross_entropy":
        pytest.skip("the exporter fails")
    quantized = onnxtrain.quantize(export(kind, name, dynamo=dynamo), X.numpy())
    if name in PROVED_BY_CONSTANTS:
        trainer = onnxtrain.Trainer(quantized, loss=kind, qat=True)
        targets = np.zeros_like(trainer.predict(X.numpy())) if kind == "bce" else np.zeros(32, np.int64)
        trainer.train_step(X.numpy(), targets)
        assert any("from_logits" in hint for hint in trainer.hints) or trainer.objective.heads[0].scores.kind
        return
    check(kind, name, quantized, qat=True)
