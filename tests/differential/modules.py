"""Random PyTorch modules: layers of all kinds in random order, with an output that fits a loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "CELU": lambda: nn.CELU(1.3),
    "ELU": lambda: nn.ELU(0.7),
    "GELU": nn.GELU,
    "GELU of tanh": lambda: nn.GELU(approximate="tanh"),
    "Hardshrink": lambda: nn.Hardshrink(0.2),
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Hardtanh": lambda: nn.Hardtanh(-0.8, 1.2),
    "LeakyReLU": lambda: nn.LeakyReLU(0.1),
    "LogSigmoid": nn.LogSigmoid,
    "Mish": nn.Mish,
    "PReLU": nn.PReLU,
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "SELU": nn.SELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Softmax": lambda: nn.Softmax(-1),
    "Softplus": lambda: nn.Softplus(1.5),
    "Softshrink": lambda: nn.Softshrink(0.2),
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
    "Tanhshrink": nn.Tanhshrink,
}


class Draw:
    """Random choices, determined by a seed.

    Args:
        *seed: Non-negative integers.
    """

    def __init__(self, *seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def pick(self, choices: Sequence[Any]) -> Any:
        """Return one of the choices."""
        return choices[int(self.generator.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return bool(self.generator.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return int(self.generator.integers(low, high + 1))

    def activation(self) -> nn.Module:
        """Return an activation of any kind."""
        return ACTIVATIONS[self.pick(sorted(ACTIVATIONS))]()


class Residual(nn.Module):
    """x + layers(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer of sequences [N, T, features]."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.batch_first:
            return self.layer(x)[0]
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


class Swapped(nn.Module):
    """Apply a layer with the last two axes exchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention written with matmuls and softmax, with or without a causal mask."""

    def __init__(self, size: int, heads: int, causal: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inner = nn.Linear(size, 3 * size, bias=bias)
        self.outer = nn.Linear(size, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, size // self.heads).transpose(1, 2)
            for part in self.inner(x).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.outer(mixed.transpose(1, 2).reshape(batch, length, size))


class LayerAttention(nn.Module):
    """PyTorch's own multi-head attention of a sequence with itself."""

    def __init__(self, size: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(size, heads, bias=bias, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


class Excitation(nn.Module):
    """Scale channels by a gate of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(channels, 3), nn.ReLU(), nn.Linear(3, channels), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x.mean((2, 3)))[:, :, None, None]


class Scaled(nn.Module):
    """A learned scale and shift, as in LayerScale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))
        self.beta = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma + self.beta


class RMS(nn.Module):
    """RMS normalization written with arithmetic operators."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Mean(nn.Module):
    """The mean over axes."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axes)


class Last(nn.Module):
    """The last step of a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1]


class Positions(nn.Module):
    """Learned positions, added to a sequence."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, length, size) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position


class Made(nn.Module):
    """Layers and a head; features of further inputs are added before the head.

    Args:
        body: From the first input to features.
        branches: From each further input to features [N, size].
        head: From features to the output.
        tied: The embedding whose weight the head shares, or None.
    """

    def __init__(self, body: nn.Sequential, branches: Sequence[nn.Module], head: nn.Module, tied: Any = None) -> None:
        super().__init__()
        self.body, self.branches, self.head = body, nn.ModuleList(branches), head
        if tied is not None:
            self.head.weight = tied.weight

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        if others:
            parts = [branch(other) for branch, other in zip(self.branches, others, strict=True)]
            features = torch.cat([features, *parts], -1)
        return self.head(features)


class MadeOfTwo(Made):
    """The same with two inputs, since exporters need their names in the signature."""

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return super().forward(x, z)


class MadeOfOne(Made):
    """The same with one input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@dataclass
class Model:
    """A random module and its export.

    Attributes:
        module: The module in evaluation mode, no two elements of its parameters and statistics equal.
        shapes: Shapes of the inputs without the batch.
        vocabulary: Size of the vocabulary, where the inputs are tokens; else 0.
        kind: Form of the output: "vector" [N, C], "sequence" [N, T, C] or "image" [N, C, H, W].
        exporter: "dynamo" or "torchscript".
        batch: The fixed batch size, or None.
        file: The exported file.
        output: Shape of the output without the batch.
    """

    module: nn.Module
    shapes: list[tuple[int, ...]]
    vocabulary: int
    kind: str
    exporter: str
    batch: int | None
    file: onnx.ModelProto
    output: tuple[int, ...]
    text: str

    def has_batch_norm(self) -> bool:
        """Return whether there are layers of batch normalization."""
        return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.module.modules())

    def inputs(self, generator: np.random.Generator, batch: int) -> tuple[np.ndarray, ...]:
        """Return random inputs."""
        return tuple(
            generator.integers(0, self.vocabulary, (batch, *shape))
            if self.vocabulary and position == 0
            else generator.normal(size=(batch, *shape)).astype(np.float32)
            for position, shape in enumerate(self.shapes)
        )


def make_model(seed: int) -> Model:
    """Draw a module, and export it.

    Args:
        seed: Seed of everything.
    """
    draw = Draw(26, seed)
    torch.manual_seed(seed)
    family = draw.pick(["vector", "vector", "image", "image", "image", "sequence", "sequence", "tokens", "tokens"])
    exporter = draw.pick(["dynamo", "torchscript"])
    free = draw.chance(0.6)
    batch = draw.integer(2, 4)
    vocabulary = 11 if family == "tokens" else 0
    shape = {
        "vector": (draw.integer(3, 8),),
        "image": (draw.integer(1, 4), draw.integer(6, 9), draw.integer(6, 9)),
        "sequence": (draw.integer(3, 6), draw.integer(3, 6)),
        "tokens": (draw.integer(3, 6),),
    }[family]
    make = {"vector": _vector_layer, "image": _image_layer, "sequence": _sequence_layer, "tokens": _sequence_layer}
    layers: list[nn.Module] = []
    tied = None
    x = torch.zeros(2, *shape, dtype=torch.int64) if vocabulary else torch.randn(2, *shape)
    if vocabulary:
        tied = nn.Embedding(vocabulary, draw.pick([4, 6, 8]))
        layers.append(tied)
        if draw.chance(0.5):
            layers.append(Positions(shape[0], tied.embedding_dim))
        x = nn.Sequential(*layers)(x)
    with torch.no_grad():
        for _ in range(draw.integer(1, 4)):
            layer = make[family](draw, x, exporter).eval()
            x = layer(x)
            layers.append(layer)
    kind = "vector"
    if family == "image" and draw.chance(0.35):
        kind = "image"
    elif family == "image":
        layers.append(draw.pick([nn.Flatten(), Mean(2, 3), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())]))
    elif family in ("sequence", "tokens") and draw.chance(0.55):
        kind = "sequence"
    elif family in ("sequence", "tokens"):
        layers.append(draw.pick([nn.Flatten(), Mean(1), Last()]))
    body = nn.Sequential(*layers).eval()
    start = torch.zeros(2, *shape, dtype=torch.int64) if vocabulary else torch.randn(2, *shape)
    with torch.no_grad():
        features = body(start)
    shapes = [shape]
    branches: list[nn.Module] = []
    size = features.shape[1] if kind == "image" else features.shape[-1]
    if kind == "vector" and draw.chance(0.25):
        other = draw.integer(2, 5)
        shapes.append((other,))
        branches.append(nn.Sequential(nn.Linear(other, 4), draw.activation()))
        size += 4
    classes = draw.integer(3, 6)
    ties = bool(vocabulary) and kind == "sequence" and draw.chance(0.5)
    if ties and size == tied.embedding_dim:
        head: nn.Module = nn.Linear(size, vocabulary, bias=draw.chance(0.5))
    else:
        ties = False
        out = vocabulary if vocabulary and kind == "sequence" else classes
        head = nn.Conv2d(size, out, 1) if kind == "image" else nn.Linear(size, out, bias=draw.chance(0.85))
    made = MadeOfTwo if branches else MadeOfOne
    module = _make_distinct(made(body, branches, head, tied if ties else None), draw.generator).eval()
    options: dict[str, Any] = {}
    model = Model(module, shapes, vocabulary, kind, exporter, None if free else batch, onnx.ModelProto(), (), "")
    example = tuple(torch.from_numpy(array) for array in model.inputs(draw.generator, batch))
    with torch.no_grad():
        model.output = tuple(module(*example).shape[1:])
    try:
        model.file = _export(module, example, exporter, free, model.has_batch_norm(), draw, options)
    except torch.onnx.errors.SymbolicValueError:  # the older exporter loses sizes after a replicated border, say
        model.exporter = exporter = "dynamo"
        model.file = _export(module, example, exporter, free, model.has_batch_norm(), draw, options)
    how = f"{exporter} {'free' if free else f'batch {batch}'} {options}"
    model.text = " ".join(f"{how}: {module}".split())
    return model


def _make_distinct(module: nn.Module, generator: np.random.Generator) -> nn.Module:
    """Give all elements of parameters and running statistics values that no two of them share."""
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    seen: set[float] = set()
    for tensor in tensors:
        flat = tensor.detach().numpy().reshape(-1)
        for position, value in enumerate(flat):
            while (new := float(np.float32(value + 0.1 * generator.random()))) in seen or new == 0:
                pass
            seen.add(new)
            flat[position] = new
    return module


def _export(
    module: nn.Module,
    example: tuple[torch.Tensor, ...],
    exporter: str,
    free: bool,
    has_batch_norm: bool,
    draw: Draw,
    options: dict[str, Any],
) -> onnx.ModelProto:
    import io
    import os
    import tempfile

    call: dict[str, Any] = {"verbose": False}
    if exporter == "dynamo":
        options["optimize"] = not has_batch_norm and draw.chance(0.8)  # it folds batch normalization into weights
        call |= {"dynamo": True, "external_data": False, **options}
        if free:
            names = ("x", "z")[: len(example)]
            call["dynamic_shapes"] = {name: {0: torch.export.Dim("N", min=1)} for name in names}
    else:
        options["opset_version"] = draw.pick([14, 15, 17, 18, 20])
        call |= {"dynamo": False, "input_names": ["x", "z"][: len(example)], **options}
        if has_batch_norm:  # evaluation mode folds it
            call |= {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
        if free:
            call["dynamic_axes"] = {name: {0: "N"} for name in call["input_names"]}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        path = os.path.join(folder, "model.onnx")
        quiet = io.StringIO()
        import contextlib

        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            torch.onnx.export(module, example, path, **call)
        module.eval()
        return onnx.load(path)


def _norm_of_last(draw: Draw, size: int) -> nn.Module:
    return draw.pick(
        [
            lambda: nn.LayerNorm(size),
            lambda: nn.LayerNorm(size, elementwise_affine=False),
            lambda: nn.LayerNorm(size, bias=False),
            lambda: RMS(size),
            lambda: Scaled(size),
        ]
    )()


def _vector_layer(draw: Draw, x: torch.Tensor, exporter: str) -> nn.Module:
    size = x.shape[1]
    what = draw.pick(["linear", "linear", "linear", "residual", "norm", "batch norm", "glu", "dropout", "bottleneck"])
    if what == "residual":
        return Residual(nn.Linear(size, size), draw.activation(), nn.Linear(size, size, bias=draw.chance(0.7)))
    if what == "norm":
        return nn.Sequential(_norm_of_last(draw, size), draw.activation())
    if what == "batch norm":
        return nn.Sequential(nn.Linear(size, 5), nn.BatchNorm1d(5, momentum=draw.pick([0.1, 0.3])), draw.activation())
    if what == "glu":
        return nn.Sequential(nn.Linear(size, 8), nn.GLU())
    if what == "dropout":
        return nn.Sequential(nn.Linear(size, 7), nn.ReLU(), nn.Dropout(0.4))
    if what == "bottleneck":
        return Residual(nn.LayerNorm(size), nn.Linear(size, 3), draw.activation(), nn.Linear(3, size))
    return nn.Sequential(nn.Linear(size, draw.integer(3, 9), bias=draw.chance(0.8)), draw.activation())


def _image_layer(draw: Draw, x: torch.Tensor, exporter: str) -> nn.Module:
    channels, height, width = x.shape[1:]
    out = draw.pick([3, 4, 6, 8])
    small = min(height, width) < 4
    large = max(height, width) > 16
    what = draw.pick(
        [
            "conv",
            "conv",
            "depthwise",
            "dilated",
            "transposed",
            "pool",
            "norm",
            "residual",
            "excite",
            "upsample",
            "pixel",
        ]
    )
    if what == "transposed" and not large:
        stride = draw.pick([1, 2])
        groups = 2 if channels % 2 == 0 and draw.chance(0.3) else 1
        layer = nn.ConvTranspose2d(
            channels,
            out + out % groups,
            draw.pick([2, 3]),
            stride,
            padding=draw.pick([0, 1]),
            output_padding=1 if stride == 2 and draw.chance(0.4) else 0,
            groups=groups,
            bias=draw.chance(0.7),
        )
        return nn.Sequential(layer, draw.activation())
    if what == "pool" and not small:
        return draw.pick(
            [
                lambda: nn.MaxPool2d(2),
                lambda: nn.MaxPool2d(3, 2, 1),
                lambda: nn.MaxPool2d(2, ceil_mode=True),
                lambda: nn.AvgPool2d(2),
                lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=draw.chance(0.5)),
                lambda: nn.AvgPool2d(2, ceil_mode=True),
                lambda: nn.LPPool2d(2, 2),
                lambda: nn.AdaptiveAvgPool2d((height, 1)),
            ]
        )()
    if what == "norm":
        return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=draw.chance(0.5)), _image_norm(draw, out))
    if what == "residual":
        return Residual(nn.Conv2d(channels, channels, 3, padding=1), _image_norm(draw, channels), draw.activation())
    if what == "excite":
        return Excitation(channels)
    if what == "upsample" and not large:
        return nn.Sequential(
            nn.Conv2d(channels, out, 1), nn.Upsample(scale_factor=2, mode=draw.pick(["nearest", "bilinear"]))
        )
    if what == "pixel" and not large:
        return nn.Sequential(nn.Conv2d(channels, 8, 1), nn.PixelShuffle(2), draw.activation())
    if what == "depthwise":
        return nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.Conv2d(channels, out, 1), draw.activation()
        )
    if what == "dilated" and not small:
        return nn.Sequential(nn.Conv2d(channels, out, 2, dilation=2, padding=1), draw.activation())
    mode = draw.pick(["zeros", "zeros", "zeros", "reflect", "replicate"]) if not small else "zeros"
    kernel = draw.pick([1, 3, (3, 1), (1, 2)])
    stride = draw.pick([1, 1, 2]) if not small else 1
    padding = 1 if kernel == 3 else 0
    layer = nn.Conv2d(channels, out, kernel, stride, padding, padding_mode=mode, bias=draw.chance(0.8))
    return nn.Sequential(layer, draw.activation()) if min(height, width) >= 3 else nn.Conv2d(channels, out, 1)


def _image_norm(draw: Draw, channels: int) -> nn.Module:
    groups = draw.pick([g for g in (1, 2, 3, 4) if channels % g == 0])
    return draw.pick(
        [
            lambda: nn.BatchNorm2d(channels, momentum=draw.pick([0.1, 0.4])),
            lambda: nn.BatchNorm2d(channels, affine=False),
            lambda: nn.GroupNorm(groups, channels),
            lambda: nn.GroupNorm(groups, channels, affine=False),
            lambda: nn.InstanceNorm2d(channels, affine=True),
            lambda: nn.InstanceNorm2d(channels),
        ]
    )()


def _sequence_layer(draw: Draw, x: torch.Tensor, exporter: str) -> nn.Module:
    size = x.shape[2]
    what = draw.pick(
        ["recurrent", "recurrent", "recurrent", "attention", "attention", "conv", "linear", "norm", "block", "encoder"]
    )
    heads = draw.pick([h for h in (1, 2, 3) if size % h == 0])
    if what == "recurrent":
        kind = draw.pick([nn.LSTM, nn.GRU, nn.RNN])
        more = {"nonlinearity": draw.pick(["tanh", "relu"])} if kind is nn.RNN else {}
        layer = kind(
            size,
            draw.pick([3, 4]),
            num_layers=draw.pick([1, 1, 2]),
            bias=draw.chance(0.8),
            batch_first=draw.chance(0.7),
            bidirectional=draw.chance(0.35),
            **more,
        )
        return Recurrent(layer)
    if what == "attention":
        return Residual(_norm_of_last(draw, size), _attention(draw, size, heads))
    if what == "conv":
        return Swapped(nn.Sequential(nn.Conv1d(size, 6, 3, padding=1), draw.activation()))
    if what == "norm":
        return _norm_of_last(draw, size)
    if what == "block" or (what == "encoder" and exporter == "torchscript"):
        return nn.Sequential(
            Residual(nn.LayerNorm(size), _attention(draw, size, heads)),
            Residual(nn.LayerNorm(size), nn.Linear(size, 8), draw.activation(), nn.Linear(8, size)),
        )
    if what == "encoder":
        return nn.TransformerEncoderLayer(
            size,
            heads,
            8,
            dropout=0.0,
            batch_first=True,
            norm_first=draw.chance(0.5),
            activation=draw.pick(["relu", "gelu"]),
        )
    return nn.Sequential(nn.Linear(size, draw.pick([4, 6])), draw.activation())


def _attention(draw: Draw, size: int, heads: int) -> nn.Module:
    if draw.chance(0.5):
        return LayerAttention(size, heads, bias=draw.chance(0.8))
    return Attention(size, heads, causal=draw.chance(0.5), bias=draw.chance(0.8))
