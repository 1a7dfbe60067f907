"""Modules of the generated zoo: one function a kind, with its sizes as arguments; importing this file imports torch."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

TESTS = str(Path(__file__).resolve().parent.parent / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)

from differential.modules import (  # noqa: E402
    RMS,
    Attention,
    Excitation,
    Last,
    Mean,
    Positions,
    Recurrent,
    Residual,
    Swapped,
)

CLASSES = 10


class MessagePassing(nn.Module):
    """Nodes [N, features] add up what they receive along edges [N, degree]: sums by scatter_add or index_put."""

    def __init__(self, width: int, layers: int, degree: int, sums: str, features: int = 32) -> None:
        super().__init__()
        self.sums = sums
        self.first = nn.Linear(features, width)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        source, target = source.flatten(), target.flatten()
        h = torch.relu(self.first(x))
        for layer in self.layers:
            message, zeros = torch.index_select(h, 0, source), torch.zeros_like(h)
            if self.sums == "index_put":  # index_add is exported wrong: without its sum
                received = zeros.index_put((target,), message, accumulate=True)
            else:
                received = zeros.scatter_add(0, target[:, None].expand_as(message), message)
            h = torch.relu(layer(torch.cat([h, received], 1)))
        return self.head(h)


def block(width: int, attention: nn.Module, norm: type[nn.Module] = nn.LayerNorm, factor: int = 4) -> nn.Module:
    """A transformer's block with its normalizations first."""
    inner = nn.Sequential(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))
    return nn.Sequential(Residual(norm(width), attention), Residual(norm(width), inner))


class FeatureTokens(nn.Module):
    """A table's columns as tokens: every number scales a vector of its own; a class token is read."""

    def __init__(self, features: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(0.1 * torch.randn(features, width))
        self.shift = nn.Parameter(0.1 * torch.randn(features, width))
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.blocks = nn.Sequential(*(block(width, Attention(width, heads, False, True)) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :, None] * self.scale + self.shift
        y = self.blocks(torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1))
        return self.head(y[:, 0])


class BiasedAttention(nn.Module):
    """Self-attention of sequences [B, T, width] with a learned bias of the distance for each head."""

    def __init__(self, width: int, heads: int, distances: Tensor, buckets: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner, self.outer = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.bias = nn.Embedding(buckets, heads)
        self.register_buffer("distances", distances)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.inner(x).chunk(3, -1)
        )
        bias = self.bias(self.distances).permute(2, 0, 1)[None]
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // self.heads) + bias, -1)
        return self.outer((weights @ v).transpose(1, 2).reshape(batch, length, width))


def relative_encoder(length: int, width: int, heads: int, layers: int, vocabulary: int) -> nn.Module:
    """An encoder as in T5: RMS normalization, and positions only as biases of attention, in buckets of distance."""
    places = torch.arange(length)
    distances = (places[None] - places[:, None]).clamp(-15, 15) + 15
    return nn.Sequential(
        nn.Embedding(vocabulary, width),
        *(block(width, BiasedAttention(width, heads, distances, 31), RMS) for _ in range(layers)),
        RMS(width),
        Mean(1),
        nn.Linear(width, CLASSES),
    )


def conformer(length: int, width: int, heads: int, layers: int, kernel: int) -> nn.Module:
    """Halves of a feed-forward layer around attention and a gated depthwise convolution, on frames of 80 features."""

    def feed_forward() -> nn.Module:
        return Residual(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width), Scale(0.5)
        )

    def convolution() -> nn.Module:
        return Residual(
            nn.LayerNorm(width),
            Swapped(
                nn.Sequential(
                    nn.Conv1d(width, 2 * width, 1),
                    nn.GLU(1),
                    nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width),
                    nn.BatchNorm1d(width),
                    nn.SiLU(),
                    nn.Conv1d(width, width, 1),
                )
            ),
        )

    parts: list[nn.Module] = [nn.Linear(80, width), Positions(length, width)]
    for _ in range(layers):
        attention = Residual(nn.LayerNorm(width), Attention(width, heads, False, True))
        parts += [feed_forward(), attention, convolution(), feed_forward(), nn.LayerNorm(width)]
    return nn.Sequential(*parts, nn.Linear(width, CLASSES))


