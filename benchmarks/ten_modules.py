"""Modules of ``ten_models.py``; importing this file imports torch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_modules import CLASSES, RMS, Attention, Mean, Positions, Residual


class Crnn(nn.Module):
    """Images of text [N, 1, H, W] to logits of each column [N, W / 4, classes]."""

    def __init__(self, height: int = 32, width: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, pool in ((1, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, (2, 1))):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(pool)]
        self.convolutions = nn.Sequential(*layers)
        self.recurrent = nn.LSTM(2 * width * height // 8, 128, bidirectional=True, batch_first=True)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        columns = self.convolutions(image).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.recurrent(columns)[0])


def _volumes(inputs: int, outputs: int) -> nn.Sequential:
    convolutions = (nn.Conv3d(inputs, outputs, 3, padding=1), nn.Conv3d(outputs, outputs, 3, padding=1))
    return nn.Sequential(
        *(part for each in convolutions for part in (each, nn.InstanceNorm3d(outputs), nn.LeakyReLU()))
    )


class VolumeUNet(nn.Module):
    """Volumes [N, 1, D, D, D] to logits of each voxel, by three scales."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList(_volumes(*sizes) for sizes in ((1, width), (width, 2 * width)))
        self.middle = _volumes(2 * width, 4 * width)
        self.wider = nn.ModuleList(nn.ConvTranspose3d(2 * size, size, 2, 2) for size in (2 * width, width))
        self.up = nn.ModuleList(_volumes(2 * size, size) for size in (2 * width, width))
        self.head = nn.Conv3d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for part in self.down:
            kept.append(part(x))
            x = functional.max_pool3d(kept[-1], 2)
        x = self.middle(x)
        for wider, part in zip(self.wider, self.up, strict=True):
            x = part(torch.cat([wider(x), kept.pop()], 1))
        return self.head(x)


class WaveNet(nn.Module):
    """Steps of a signal [N, channels, T] to logits of each, by gated dilated convolutions with skips."""

    def __init__(self, channels: int = 8, width: int = 32, layers: int = 8) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Conv1d(channels, width, 1)
        self.gated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**layer) for layer in range(layers))
        self.mixed = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), []
        for gated, mixed in zip(self.gated, self.mixed, strict=True):
            value, gate = gated(functional.pad(x, (gated.dilation[0], 0))).split(self.width, 1)
            further, skip = mixed(value.tanh() * gate.sigmoid()).split(self.width, 1)
            x = x + further
            skips.append(skip)
        return self.head(sum(skips)).transpose(1, 2)


