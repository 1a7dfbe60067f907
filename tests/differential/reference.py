"""The PyTorch side: the same steps from the same weights, data and options, in float32 or float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Terms = tuple[torch.Tensor, torch.Tensor]
"""The sum of a loss and the weight that divides it."""


def single(number: float) -> float:
    """Return the nearest float32: settings of optimizers are attributes of ONNX."""
    return float(np.float32(number))


# Losses


def _weights(sample_weight: torch.Tensor | None, terms: torch.Tensor) -> torch.Tensor:
    if sample_weight is None:
        return terms
    return terms * sample_weight.reshape(-1, *[1] * (terms.dim() - 1))


def _mean(terms: torch.Tensor, sample_weight: torch.Tensor | None) -> Terms:
    return _weights(sample_weight, terms).sum(), torch.tensor(float(terms.numel()), dtype=terms.dtype)


def _classes_second(z: torch.Tensor, axis: int) -> torch.Tensor:
    return z.movedim(axis, 1)


def cross_entropy(
    z: torch.Tensor,
    t: torch.Tensor,
    sample_weight: torch.Tensor | None,
    *,
    axis: int,
    class_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Terms:
    """PyTorch's cross-entropy; its mean divides by the weights of the labels that are not ignored."""
    by_class = None if class_weights is None else torch.tensor(class_weights, dtype=z.dtype)
    z = _classes_second(z, axis)
    if t.is_floating_point():
        t = _classes_second(t, axis)
        terms = functional.cross_entropy(z, t, by_class, reduction="none", label_smoothing=label_smoothing)
        return _mean(terms, sample_weight)
    ignored = -100 if ignore_index is None else ignore_index
    terms = functional.cross_entropy(
        z, t, by_class, reduction="none", label_smoothing=label_smoothing, ignore_index=ignored
    )
    counts = (t != ignored).to(z.dtype)
    if by_class is not None:
        counts = counts * by_class[t.where(t != ignored, 0)]
    return _weights(sample_weight, terms).sum(), counts.sum()


def next_token(z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None, **options: Any) -> Terms:
    """The cross-entropy of the next token."""
    return cross_entropy(z[:, :-1], t[:, 1:], sample_weight, axis=2, **options)


def binary_cross_entropy(
    z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None, *, positive_weight: float = 1.0
) -> Terms:
    """PyTorch's binary cross-entropy of logits."""
    weight = torch.tensor(positive_weight, dtype=z.dtype)
    return _mean(functional.binary_cross_entropy_with_logits(z, t, reduction="none", pos_weight=weight), sample_weight)


def mean_squared_error(z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None) -> Terms:
    """PyTorch's MSELoss."""
    return _mean(functional.mse_loss(z, t, reduction="none"), sample_weight)


def mean_absolute_error(z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None) -> Terms:
    """PyTorch's L1Loss."""
    return _mean(functional.l1_loss(z, t, reduction="none"), sample_weight)


def huber(z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None, *, delta: float = 1.0) -> Terms:
    """PyTorch's HuberLoss."""
    return _mean(functional.huber_loss(z, t, reduction="none", delta=delta), sample_weight)


def focal(
    z: torch.Tensor,
    t: torch.Tensor,
    sample_weight: torch.Tensor | None,
    *,
    axis: int,
    gamma: float = 2.0,
    class_weights: Sequence[float] | None = None,
) -> Terms:
    """(1 - p)^gamma times the cross-entropy of labels."""
    loss = functional.cross_entropy(_classes_second(z, axis), t, reduction="none")
    terms = (1 - torch.exp(-loss)) ** gamma * loss
    if class_weights is not None:
        terms = terms * torch.tensor(class_weights, dtype=z.dtype)[t]
    return _mean(terms, sample_weight)


def binary_focal(
    z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None, *, gamma: float = 2.0, alpha: float = 0.25
) -> Terms:
    """The sigmoid focal loss of torchvision."""
    p = torch.sigmoid(z)
    loss = functional.binary_cross_entropy_with_logits(z, t, reduction="none")
    right = p * t + (1 - p) * (1 - t)
    return _mean((alpha * t + (1 - alpha) * (1 - t)) * loss * (1 - right) ** gamma, sample_weight)