class Scale(nn.Module):
    """Multiply by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def tabular(features: int, width: int, layers: int) -> nn.Module:
    """Linear layers with batch normalization."""
    parts: list[nn.Module] = []
    for fan_in in [features] + [width] * (layers - 1):
        parts += [nn.Linear(fan_in, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, CLASSES))


class Recommender(nn.Module):
    """26 categories as vectors beside 13 numbers; ``tables``: one table for all categories, or one for each."""

    def __init__(self, tables: str, size: int, width: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("start", torch.arange(26) * size)
        counts = [26 * size] if tables == "one" else [size] * 26
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in counts)
        self.layers = nn.Sequential(
            nn.Linear(26 * width + 13, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        if len(self.tables) == 1:
            vectors = self.tables[0](category + self.start).flatten(1)
        else:
            vectors = torch.cat([table(category[:, column]) for column, table in enumerate(self.tables)], 1)
        return self.layers(torch.cat([numbers, vectors], 1))


class Windows(nn.Module):
    """Attention within windows of an image [B, H, W, width], rolled by half a window where ``shift``."""

    def __init__(self, width: int, heads: int, window: int, shift: bool) -> None:
        super().__init__()
        self.window, self.shift = window, window // 2 if shift else 0
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij"), -1).flatten(
            0, 1
        )
        difference = places[None] - places[:, None] + window - 1
        distances = difference[..., 0] * (2 * window - 1) + difference[..., 1]
        self.attention = BiasedAttention(width, heads, distances, (2 * window - 1) ** 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, across, width = x.shape
        size = self.window
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.reshape(batch, height // size, size, across // size, size, width).transpose(2, 3)
        x = self.attention(x.reshape(-1, size * size, width))
        x = x.reshape(batch, height // size, across // size, size, size, width).transpose(2, 3)
        x = x.reshape(batch, height, across, width)
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class ChannelsLast(nn.Module):
    """[B, C, H, W] as [B, H, W, C], or the other way."""

    def __init__(self, back: bool = False) -> None:
        super().__init__()
        self.order = (0, 3, 1, 2) if back else (0, 2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(*self.order)


def shifted_windows(image: int, patch: int, width: int, heads: int, window: int, layers: int) -> nn.Module:
    """A vision transformer with windows, every second layer shifted."""
    return nn.Sequential(
        nn.Conv2d(3, width, patch, patch),
        ChannelsLast(),
        *(block(width, Windows(width, heads, window, layer % 2 == 1)) for layer in range(layers)),
        nn.LayerNorm(width),
        Mean(1, 2),
        nn.Linear(width, CLASSES),
    )


class Causal(nn.Module):
    """A dilated 1-D convolution that sees only earlier steps."""

    def __init__(self, fan_in: int, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.before = (kernel - 1) * dilation
        self.layer = nn.Conv1d(fan_in, width, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(functional.pad(x, (self.before, 0)))


def temporal(length: int, channels: int, width: int, kernel: int, levels: int) -> nn.Module:
    """Residual pairs of causal 1-D convolutions whose dilation doubles; logits for every step."""
    parts: list[nn.Module] = [nn.Conv1d(channels, width, 1)]
    for level in range(levels):
        pair = [Causal(width, width, kernel, 2**level), nn.ReLU(), Causal(width, width, kernel, 2**level), nn.ReLU()]
        parts.append(Residual(*pair))
    return nn.Sequential(*parts, nn.Conv1d(width, CLASSES, 1), Swap())


class Swap(nn.Module):
    """Exchange the last two axes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def vgg(width: int, convolutions: int, hidden: int) -> nn.Module:
    """Three stages of 3x3 convolutions and pooling on 32x32 images, and two linear layers."""
    parts: list[nn.Module] = []
    channels = 3
    for stage in range(3):
        for _ in range(convolutions):
            parts += [nn.Conv2d(channels, width << stage, 3, padding=1), nn.ReLU()]
            channels = width << stage
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * channels, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def recurrent(kind: str, length: int, width: int, layers: int, both: bool) -> nn.Module:
    """A recurrent network over sequences of 64 features, in one direction or both."""
    layer = getattr(nn, kind)(64, width, layers, batch_first=True, bidirectional=both)
    return nn.Sequential(Recurrent(layer), Last(), nn.Linear(width * (2 if both else 1), CLASSES))


def volume(size: int, width: int, norm: bool) -> nn.Module:
    """3-D convolutions with or without batch normalization."""
    parts: list[nn.Module] = []
    channels = 1
    for stage in range(3):
        parts += [nn.Conv3d(channels, width << stage, 3, padding=1, bias=not norm)]
        parts += [nn.BatchNorm3d(width << stage)] * norm + [nn.ReLU(), nn.MaxPool3d(2)]
        channels = width << stage
    return nn.Sequential(*parts, Mean(2, 3, 4), nn.Linear(channels, CLASSES))


def depthwise(image: int, width: int, kernel: int, blocks: int, activation: str, excitation: bool) -> nn.Module:
    """Inverted bottlenecks: expanded by 1x1, filtered depthwise, gated by their means, projected by 1x1."""
    act = getattr(nn, activation)

    def layers(channels: int, filters: int, stride: int) -> nn.Module:
        hidden = 4 * channels
        parts = [nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), act()]
        parts += [nn.Conv2d(hidden, hidden, kernel, stride, kernel // 2, groups=hidden, bias=False)]
        parts += [nn.BatchNorm2d(hidden), act()] + [Excitation(hidden)] * excitation
        parts += [nn.Conv2d(hidden, filters, 1, bias=False), nn.BatchNorm2d(filters)]
        return Residual(*parts) if stride == 1 and channels == filters else nn.Sequential(*parts)

    stages: list[nn.Module] = []
    channels = width
    for stage in range(3):
        for position in range(blocks):
            stages.append(layers(channels, width << stage, 2 if stage and not position else 1))
            channels = width << stage
    stem = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), act()]
    return nn.Sequential(*stem, *stages, Mean(2, 3), nn.Linear(channels, CLASSES))


