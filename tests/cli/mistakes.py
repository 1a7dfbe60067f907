"""Mistakes for tests: command lines, damaged files, and the expected error message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def fit(*more: str) -> tuple[str, ...]:
    """A good command line, with flags added or replaced."""
    flags = {"--data": "train.npz", "--loss": "softmax_cross_entropy", "--output": "tuned.onnx"}
    added = [*more]
    for name in set(flags) & set(added):
        position = added.index(name)
        flags[name] = added[position + 1]
        del added[position : position + 2]
    return ("fit", "model.onnx", *(part for pair in flags.items() for part in pair), *added)


FIT = fit()


def nothing(folder: Path) -> None:
    """Leave the good files as they are."""


@dataclass(frozen=True)
class Mistake:
    """A mistake and the expected message."""

    name: str
    message: str
    arguments: tuple[str, ...] = FIT
    spoil: Callable[[Path], None] = nothing

    def __str__(self) -> str:
        return self.name


def hot(*values: float) -> Callable[[Path], None]:
    """Replace labels by vectors of these values over the classes."""

    def spoil(folder: Path) -> None:
        data = np.load(folder / "train.npz")
        targets = np.zeros((len(data["label"]), 3), np.float32)
        targets[:, : len(values)] = values
        np.savez(folder / "train.npz", input=data["input"], label=targets)

    return spoil


def nodes(*parts: onnx.NodeProto, weights: bool = True, scalar: bool = False) -> Callable[[Path], None]:
    """Put another graph from input [N, 4] to logits [N, 3] into the model file."""

    def spoil(folder: Path) -> None:
        graph = helper.make_graph(
            list(parts),
            "bad",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 4])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [] if scalar else ["N", 3])],
            [numpy_helper.from_array(np.ones((4, 3), np.float32), "weight")] if weights else [],
        )
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("my.domain", 1)]
        onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), folder / "model.onnx")

    return spoil
