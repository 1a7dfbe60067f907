"""Accuracy of structured pruning at equal latency, against Torch-Pruning.

Each architecture is trained densely in PyTorch and exported. Torch-Pruning removes half of the channels of every layer,
with its defaults; onnxtrain removes as few multiply-adds as make the network as fast in a direct comparison. Neither
trains before the cut. Torch-Pruning ranks channels by the magnitude of their weights in PyTorch; onnxtrain ranks those
of the exported file, into which the exporter has folded batch normalizations, by what they add to the layers that read
them on 256 training images, and recalibrates the layers on these images. onnxtrain fine-tunes both results with the
same optimizer, batches and epochs.
"""

from __future__ import annotations

import copy
import csv
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from idx import read_digits
from torch import nn

import onnxtrain
from onnxtrain.plugins.pruning.structures import measured_speedup

DENSE_EPOCHS, TUNE_EPOCHS, BATCH = 3, 2, 64
RATIO = 0.5
"""Fraction of the channels that Torch-Pruning removes; multiples of 16 remain, which ONNX Runtime runs fast."""

PARTS = np.arange(0.3, 0.96, 0.02)
"""Fractions of the multiply-adds that onnxtrain removes, tried in this order. A network with fewer of them may be
slower: channels are removed by 16 only as long as that is enough."""

Arrays = tuple[np.ndarray, np.ndarray]


class Block(nn.Module):
    """Two convolutions and a residual sum."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both branches."""
        y = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.norms[1](self.two(y)) + self.skip(x))


def resnet() -> nn.Module:
    """A residual network of seven 3 x 3 convolutions, 32 to 128 channels wide."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def vgg() -> nn.Module:
    """A plain network of four convolutions, 32 to 128 channels wide, and two linear layers."""

    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    pool = nn.MaxPool2d(2)
    return nn.Sequential(
        *layer(1, 32), pool, *layer(32, 64), pool, *layer(64, 64), *layer(64, 128), pool,
        nn.Flatten(), nn.Linear(128 * 9, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Inverted(nn.Module):
    """An inverted residual block: widen, convolve each channel alone, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 2 * inputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.adds = inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's result, added to its input where the shapes allow it."""
        return x + self.layers(x) if self.adds else self.layers(x)


