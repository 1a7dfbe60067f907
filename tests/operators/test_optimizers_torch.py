"""The PyTorch equivalents and differences that the docstrings name, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtrain import kernels
from onnxtrain.operators import LAMB, OPTIMIZERS, SGD, SSGD, Adagrad, Adam, AdamW, Lion, Momentum, RMSprop

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def ours(optimizer, x, gradients, adapt=lambda attributes, T: attributes):
    """Steps of an operator, T counted from the schema's first count."""
    entry = OPTIMIZERS[type(optimizer).__name__]
    states = [np.full_like(x, state.initial) for state in optimizer.states]
    for T, g in enumerate(gradients, start=entry.schema.first_count):
        attributes = adapt(optimizer.node_attributes(), T)
        x, *states = entry.reference(optimizer.learning_rate, T, x, g, *states, **attributes)
    return x


def by_kernel(optimizer, x, gradients):
    """The same by the native kernel."""
    x, states = x.copy(), [np.full_like(x, state.initial) for state in optimizer.states]
    schema = optimizer.schema
    for T, g in enumerate(gradients, start=schema.first_count):
        step = {"step": T} if schema.counted else {}
        update = getattr(kernels, f"{schema.name.lower()}_")
        update([x], [g], states, learning_rate=optimizer.learning_rate, **step, **optimizer.node_attributes())
    return x


def theirs(make, x, gradients):
    parameter = torch.nn.Parameter(torch.from_numpy(x.copy()))
    optimizer = make([parameter])
    for g in gradients:
        parameter.grad = torch.from_numpy(g.copy())
        optimizer.step()
    return parameter.detach().numpy()


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    return rng.standard_normal((4, 3)), list(rng.standard_normal((12, 4, 3)))


EQUIVALENTS = {
    "Adagrad": (
        Adagrad(learning_rate=0.1, decay_factor=0.25, epsilon=0.5, norm_coefficient=0.125),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.25, weight_decay=0.125, eps=0.5),
    ),
    "Momentum": (
        Momentum(learning_rate=0.1, alpha=0.75, beta=0.5, norm_coefficient=0.125),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.75, dampening=0.5, weight_decay=0.125),
    ),
    "Nesterov": (
        Momentum(learning_rate=0.1, alpha=0.75, mode="nesterov", norm_coefficient=0.125),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.75, nesterov=True, weight_decay=0.125),
    ),
    "plain SSGD": (
        SSGD(learning_rate=0.1, measure="p-norm", p=2.0, alpha=0.75, norm_coefficient=0.125),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.75, weight_decay=0.125),
    ),
}


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_equivalents(name, problem):
    optimizer, make = EQUIVALENTS[name]
    np.testing.assert_allclose(ours(optimizer, *problem), theirs(make, *problem), rtol=1e-9)


HUNDRED_STEPS = {
    "AdamW": (
        AdamW(learning_rate=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.25),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.25),
    ),
    "AdamW by default": (AdamW(), torch.optim.AdamW),
    "SGD by default": (SGD(), torch.optim.SGD),
    "SGD with decay": (SGD(0.01, weight_decay=0.25), lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.25)),
    "SGD with momentum": (
        SGD(0.01, momentum=0.75, dampening=0.25, weight_decay=0.125),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.75, dampening=0.25, weight_decay=0.125),
    ),
    "SGD, Nesterov's": (
        SGD(0.01, momentum=0.75, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.75, nesterov=True),
    ),
    "RMSprop": (RMSprop(1e-3, alpha=0.75), lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.75)),
    "RMSprop with momentum": (
        RMSprop(1e-3, alpha=0.75, eps=1e-3, weight_decay=0.125, momentum=0.5),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.75, eps=1e-3, weight_decay=0.125, momentum=0.5),
    ),
}


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", HUNDRED_STEPS)
def test_a_hundred_steps(name, dtype, kernel):
    """By the rule, which is the body, and by the kernel."""
    optimizer, make = HUNDRED_STEPS[name]
    rng = np.random.default_rng(1)
    x, gradients = rng.standard_normal((40, 30)).astype(dtype), list(rng.standard_normal((100, 40, 30)).astype(dtype))
    found = (by_kernel if kernel else ours)(optimizer, x, gradients)
    np.testing.assert_allclose(found, theirs(make, x, gradients), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_hundred_steps_of_lion_are_the_papers(kernel):
    """Algorithm 2 of the paper; where a direction is zero but for rounding, its sign is chance, so that float64 is."""
    optimizer = Lion(learning_rate=1e-3, betas=(0.75, 0.5), weight_decay=0.25)
    rng = np.random.default_rng(1)
    x, gradients = rng.standard_normal((40, 30)), list(rng.standard_normal((100, 40, 30)))
    want, m = x.copy(), np.zeros_like(x)
    for g in gradients:
        c = 0.75 * m + 0.25 * g
        want = want - 1e-3 * (np.sign(c) + 0.25 * want)
        m = 0.5 * m + 0.5 * g
    np.testing.assert_allclose((by_kernel if kernel else ours)(optimizer, x, gradients), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_hundred_steps_of_lamb_are_the_papers(dtype, kernel):
    """Algorithm 2 of the paper, in float64 whatever the type of the weights."""
    optimizer = LAMB(learning_rate=1e-3, betas=(0.75, 0.5), eps=1e-5, weight_decay=0.25)
    rng = np.random.default_rng(1)
    x, gradients = rng.standard_normal((40, 30)).astype(dtype), list(rng.standard_normal((100, 40, 30)).astype(dtype))
    want, m, v = x.astype(np.float64), np.zeros(x.shape), np.zeros(x.shape)
    for t, g in enumerate(np.asarray(gradients, np.float64), 1):
        m, v = 0.75 * m + 0.25 * g, 0.5 * v + 0.5 * g**2
        r = m / (1 - 0.75**t) / (np.sqrt(v / (1 - 0.5**t)) + 1e-5) + 0.25 * want
        want = want - 1e-3 * np.linalg.norm(want) / np.linalg.norm(r) * r
    found = (by_kernel if kernel else ours)(optimizer, x, gradients)
    np.testing.assert_allclose(found, want, rtol=1e-6 if dtype == np.float32 else 0, atol=1e-6)


@pytest.mark.parametrize("kernel", [False, True])
def test_lamb_scales_nothing_where_a_norm_is_zero(kernel):
    optimizer = LAMB(learning_rate=0.5, betas=(0.5, 0.5), eps=0.0, weight_decay=0.0)
    run = by_kernel if kernel else ours
    np.testing.assert_array_equal(run(optimizer, np.zeros(3), [np.ones(3)]), np.full(3, -0.5))  # ||X|| is 0
    still = LAMB(learning_rate=0.5, weight_decay=0.0)
    np.testing.assert_array_equal(run(still, np.ones(3), [np.zeros(3)]), np.ones(3))  # ||U|| is 0


def test_adam_is_pytorchs_with_epsilon_before_the_bias_correction(problem):
    """The conversion of the docstring; with one constant epsilon the two differ."""
    optimizer = Adam(learning_rate=0.1, alpha=0.75, beta=0.875, epsilon=0.5, norm_coefficient=0.125)

    def make(p):
        return torch.optim.Adam(p, lr=0.1, betas=(0.75, 0.875), weight_decay=0.125, eps=0.5)

    def converted(attributes, T):
        return {**attributes, "epsilon": 0.5 * np.sqrt(1 - 0.875**T)}

    want = theirs(make, *problem)
    np.testing.assert_allclose(ours(optimizer, *problem, converted), want, rtol=1e-6)
    assert np.abs(ours(optimizer, *problem) - want).max() > 1e-3