def segmentation(image: int, width: int, layers: int) -> nn.Module:
    """Dilated 3x3 convolutions at a quarter of the size, and bilinear resize to labels of every pixel."""
    parts: list[nn.Module] = []
    for channels, filters in ((3, width), (width, 2 * width)):
        parts += [nn.Conv2d(channels, filters, 3, 2, 1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]
    for layer in range(layers):
        rate = 2**layer
        convolution = nn.Conv2d(2 * width, 2 * width, 3, padding=rate, dilation=rate, bias=False)
        parts.append(Residual(convolution, nn.BatchNorm2d(2 * width), nn.ReLU()))
    resize = nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False)
    return nn.Sequential(*parts, nn.Conv2d(2 * width, CLASSES, 1), resize)


def convnext(image: int, width: int, layers: int) -> nn.Module:
    """Depthwise 7x7 convolutions, layer normalization of channels, and a feed-forward layer, in two stages."""

    def stage(channels: int) -> list[nn.Module]:
        return [
            Residual(
                nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
                ChannelsLast(),
                nn.LayerNorm(channels),
                nn.Linear(channels, 4 * channels),
                nn.GELU(),
                nn.Linear(4 * channels, channels),
                ChannelsLast(back=True),
            )
            for _ in range(layers)
        ]

    between = nn.Conv2d(width, 2 * width, 2, 2)
    parts = [nn.Conv2d(3, width, 2, 2), *stage(width), between, *stage(2 * width), Mean(2, 3)]
    return nn.Sequential(*parts, nn.LayerNorm(2 * width), nn.Linear(2 * width, CLASSES))


def mixer(image: int, patch: int, width: int, layers: int) -> nn.Module:
    """Feed-forward layers across patches and across channels, in turns."""
    patches = (image // patch) ** 2

    def layer() -> list[nn.Module]:
        across = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        inside = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        return [Residual(nn.LayerNorm(width), Swapped(across)), Residual(nn.LayerNorm(width), inside)]

    parts = [part for _ in range(layers) for part in layer()]
    start = [nn.Conv2d(3, width, patch, patch), nn.Flatten(2), Swap()]
    return nn.Sequential(*start, *parts, nn.LayerNorm(width), Mean(1), nn.Linear(width, CLASSES))


class Decoder(nn.Module):
    """A causal language model whose last layer is its embedding."""

    def __init__(self, length: int, width: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # it is also the last layer
        self.positions = Positions(length, width)
        self.blocks = nn.Sequential(*(block(width, Attention(width, heads, True, True)) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.norm(self.blocks(self.positions(self.embedding(tokens))))
        return functional.linear(y, self.embedding.weight)


def upsampler(width: int, stages: int, norm: bool) -> nn.Module:
    """Transposed convolutions from 64 numbers to labels of every pixel."""
    channels = width << stages
    parts: list[nn.Module] = [nn.Linear(64, 16 * channels), nn.Unflatten(1, (channels, 4, 4)), nn.ReLU()]
    for _ in range(stages):
        parts += [nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=not norm)]
        parts += [nn.BatchNorm2d(channels // 2)] * norm + [nn.ReLU()]
        channels //= 2
    return nn.Sequential(*parts, nn.Conv2d(channels, CLASSES, 3, padding=1))


class Grown(nn.Module):
    """x beside layers(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


def dense(growth: int, layers: int) -> nn.Module:
    """Two blocks in which every convolution of a 32x32 image sees all before it."""
    channels = 2 * growth
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for stage in range(2):
        for _ in range(layers):
            convolution = nn.Conv2d(channels, growth, 3, padding=1, bias=False)
            parts.append(Grown(nn.BatchNorm2d(channels), nn.ReLU(), convolution))
            channels += growth
        if not stage:
            half = channels // 2
            parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, half, 1, bias=False), nn.AvgPool2d(2)]
            channels = half
    return nn.Sequential(*parts, nn.BatchNorm2d(channels), nn.ReLU(), Mean(2, 3), nn.Linear(channels, CLASSES))


class TextConvolutions(nn.Module):
    """The largest responses of 1-D convolutions of several widths over a text."""

    def __init__(self, length: int, width: int, filters: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, filters, kernel) for kernel in (3, 4, 5))
        self.head = nn.Linear(3 * filters, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        return self.head(torch.cat([torch.relu(layer(x)).amax(2) for layer in self.convolutions], 1))


def unet(image: int, width: int) -> nn.Module:
    """Two levels with bilinear resize."""
    from zoo.architectures import UNet

    return UNet("bilinear", channels=3, width=width, classes=CLASSES)