def mobilenet() -> nn.Module:
    """A network of five inverted residual blocks with depthwise convolutions, 32 to 128 channels wide."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(),
        Inverted(32, 32, 1), Inverted(32, 64, 2), Inverted(64, 64, 1), Inverted(64, 128, 2), Inverted(128, 128, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


class Dense(nn.Module):
    """Three convolutions, each of which reads the results of all before it."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(inputs + growth * number, growth, 3, 1, 1, bias=False), nn.BatchNorm2d(growth), nn.ReLU()
            )
            for number in range(3)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and all results, side by side."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet() -> nn.Module:
    """A network of two blocks of three convolutions, 32 channels more with each, and a narrowing layer between them."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), Dense(32, 32), nn.Conv2d(128, 64, 1), nn.ReLU(), nn.MaxPool2d(2),
        Dense(64, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10),
    )  # fmt: skip


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "ResNet": resnet,
    "VGG": vgg,
    "MobileNet": mobilenet,
    "DenseNet": densenet,
}


@dataclass
class Pair:
    """Accuracy and speed of both tools for one architecture and seed.

    Attributes:
        name: The architecture.
        seed: The seed of its training.
        dense: Accuracy of the trained network.
        ours: That of onnxtrain's network after fine-tuning.
        ours_cut: The same before fine-tuning.
        theirs: That of Torch-Pruning's network after fine-tuning.
        theirs_cut: The same before fine-tuning.
        speedup: How many times as fast as the dense network Torch-Pruning's is.
        ratio: How many times as fast as Torch-Pruning's network onnxtrain's is.
    """

    name: str
    seed: int
    dense: float
    ours: float
    ours_cut: float
    theirs: float
    theirs_cut: float
    speedup: float
    ratio: float


def images(folder: Path, examples: int) -> tuple[Arrays, Arrays]:
    """Training and test images of a data set in the format of MNIST."""
    x, y = read_digits(folder, "train")
    test_x, test_y = read_digits(folder, "t10k")
    return (x[:examples], y[:examples]), (test_x[:examples], test_y[:examples])


def train_dense(module: nn.Module, data: Arrays, seed: int) -> None:
    """Train a network in PyTorch."""
    x, y = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    steps = DENSE_EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    generator = torch.Generator().manual_seed(seed)
    module.train()
    for _ in range(DENSE_EPOCHS):
        for rows in torch.randperm(len(x), generator=generator)[: len(x) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    module.eval()


def export(module: nn.Module) -> onnx.ModelProto:
    """The network as an ONNX model with a dynamic batch size."""
    program = torch.onnx.export(
        module, (torch.zeros(2, 1, 28, 28),), dynamo=True, opset_version=18, verbose=False, external_data=False,
        input_names=["x"], dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    )  # fmt: skip
    model: onnx.ModelProto = program.model_proto
    return model


def theirs(module: nn.Module) -> onnx.ModelProto:
    """Remove half of the channels and hidden units of every layer but the last by Torch-Pruning."""
    import torch_pruning as tp

    network: Any = copy.deepcopy(module)
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1:]
    tp.pruner.MetaPruner(
        network, torch.zeros(2, 1, 28, 28), importance=tp.importance.MagnitudeImportance(p=2), pruning_ratio=RATIO,
        ignored_layers=last,
    ).step()  # fmt: skip
    return export(network)


def timed(before: onnx.ModelProto, after: onnx.ModelProto) -> float:
    """Speed-up of the second model: the median of three measurements, each the median of many pairs."""
    return statistics.median(measured_speedup(before, after) for _ in range(3))


def ours(dense: onnx.ModelProto, other: onnx.ModelProto, data: Arrays) -> onnx.ModelProto:
    """Remove as few multiply-adds by onnxtrain as make the network as fast as the other one."""
    for part in PARTS:
        result = onnxtrain.prune(
            dense, data, loss="softmax_cross_entropy", structure=("channels", "hidden"), flops=float(part),
            method="magnitude", epochs=0, fine_tune_epochs=0, validation=(data[0][:256], data[1][:256]),
        )  # fmt: skip
        if timed(other, result.model()) >= 1:
            return result.model()
    raise AssertionError("the network does not become as fast")


def measured(model: onnx.ModelProto, test: Arrays) -> float:
    """The accuracy of a model on test images."""
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy")
    return float(trainer.evaluate(test, metrics=["accuracy"])["accuracy"])


def fine_tune(model: onnx.ModelProto, data: Arrays, test: Arrays, seed: int) -> float:
    """Fine-tune a model; return its accuracy on test images."""
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-3), seed=seed)
    trainer.fit(data, epochs=TUNE_EPOCHS, batch_size=BATCH, schedule="cosine")
    return float(trainer.evaluate(test, metrics=["accuracy"])["accuracy"])


def pairs(folder: Path, examples: int, seeds: int, file: Path | None) -> Iterator[Pair]:
    """Both tools on every architecture and seed; those that a CSV file has are read from it, and new ones appended."""
    warnings.simplefilter("ignore")
    done = {(row.name, row.seed): row for row in read(file)}
    data, test = images(folder, examples)
    for seed in range(seeds):
        for name, make in ARCHITECTURES.items():
            row = done.get((name, seed))
            if row is None:
                row = pair(name, make, seed, data, test)
                append(file, row)
            yield row


def pair(name: str, make: Callable[[], nn.Module], seed: int, data: Arrays, test: Arrays) -> Pair:
    """Both tools on one architecture and seed."""
    torch.manual_seed(seed)
    module = make()
    train_dense(module, data, seed)
    dense, other = export(module), theirs(module)
    own = ours(dense, other, data)
    return Pair(
        name=name,
        seed=seed,
        dense=measured(dense, test),
        ours=fine_tune(own, data, test, seed),
        ours_cut=measured(own, test),
        theirs=fine_tune(other, data, test, seed),
        theirs_cut=measured(other, test),
        speedup=timed(dense, other),
        ratio=timed(other, own),
    )


def read(file: Path | None) -> list[Pair]:
    """The rows of a CSV file; none where there is no file."""
    if file is None or not file.exists():
        return []
    kinds = {field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in fields(Pair)}
    with file.open(newline="") as stream:
        return [Pair(**{name: kind(row[name]) for name, kind in kinds.items()}) for row in csv.DictReader(stream)]


def append(file: Path | None, row: Pair) -> None:
    """Add a row to a CSV file."""
    if file is None:
        return
    fresh = not file.exists()
    with file.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Pair)])
        if fresh:
            writer.writeheader()
        writer.writerow(asdict(row))


def table(rows: list[Pair]) -> str:
    """Means over the seeds as a Markdown table."""
    lines = [
        "| architecture | seeds | dense, % | onnxtrain, % | Torch-Pruning, % | difference, points | "
        "before fine-tuning, % | Torch-Pruning's speed, times dense | onnxtrain's, times Torch-Pruning's |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]

        def mean(field: str, own: list[Pair] = own) -> float:
            return statistics.mean(getattr(row, field) for row in own)

        differences = [100 * (row.ours - row.theirs) for row in own]
        cells = [
            name,
            len(own),
            *(f"{100 * mean(field):.1f}" for field in ("dense", "ours", "theirs")),
            f"{statistics.mean(differences):+.1f} ({min(differences):+.1f} to {max(differences):+.1f})",
            f"{100 * mean('ours_cut'):.0f} and {100 * mean('theirs_cut'):.0f}",
            f"{mean('speedup'):.1f}",
            f"{mean('ratio'):.2f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