class Crossed(nn.Module):
    """Latents read inputs by attention."""

    def __init__(self, width: int, inputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.of_inputs = nn.LayerNorm(width), nn.LayerNorm(inputs)
        self.query, self.read, self.out = nn.Linear(width, width), nn.Linear(inputs, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        key, value = self.read(self.of_inputs(inputs)).chunk(2, -1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query(self.norm(x)), key, value)
        )
        return x + self.out(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Perceiver(nn.Module):
    """Many inputs [N, T, F], read by few latents."""

    def __init__(self, length: int = 512, features: int = 32, latents: int = 32, width: int = 128) -> None:
        super().__init__()
        self.positions = Positions(length, features)
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.crossed = nn.ModuleList(Crossed(width, features, 4) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Residual(nn.LayerNorm(width), Attention(width, 4, False, True)),
                Residual(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
            )
            for _ in range(2)
        )
        self.head = nn.Sequential(Mean(1), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.positions(x)
        found = self.latents.expand(x.shape[0], -1, -1)
        for crossed, block in zip(self.crossed, self.blocks, strict=True):
            found = block(crossed(found, inputs))
        return self.head(found)


class NBeats(nn.Module):
    """Windows [N, T]: each block forecasts, and takes from the window what it explains."""

    def __init__(self, length: int = 50, width: int = 256, blocks: int = 6) -> None:
        super().__init__()
        self.length = length
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            sizes = [length, *[width] * 4]
            layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
            self.blocks.append(nn.Sequential(*layers, nn.Linear(width, 8), nn.Linear(8, length + CLASSES)))

    def forward(self, x: Tensor) -> Tensor:
        forecasts = []
        for block in self.blocks:
            explained, forecast = block(x).split([self.length, CLASSES], 1)
            x = x - explained
            forecasts.append(forecast)
        return sum(forecasts)


def fused_mbconv(width: int = 24, blocks: int = 4) -> nn.Module:
    """EfficientNetV2's first stages: images [N, 3, H, W] to logits."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        wide = 4 * inputs
        return [
            nn.Conv2d(inputs, wide, 3, stride, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]

    layers = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU()]
    layers += [Residual(*block(width, width, 1)) for _ in range(blocks // 2)]
    layers += block(width, 2 * width, 2)
    layers += [Residual(*block(2 * width, 2 * width, 1)) for _ in range(blocks // 2)]
    return nn.Sequential(*layers, Mean(2, 3), nn.Linear(2 * width, CLASSES))


class StateSpace(nn.Module):
    """Sequences [N, T, F] by diagonal state spaces, each channel a causal product [T, T] of its decays."""

    def __init__(self, length: int = 128, features: int = 16, width: int = 64, state: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(features, width), nn.Linear(width, CLASSES)
        self.decays = nn.ParameterList(nn.Parameter(torch.rand(width, state)) for _ in range(layers))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, state) / state) for _ in range(layers))
        self.norms = nn.ModuleList(RMS(width) for _ in range(layers))
        self.mixed = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.register_buffer("lags", torch.arange(length)[:, None] - torch.arange(length)[None])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        lags = self.lags
        times = torch.arange(lags.shape[0], device=x.device, dtype=x.dtype)
        for decay, weight, norm, mixed in zip(self.decays, self.weights, self.norms, self.mixed, strict=True):
            impulse = (weight[..., None] * torch.exp(-decay[..., None] * times)).sum(1)
            kernel = torch.where(lags >= 0, impulse[:, lags.clamp(min=0)], 0.0)
            y = torch.einsum("nsd,dts->ntd", norm(x), kernel)
            value, gate = mixed(y).chunk(2, -1)
            x = x + value * torch.sigmoid(gate)
        return self.head(x)


class SetNetwork(nn.Module):
    """Sets [N, elements, F] to logits, by sums of exponentials over the elements."""

    def __init__(self, features: int = 16, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(features, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.own, self.of_all = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = functional.elu(self.own(x) + self.of_all(x.logsumexp(1, keepdim=True)))
        return self.head(x.logsumexp(1))


def autoencoder(width: int = 24) -> nn.Module:
    """Images [N, 3, H, W] to logits of each pixel, through a quarter of the size."""

    def norm(size: int) -> list[nn.Module]:
        return [nn.InstanceNorm2d(size, affine=True), nn.ReLU()]

    down = [nn.Conv2d(3, width, 3, 1, 1), *norm(width)]
    down += [nn.Conv2d(width, 2 * width, 3, 2, 1), *norm(2 * width)]
    down += [nn.Conv2d(2 * width, 4 * width, 3, 2, 1), *norm(4 * width)]
    up = [nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), *norm(2 * width)]
    up += [nn.ConvTranspose2d(2 * width, width, 4, 2, 1), *norm(width)]
    return nn.Sequential(*down, *up, nn.Conv2d(width, CLASSES, 1))


class DenseExperts(nn.Module):
    """Rows [N, F] by all experts, weighted by a gate."""

    def __init__(self, features: int = 64, width: int = 128, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(features, experts)
        self.first = nn.Parameter(torch.randn(experts, features, width) / features**0.5)
        self.second = nn.Parameter(torch.randn(experts, width, CLASSES) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(torch.einsum("ni,eio->neo", x, self.first))
        of_each = torch.einsum("neo,eoc->nec", hidden, self.second)
        return (of_each * self.gate(x).softmax(-1)[..., None]).sum(1)
