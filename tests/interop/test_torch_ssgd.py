"""onnxtrain.torch.SSGD: equal to the operator, and an optimizer of PyTorch like any other."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.operators import ssgd
from onnxtrain.operators.measures import BUILT_IN, register_measure, unregister_measure
from sentences import raises_sentence

torch = pytest.importorskip("torch")
from onnxtrain.interop.torch import SSGD  # noqa: E402 - needs PyTorch

pytestmark = pytest.mark.torch


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for shape in [(30, 20), (20,), (4, 3, 3, 3), ()]
    ]


def give_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def arrays(parameters):
    return [parameter.detach().numpy().copy() for parameter in parameters]


SETTINGS = [
    {},
    {"alpha": 0.9, "norm_coefficient": 0.01},
    {"measure": "p-norm", "p": 0.7, "max_scale": 3.0},
    {"measure": "geman-mcclure", "reweighting": "l1", "regularization": 0.1, "alpha": 0.5},
    *({"measure": name, "epsilon": 2.0} for name in BUILT_IN if name != "p-norm"),
]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_the_operator_bit_for_bit(settings, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr("onnxtrain.torch.kernels_available", lambda: False)
    parameters = tensors()
    xs, addresses = arrays(parameters), [parameter.data_ptr() for parameter in parameters]
    states = [np.zeros_like(x) for x in xs] if settings.get("alpha") else []
    plain = {**onnxtrain.SSGD(**settings).plain().node_attributes()}
    optimizer = SSGD(parameters, lr=0.05, **settings)
    for step in range(4):
        give_gradients(parameters, step)
        for index, parameter in enumerate(parameters):
            attributes = settings if xs[index].ndim >= 2 else plain
            own = (xs[index], parameter.grad.numpy(), *states[index : index + 1])
            xs[index], *new = ssgd(np.float64(0.05), step, *own, **attributes)
            states[index : index + 1] = new
        optimizer.step()
    # exp and cosh are not exactly rounded: the kernel's and NumPy's may differ by one unit in the last place
    exact = not kernels or settings.get("measure", "log-sum") not in ("exponential", "tanh", "p-norm")
    for parameter, x in zip(parameters, xs, strict=True):
        if exact:
            np.testing.assert_array_equal(parameter.detach().numpy(), x)
        else:
            np.testing.assert_allclose(parameter.detach().numpy(), x, rtol=2e-6, atol=1e-7)
    assert [parameter.data_ptr() for parameter in parameters] == addresses


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_p_of_two_is_torchs_sgd(alpha):
    left, right = tensors(torch.float64), tensors(torch.float64)
    ours = SSGD(left, lr=0.05, measure="p-norm", p=2.0, alpha=alpha, norm_coefficient=0.01)
    theirs = torch.optim.SGD(right, lr=0.05, momentum=float(np.float32(alpha)), weight_decay=float(np.float32(0.01)))
    for step in range(5):
        for parameters, optimizer in ((left, ours), (right, theirs)):
            give_gradients(parameters, step)
            optimizer.step()
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_groups_have_options_of_their_own_and_schedulers_change_the_rate():
    matrix, bias, forced = tensors()[0], tensors()[1], tensors()[1]
    optimizer = SSGD(
        [{"params": [matrix, bias]}, {"params": [forced], "lr": 0.5, "sparsify": True}], lr=0.1, epsilon=0.5
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    before = arrays([matrix, bias, forced])
    for parameter in (matrix, bias, forced):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    np.testing.assert_allclose(bias.detach().numpy(), before[1] - 0.1, rtol=1e-6)
    scale = (before[2] ** 2 + 0.5) / np.mean(before[2] ** 2 + 0.5)
    np.testing.assert_allclose(forced.detach().numpy(), before[2] - 0.5 * scale, rtol=1e-5, atol=1e-6)
    assert np.ptp(matrix.detach().numpy() - before[0]) > 0.01
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.05])


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_continues_from_a_state(how):
    first = tensors()
    optimizer = SSGD(first, lr=0.1, alpha=0.9)
    for step in range(3):
        give_gradients(first, step)
        optimizer.step()
    if how == "state_dict":
        second = [torch.nn.Parameter(parameter.detach().clone()) for parameter in first]
        resumed = SSGD(second, lr=7.0, alpha=0.1)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        resumed = copy.deepcopy(optimizer)
        second = resumed.param_groups[0]["params"]
    for parameters, each in ((first, optimizer), (second, resumed)):
        give_gradients(parameters, 9)
        each.step()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_closure_is_called_once_with_gradients_enabled():
    weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
    optimizer, calls = SSGD([weight], lr=0.1), []

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses == calls
    assert losses[2] < losses[1] < losses[0] == 36.0


def test_parameters_without_gradient_stay_and_other_layouts_work():
    still = torch.nn.Parameter(torch.ones(2, 2))
    turned = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    straight = torch.nn.Parameter(turned.detach().clone(memory_format=torch.contiguous_format))
    turned.grad, straight.grad = torch.ones(2, 3).t(), torch.ones(3, 2)
    SSGD([still, turned, straight], lr=0.1, alpha=0.5).step()
    assert torch.equal(still, torch.ones(2, 2))
    torch.testing.assert_close(turned, straight, rtol=1e-6, atol=1e-6)
    assert not turned.is_contiguous()


def test_autograd_notices_the_update():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(2, 2)
    SSGD([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_registered_measure_runs_without_kernel():
    register_measure("cauchy", lambda z: 1 / (1 + z))
    try:
        parameters = tensors()
        x = arrays(parameters)[0]
        give_gradients(parameters, 0)
        SSGD(parameters, lr=0.1, measure="cauchy").step()
        expected = ssgd(np.float64(0.1), 0, x, parameters[0].grad.numpy(), measure="cauchy")[0]
        np.testing.assert_array_equal(parameters[0].detach().numpy(), expected)
    finally:
        unregister_measure("cauchy")


def test_refuses_what_it_cannot_do():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with raises_sentence("optimizer_setting", what="epsilon", got=0, optimizer="SSGD"):
        SSGD([weight], epsilon=0)
    with pytest.raises(OptionError, match="learning_rate is -1"):
        SSGD([weight], lr=-1)
    with pytest.raises(OptionError, match="threads is 0; it needs"):
        SSGD([weight], threads=0)
    half = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    with raises_sentence("ssgd_types", got=torch.bfloat16):
        SSGD([half]).step()
    elsewhere = torch.nn.Parameter(torch.ones(2, 2, device="meta"))
    elsewhere.grad = torch.ones_like(elsewhere)
    with raises_sentence("ssgd_devices", got=torch.device("meta")):
        SSGD([elsewhere]).step()
    weight.grad = torch.ones(2, 2).to_sparse()
    with raises_sentence("ssgd_dense"):
        SSGD([weight]).step()


def test_says_that_pytorch_is_missing(monkeypatch):
    monkeypatch.setattr("onnxtrain.torch.torch", None)
    with raises_sentence("torch_missing"):
        SSGD([])