def dice(
    z: torch.Tensor,
    t: torch.Tensor,
    sample_weight: torch.Tensor | None,
    *,
    smooth: float = 1e-5,
    background: bool = True,
) -> Terms:
    """MONAI's DiceLoss: of labels with softmax, of values with sigmoid."""
    if t.is_floating_point():
        p, there = torch.sigmoid(z), t
    else:
        p = torch.softmax(z, 1)
        there = functional.one_hot(t, z.shape[1]).movedim(-1, 1).to(z.dtype)
    axes = tuple(range(2, z.dim()))
    terms = 1 - (2 * (p * there).sum(axes) + smooth) / ((p + there).sum(axes) + smooth)
    if not background:
        terms = terms[:, 1:]
    return _mean(terms.mean(1), sample_weight)


def ctc(
    z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None, *, blank: int = 0, reduction: str = "mean"
) -> Terms:
    """PyTorch's CTCLoss, whose mean divides each example by the length of its labels; -1 pads labels."""
    log_p = torch.log_softmax(z, -1).transpose(0, 1)
    lengths = (t >= 0).sum(1)
    steps = torch.full((z.shape[0],), z.shape[1])
    terms = functional.ctc_loss(log_p, t.clamp(min=0), steps, lengths, blank=blank, reduction="none")
    return _mean(terms if reduction == "sum" else terms / lengths.clamp(min=1), sample_weight)


