"""SSGD for PyTorch: the operator's own kernel as a ``torch.optim.Optimizer``.

PyTorch is an optional dependency; no other module of the package imports it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from onnxtrain import kernels
from onnxtrain.errors import OptionError
from onnxtrain.operators import SSGD as Settings  # noqa: N811 - the name of the class below
from onnxtrain.operators.evaluation import evaluate
from onnxtrain.runtime.native import kernels_available

torch: Any = None
Optimizer: Any = object
with contextlib.suppress(ImportError):  # without PyTorch the module can be imported; using it raises
    torch = importlib.import_module("torch")
    Optimizer = torch.optim.Optimizer

__all__ = ["SSGD"]

_ATTRIBUTES = tuple(attribute.name for attribute in Settings.schema.attributes if attribute.name != "block")
"""The settings of a group; the kernels over arrays have no blocks."""


class SSGD(Optimizer):  # type: ignore[misc]
    """Sparsity-promoting SGD on PyTorch's CPU tensors, in place and without copies.

    The update equals :class:`onnxtrain.SSGD`'s, by the same kernel: in float32 it is bit-identical to the operator.
    Parameters of rank 2 or more are sparsified, each as one layer; others, such as biases, take plain steps. After
    training, weights below a threshold can be set to zero; mask gradients to keep them zero.

    With ``measure="p-norm", p=2`` it is ``torch.optim.SGD(lr=lr, momentum=alpha, weight_decay=norm_coefficient)``,
    up to rounding. PyTorch has no other counterpart. Like all PyTorch optimizers it supports parameter groups with
    separate options, closures and learning-rate schedulers, and keeps its momentum in ``state_dict``::

        optimizer = onnxtrain.interop.torch.SSGD(model.parameters(), lr=0.01, alpha=0.9, max_scale=5.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 0 or more.
        measure: "log-sum", "p-norm", "arctan", "geman-mcclure", "exponential" or "tanh".
        reweighting: "l2" or "l1".
        epsilon: Parameter of all measures except "p-norm", above 0.
        p: Parameter of "p-norm", in (0, 2] for l2, (0, 1] for l1.
        regularization: Weight of the measure in the loss, 0 or more.
        alpha: Momentum, in [0, 1).
        norm_coefficient: Weight decay added to the gradient, 0 or more.
        max_scale: Largest scale of a step; 0 is no limit.
        sparsify: Promote the sparsity of a group's parameters; by default of parameters of rank 2 or more.
        threads: Threads of the kernel.

    Raises:
        OptionError: PyTorch is not installed, or a setting is outside its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        measure: str = "log-sum",
        reweighting: str = "l2",
        epsilon: float = 0.01,
        p: float = 0.5,
        regularization: float = 0.0,
        alpha: float = 0.0,
        norm_coefficient: float = 0.0,
        max_scale: float = 0.0,
        sparsify: bool | None = None,
        threads: int = 1,
    ) -> None:
        if torch is None:
            raise OptionError("onnxtrain.interop.torch.SSGD needs PyTorch, which is not installed: pip install torch.")
        defaults = {
            "lr": lr,
            "measure": measure,
            "reweighting": reweighting,
            "epsilon": epsilon,
            "p": p,
            "regularization": regularization,
            "alpha": alpha,
            "norm_coefficient": norm_coefficient,
            "max_scale": max_scale,
            "sparsify": sparsify,
            "threads": threads,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group with its own options.

        Raises:
            OptionError: An option is outside its range.
        """
        super().add_param_group(param_group)
        try:
            _settings(self.param_groups[-1])
        except OptionError:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for all parameters that have a gradient.

        Args:
            closure: Recomputes the loss and its gradients; called once, before the step.

        Returns:
            The loss that the closure returned.

        Raises:
            OptionError: A tensor is not on the CPU, not dense, or neither float32 nor float64.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        settings = _settings(group)
        chosen: dict[bool, list[Any]] = {True: [], False: []}
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                _check(parameter, index)
                promote = parameter.dim() >= 2 if group["sparsify"] is None else bool(group["sparsify"])
                chosen[promote].append(parameter)
        for promote, parameters in chosen.items():
            if parameters:
                self._update(settings if promote else settings.plain(), parameters, group["threads"])

    def _update(self, settings: Settings, parameters: list[Any], threads: int) -> None:
        """Call the kernel once."""
        values = [parameter.detach().contiguous() for parameter in parameters]  # no copy if it is contiguous
        gradients = [parameter.grad.detach().contiguous() for parameter in parameters]
        states = []
        if settings.alpha > 0:
            for parameter in parameters:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                states.append(state["momentum"])
        xs, gs, vs = ([tensor.numpy() for tensor in group] for group in (values, gradients, states))
        _run(settings, xs, gs, vs, threads)
        for parameter, value in zip(parameters, values, strict=True):
            if value.data_ptr() != parameter.data_ptr():
                parameter.copy_(value)
            else:
                torch.autograd.graph.increment_version(parameter)  # tells autograd of the change


def _run(
    settings: Settings, xs: list[np.ndarray], gradients: list[np.ndarray], states: list[np.ndarray], threads: int
) -> None:
    """Update arrays in place, by the native kernel or, where it is missing, by the reference."""
    attributes: dict[str, Any] = settings.node_attributes()
    if kernels_available() and settings.native:
        kernels.ssgd_(xs, gradients, states, learning_rate=settings.learning_rate, threads=threads, **attributes)
        return
    rate, count = np.float64(settings.learning_rate), np.int64(0)
    results = evaluate(Settings.schema, rate, count, *xs, *gradients, *states, **attributes)
    for array, result in zip((*xs, *states), results, strict=True):
        array[...] = result


def _settings(group: dict[str, Any]) -> Settings:
    """Check the settings of a group, which schedulers and users may have changed."""
    rate = group["lr"]
    if group["threads"] < 1:
        raise OptionError(f"threads is {group['threads']}; it needs a number of at least 1.")
    return Settings(
        learning_rate=float(rate) if torch.is_tensor(rate) else rate, **{name: group[name] for name in _ATTRIBUTES}
    )


def _check(parameter: Any, index: int) -> None:
    """Raise OptionError for a tensor that the kernel cannot update."""
    what = f"parameter {index} of its group, of shape {tuple(parameter.shape)},"
    if parameter.device.type != "cpu":
        raise OptionError(
            f"onnxtrain.interop.torch.SSGD updates CPU tensors, but {what} is on {parameter.device}."
        ).about(what, got=parameter.device)
    if parameter.dtype not in (torch.float32, torch.float64):
        raise OptionError(
            f"onnxtrain.interop.torch.SSGD updates float32 and float64, but {what} is {parameter.dtype}."
        ).about(what, got=parameter.dtype)
    if parameter.grad.layout != torch.strided:
        raise OptionError(
            f"onnxtrain.interop.torch.SSGD needs dense gradients, but that of {what} is {parameter.grad.layout}."
        ).about(what, got=parameter.grad.layout)
