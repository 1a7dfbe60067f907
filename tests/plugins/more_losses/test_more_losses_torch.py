"""The losses of plugins/more_losses beside PyTorch: its own, and formulas of other packages, with their gradients."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from losses.loss_models import loss_and_gradient  # noqa: E402
from onnxtrain import losses  # noqa: E402

pytestmark = pytest.mark.torch

RANDOM = np.random.default_rng(0)
Z, T = RANDOM.normal(size=(6, 3)), RANDOM.normal(size=(6, 3))
COUNTS = np.floor(np.exp(T))
SHARES = RANDOM.dirichlet(np.ones(3), 6)
LABELS = np.array([0, 1, 0, 2, 1, 1])
GRID = RANDOM.normal(size=(2, 3, 4, 5))
CLASSES = RANDOM.integers(0, 3, (2, 4, 5))
SIGNS = np.where(RANDOM.random((6, 3)) > 0.5, 1.0, -1.0)


def coral(z, t):
    """The formula of coral_pytorch's coral_loss and levels_from_labelbatch."""
    levels = (t[:, None] > torch.arange(z.shape[1])).to(z.dtype)
    return -(functional.logsigmoid(z) * levels + (functional.logsigmoid(z) - z) * (1 - levels)).sum(1).mean()


def tversky(z, t, alpha, beta):
    """MONAI's TverskyLoss(softmax=True, to_onehot_y=True)."""
    p, g0 = torch.softmax(z, 1), functional.one_hot(t, z.shape[1]).movedim(-1, 1).to(z.dtype)
    both, wrong, missed = (x.sum((2, 3)) for x in (p * g0, p * (1 - g0), (1 - p) * g0))
    return (1 - (both + 1e-5) / (both + alpha * wrong + beta * missed + 1e-5)).mean()


CASES = {
    "poisson": (losses.Poisson(log_input=True), Z, COUNTS, lambda z, t: functional.poisson_nll_loss(z, t)),
    "poisson of rates": (
        losses.Poisson(),
        np.exp(Z),
        COUNTS,
        lambda z, t: functional.poisson_nll_loss(z, t, log_input=False, eps=1e-7),
    ),
    "kl_divergence": (
        losses.KLDivergence(),
        Z,
        SHARES,
        lambda z, t: functional.kl_div(torch.log_softmax(z, 1), t, reduction="batchmean"),
    ),
    "kl_divergence of probabilities": (
        losses.KLDivergence(from_logits=False),
        SHARES[::-1],
        np.eye(3)[LABELS],
        lambda z, t: functional.kl_div(torch.log(z), t, reduction="batchmean"),
    ),
    "cosine_similarity": (
        losses.CosineSimilarity(),
        Z,
        T,
        lambda z, t: -functional.cosine_similarity(z, t, dim=-1).mean(),
    ),
    "log_cosh": (losses.LogCosh(), 30 * Z, T, lambda z, t: torch.log(torch.cosh(z - t)).mean()),
    "hinge": (losses.Hinge(), Z, SIGNS, lambda z, t: torch.relu(1 - z * t).mean()),
    "squared_hinge": (losses.SquaredHinge(), Z, SIGNS, lambda z, t: torch.relu(1 - z * t).square().mean()),
    "ordinal": (losses.Ordinal(), 5 * Z, LABELS, coral),
    "tversky": (
        losses.Tversky(alpha=0.3, beta=0.7, axis=1),
        GRID.astype(np.float32),
        CLASSES,
        lambda z, t: tversky(z, t, 0.3, 0.7),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name, dynamic):
    loss, z, targets, of = CASES[name]
    found, gradient = loss_and_gradient(loss, {"z": np.ascontiguousarray(z), "t": targets}, dynamic=dynamic)
    given = torch.tensor(z.copy(), requires_grad=True)
    wanted = of(given, torch.tensor(targets))
    wanted.backward()
    near = {"rtol": 1e-4, "atol": 1e-7} if z.dtype == np.float32 else {"rtol": 1e-8, "atol": 1e-12}
    np.testing.assert_allclose(found, wanted.item(), **near)
    np.testing.assert_allclose(gradient, given.grad.numpy(), **near)


def test_dice_is_tversky_with_equal_halves():
    arrays = {"z": GRID.astype(np.float32), "t": CLASSES}
    dice = loss_and_gradient(losses.Dice(smooth=0.2, axis=1), arrays)
    halves = loss_and_gradient(losses.Tversky(smooth=0.1, axis=1), arrays)
    np.testing.assert_allclose(halves[0], dice[0], rtol=1e-6)
    np.testing.assert_allclose(halves[1], dice[1], rtol=1e-4, atol=1e-8)