def _pairs(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    same = t[:, None] == t[None]
    return same & ~torch.eye(len(t), dtype=torch.bool), ~same


def triplet(
    z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None, *, margin: float = 1.0, mining: str = "hard"
) -> Terms:
    """PyTorch's triplet margin loss (eps 0) of all triplets, or of the hardest of each anchor."""
    positive, negative = _pairs(t)
    found = []
    for a in range(len(t)):
        p = [torch.linalg.vector_norm(z[a] - z[i]) for i in torch.nonzero(positive[a])[:, 0]]
        n = [torch.linalg.vector_norm(z[a] - z[i]) for i in torch.nonzero(negative[a])[:, 0]]
        if not p or not n:
            continue
        if mining == "hard":
            found.append(functional.relu(torch.stack(p).max() - torch.stack(n).min() + margin))
        else:
            found += [functional.relu(one - other + margin) for one in p for other in n]
    total = torch.stack(found).sum() if found else z.sum() * 0
    return total, torch.tensor(float(len(found)), dtype=z.dtype)


def info_nce(
    z: torch.Tensor, t: torch.Tensor, sample_weight: torch.Tensor | None, *, temperature: float = 0.1
) -> Terms:
    """The supervised contrastive loss."""
    positive, _ = _pairs(t)
    unit = functional.normalize(z, dim=1)
    similar = (unit @ unit.T / temperature).masked_fill(torch.eye(len(t), dtype=torch.bool), -torch.inf)
    log_p = torch.log_softmax(similar, 1).masked_fill(torch.eye(len(t), dtype=torch.bool), 0.0)
    partners = positive.sum(1)
    terms = -(log_p * positive).sum(1) / partners.clamp(min=1)
    return terms.sum(), (partners > 0).sum().to(z.dtype)


LOSSES: dict[str, Callable[..., Terms]] = {
    "softmax_cross_entropy": cross_entropy,
    "next_token": next_token,
    "binary_cross_entropy": binary_cross_entropy,
    "mean_squared_error": mean_squared_error,
    "mean_absolute_error": mean_absolute_error,
    "huber": huber,
    "focal": focal,
    "binary_focal": binary_focal,
    "dice": dice,
    "ctc": ctc,
    "triplet": triplet,
    "info_nce": info_nce,
}


# Optimizers


class Rule(torch.optim.Optimizer):
    """An optimizer that PyTorch does not have, by the rule of its specification or paper; T counts from 0."""

    def __init__(self, groups: Any, **defaults: Any) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    state = self.state[x]
                    if not state:
                        state |= {"T": 0, "V": torch.zeros_like(x), "H": torch.zeros_like(x)}
                    self.update(x, x.grad, state, group)
                    state["T"] += 1

    def update(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change one parameter."""
        raise NotImplementedError


class OnnxAdam(Rule):
    """ai.onnx.preview.training::Adam: epsilon is added before the second moment is corrected; T counts from 1."""

    def update(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        t = state["T"] + 1
        g = g + group["norm_coefficient"] * x
        state["V"] = group["alpha"] * state["V"] + (1 - group["alpha"]) * g
        state["H"] = group["beta"] * state["H"] + (1 - group["beta"]) * g * g
        rate = group["lr"] * (1 - group["beta"] ** t) ** 0.5 / (1 - group["alpha"] ** t)
        new = x - rate * state["V"] / (state["H"].sqrt() + group["epsilon"])
        x.copy_((1 - group["norm_coefficient_post"]) * new)


class OnnxMomentum(Rule):
    """ai.onnx.preview.training::Momentum, whose Nesterov mode takes any beta."""

    def update(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = g + group["norm_coefficient"] * x
        state["V"] = group["alpha"] * state["V"] + (group["beta"] if state["T"] else 1.0) * g
        way = g + group["alpha"] * state["V"] if group["mode"] == "nesterov" else state["V"]
        x.sub_(group["lr"] * way)


class OnnxAdagrad(Rule):
    """ai.onnx.preview.training::Adagrad."""

    def update(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = g + group["norm_coefficient"] * x
        state["H"] = state["H"] + g * g
        rate = group["lr"] / (1 + state["T"] * group["decay_factor"])
        x.sub_(rate * g / (state["H"].sqrt() + group["epsilon"]))


class PaperLion(Rule):
    """Lion by its paper."""

    def update(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        alpha, beta = group["betas"]
        way = torch.sign(alpha * state["V"] + (1 - alpha) * g)
        state["V"] = beta * state["V"] + (1 - beta) * g
        x.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * way)


class PaperLamb(Rule):
    """LAMB by its paper."""

    def update(self, x: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        alpha, beta = group["betas"]
        t = state["T"] + 1
        state["V"] = alpha * state["V"] + (1 - alpha) * g
        state["H"] = beta * state["H"] + (1 - beta) * g * g
        root = (state["H"] / (1 - beta**t)).sqrt() + group["eps"]
        way = state["V"] / (1 - alpha**t) / root + group["weight_decay"] * x
        size, length = x.norm(), way.norm()
        trust = size / length if size * length > 0 else 1.0
        x.sub_(group["lr"] * trust * way)


def _sgd(groups: Any, **s: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, **s)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": _sgd,
    "SSGD": lambda groups, *, alpha, norm_coefficient, measure, p, **s: _sgd(
        [
            {
                ("momentum" if k == "alpha" else "weight_decay" if k == "norm_coefficient" else k): v
                for k, v in g.items()
            }
            for g in groups
        ],
        momentum=alpha,
        weight_decay=norm_coefficient,
        **s,
    ),
    "Momentum": OnnxMomentum,
    "Adam": OnnxAdam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": OnnxAdagrad,
    "RMSprop": torch.optim.RMSprop,
    "LAMB": PaperLamb,
    "Lion": PaperLion,
}


# Steps


@dataclass
class Plan:
    """A training, as both sides do it.

    Attributes:
        steps: Inputs, targets and weights of the examples of each step.
        loss: Name in LOSSES.
        loss_options: Arguments of the reference's loss.
        reduction: "mean" or "sum".
        weight: Factor of the loss.
        optimizer: Name in OPTIMIZERS.
        settings: Its settings, without the learning rate.
        rates: The learning rate of each step.
        frozen: Tensors of the file that are not trained.
        groups: Names of tensors, the factor of their learning rate, and their own settings.
        masks: Boolean arrays by tensor; false stays zero.
        cuts: Number of micro-batches per step.
        micro: The size of a micro-batch where it is fixed, else 0.
        clip_value: Bound of each element of the gradients.
        clip_norm: Bound of their norm.
        ema: Decay, start and warmup of the moving average.
        train_statistics: True if batch normalization uses statistics of the batch.
    """

    steps: list[tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray | None]]
    loss: str
    loss_options: dict[str, Any]
    optimizer: str
    settings: dict[str, Any]
    rates: list[float]
    reduction: str = "mean"
    weight: float = 1.0
    frozen: frozenset[str] = frozenset()
    groups: list[tuple[list[str], float, dict[str, Any]]] = field(default_factory=list)
    masks: dict[str, np.ndarray] = field(default_factory=dict)
    cuts: int = 1
    clip_value: float | None = None
    clip_norm: float | None = None
    ema: tuple[float, int, bool] | None = None
    train_statistics: bool = False


class Layout:
    """The positions of a module's parameter elements in the tensors of its file.

    Args:
        module: The module; no two of its elements are equal.
        trained: The trained tensors of the file.

    Attributes:
        wrong: Trained tensors that are not parameters, and parameters that are not trained.
        order: The tensors, in the order in which they are concatenated.
        copies: Tensors that hold the elements of another one.
        missing: Parameters that the file does not hold.
    """

    def __init__(self, module: nn.Module, trained: Mapping[str, np.ndarray]) -> None:
        positions = {
            value: (name, position)
            for name, parameter in module.named_parameters()
            for position, value in enumerate(parameter.detach().numpy().reshape(-1).tolist())
        }
        self.wrong: list[str] = []
        self.order: list[str] = []
        self.copies: list[str] = []
        index: dict[tuple[str, int], int] = {}
        self.of: dict[str, list[tuple[str, int]]] = {}
        self.shapes = {name: array.shape for name, array in trained.items()}
        start = 0
        for name, array in trained.items():
            values = array.reshape(-1).tolist()
            strange = [value for value in values if value not in positions]
            if strange:
                self.wrong.append(f"{name} {array.shape} is trained, but {strange[:3]} are no parameters")
                continue
            keys = self.of[name] = [positions[value] for value in values]
            if keys[0] in index:
                self.copies.append(name)
                continue
            self.order.append(name)
            for position, key in enumerate(keys):
                index[key] = start + position
            start += len(keys)
        self.index: dict[str, torch.Tensor] = {}
        self.missing: list[str] = []
        for name, parameter in module.named_parameters():
            found = [index.get((name, position)) for position in range(parameter.numel())]
            if None not in found:
                self.index[name] = torch.tensor(found).reshape(parameter.shape)
                continue
            self.missing.append(name)


class Result:
    """Results of a training: losses, tensors of the file by name, their moving averages, and running statistics."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tensors: dict[str, np.ndarray] = {}
        self.averages: dict[str, np.ndarray] = {}
        self.statistics: dict[str, np.ndarray] = {}


def _use_population_statistics(module: nn.Module) -> None:
    """Normalize by the statistics of the batch; the running variance takes the population's, as ONNX says."""

    def forward(part: nn.modules.batchnorm._BatchNorm, x: torch.Tensor) -> torch.Tensor:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        with torch.no_grad():
            for running, now in (
                (part.running_mean, x.mean(axes)),
                (part.running_var, x.var(axes, correction=0)),
            ):
                running.mul_(1 - part.momentum).add_(part.momentum * now)
        return functional.batch_norm(x, None, None, part.weight, part.bias, training=True, eps=part.eps)

    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.forward = forward.__get__(part)


def _disturb(module: nn.Module, noise: np.random.Generator, times: float) -> None:
    """Perturb every layer's output by a multiple of the error that the order of float32 sums can cause."""

    def hook(part: nn.Module, given: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        with torch.no_grad():
            random = torch.tensor(noise.normal(size=first.shape)) * (3e-7 * times * first.abs().max())
        return (first + random, *output[1:]) if isinstance(output, tuple) else first + random

    for part in module.modules():
        if not list(part.children()):
            part.register_forward_hook(hook)


def train(
    module: nn.Module,
    layout: Layout,
    initial: Mapping[str, np.ndarray],
    plan: Plan,
    dtype: torch.dtype,
    noise: np.random.Generator | None = None,
    times: float = 1.0,
) -> Result:
    """Train in PyTorch.

    Args:
        module: The module.
        layout: Its parameters in the tensors of the file, which are the leaves.
        initial: The tensors of the file.
        plan: The training.
        dtype: The precision.
        noise: Disturbs weights, outputs of layers and gradients as float32 may.
        times: By how many times as much.
    """
    module = copy.deepcopy(module).to(dtype)
    if plan.train_statistics:
        _use_population_statistics(module)
    if noise is not None:
        _disturb(module, noise, times)
    result = Result()
    leaves = {name: torch.tensor(initial[name], dtype=dtype) for name in layout.order}
    masks = {name: torch.tensor(mask) for name, mask in plan.masks.items()}
    for name, leaf in leaves.items():
        if noise is not None:
            leaf *= 1 + 1e-7 * times * torch.tensor(noise.normal(size=leaf.shape))
        if name in masks:
            leaf *= masks[name]
        leaf.requires_grad_(name not in plan.frozen)
    moving = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    fixed = {n: p.detach() for n, p in module.named_parameters() if n in layout.missing}
    grouped = [
        {"params": [leaves[n] for n in names if n in moving], "scale": scale, **own}
        for names, scale, own in plan.groups
    ]
    others = {n for names, _, _ in plan.groups for n in names}
    groups = [{"params": [leaf for n, leaf in moving.items() if n not in others], "scale": 1.0}, *grouped]
    optimizer = OPTIMIZERS[plan.optimizer]([g for g in groups if g["params"]], lr=plan.rates[0], **plan.settings)
    averages: dict[str, torch.Tensor] = {}
    for number, (inputs, target, sample_weight) in enumerate(plan.steps):
        xs = [torch.from_numpy(x) if x.dtype == np.int64 else torch.tensor(x, dtype=dtype) for x in inputs]
        t = torch.from_numpy(target) if target.dtype == np.int64 else torch.tensor(target, dtype=dtype)
        w = None if sample_weight is None else torch.tensor(sample_weight, dtype=dtype)
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves.values()])
        parameters = {name: flat[index] for name, index in layout.index.items()} | fixed
        size = -(-len(t) // plan.cuts)
        parts = []
        for start in range(0, len(t), size):
            cut = slice(start, start + size)
            z = torch.func.functional_call(module, parameters, tuple(x[cut] for x in xs))
            parts.append(LOSSES[plan.loss](z, t[cut], None if w is None else w[cut], **plan.loss_options))
        total = sum(part[0] for part in parts)
        loss = plan.weight * (total if plan.reduction == "sum" else total / sum(part[1] for part in parts))
        optimizer.zero_grad()
        loss.backward()
        result.losses.append(float(loss.detach()))
        with torch.no_grad():
            largest = max(
                (float(leaf.grad.abs().max()) for leaf in moving.values() if leaf.grad is not None), default=0
            )
            for name, leaf in moving.items():
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
                if noise is not None:
                    size_here = 1e-6 * float(leaf.grad.abs().max()) + 1e-7 * largest
                    leaf.grad += times * size_here * torch.tensor(noise.normal(size=leaf.shape))
                if name in masks:
                    leaf.grad *= masks[name]
            if plan.clip_value is not None:
                nn.utils.clip_grad_value_(list(moving.values()), plan.clip_value)
            if plan.clip_norm is not None:
                norm = torch.sqrt(sum((leaf.grad.double() ** 2).sum() for leaf in moving.values()))
                if norm > plan.clip_norm:
                    for leaf in moving.values():
                        leaf.grad *= plan.clip_norm / norm
            for group in optimizer.param_groups:
                group["lr"] = plan.rates[number] * group["scale"]
            optimizer.step()
            for name, leaf in moving.items():
                if name in masks:
                    leaf *= masks[name]
            if plan.ema is not None:
                decay, first, warmup = plan.ema
                if warmup:
                    decay = min(decay, (number + 2) / (number + 11))
                for name, leaf in moving.items():
                    d = 0.0 if number < max(first, 1) else decay
                    old = averages.get(name, torch.zeros_like(leaf))
                    averages[name] = d * old + (1 - d) * leaf
    result.tensors = {name: leaf.detach().double().numpy() for name, leaf in leaves.items()}
    result.averages = {name: leaf.detach().double().numpy() for name, leaf in averages.items()}
    result.statistics = {n: b.double().numpy() for n, b in module.named_buffers() if b.is_floating_point()}
    return result
