"""Accuracy of structured pruning at equal latency, against Torch-Pruning.

Each architecture is trained densely in PyTorch and exported. Torch-Pruning removes half of the channels of every layer,
with its defaults; onnxtrain is asked to remove what makes the network as fast as that. Both cut the same weights by
magnitude, without training before the cut, and onnxtrain fine-tunes both with the same optimizer, batches and epochs.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from idx import read_digits
from torch import nn

import onnxtrain
from onnxtrain.pruning.latency import speedup as measured_speedup

DENSE_EPOCHS, TUNE_EPOCHS, BATCH = 3, 2, 64
RATIO = 0.5
"""Fraction of the channels that Torch-Pruning removes; multiples of 16 remain, which ONNX Runtime runs fast."""

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


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {"ResNet": resnet, "VGG": vgg}


@dataclass
class Pair:
    """Accuracy and speed-up of both tools for one architecture and seed."""

    name: str
    seed: int
    dense: float
    ours: float
    ours_speedup: float
    theirs: float
    theirs_speedup: float


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


def timed(dense: onnx.ModelProto, model: onnx.ModelProto) -> float:
    """Speed-up of a model over the dense one: the median of three measurements."""
    return statistics.median(measured_speedup(dense, model) for _ in range(3))


def fine_tune(model: onnx.ModelProto, data: Arrays, test: Arrays, seed: int) -> float:
    """Fine-tune a model; return its accuracy on test images."""
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-3), seed=seed)
    trainer.fit(data, epochs=TUNE_EPOCHS, batch_size=BATCH, schedule="cosine")
    return float(trainer.evaluate(test, metrics=["accuracy"])["accuracy"])


def pairs(folder: Path, examples: int, seeds: int) -> Iterator[Pair]:
    """Both tools on every architecture and seed."""
    warnings.simplefilter("ignore")
    data, test = images(folder, examples)
    for seed in range(seeds):
        for name, make in ARCHITECTURES.items():
            torch.manual_seed(seed)
            module = make()
            train_dense(module, data, seed)
            dense = export(module)
            before = float(
                onnxtrain.Trainer(dense, loss="softmax_cross_entropy").evaluate(test, metrics=["accuracy"])["accuracy"]
            )
            other = theirs(module)
            result = onnxtrain.prune(
                dense, data, loss="softmax_cross_entropy", structure=("channels", "hidden"),
                speedup=timed(dense, other), method="magnitude", epochs=0, fine_tune_epochs=0,
            )  # fmt: skip
            own = result.model()
            yield Pair(
                name, seed, before, fine_tune(own, data, test, seed), timed(dense, own),
                fine_tune(other, data, test, seed), timed(dense, other),
            )  # fmt: skip


def table(rows: list[Pair]) -> str:
    """Means over the seeds as a Markdown table."""
    lines = [
        "| architecture | seeds | dense, % | onnxtrain, % | times as fast | Torch-Pruning, % | times as fast | "
        "difference, points |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]

        def mean(field: str, own: list[Pair] = own) -> float:
            return statistics.mean(getattr(row, field) for row in own)

        differences = [100 * (row.ours - row.theirs) for row in own]
        lines.append(
            f"| {name} | {len(own)} | {100 * mean('dense'):.1f} | {100 * mean('ours'):.1f} | "
            f"{mean('ours_speedup'):.1f} | {100 * mean('theirs'):.1f} | {mean('theirs_speedup'):.1f} | "
            f"{statistics.mean(differences):+.1f} ({min(differences):+.1f} to {max(differences):+.1f}) |"
        )
    return "\n".join(lines) + "\n"
