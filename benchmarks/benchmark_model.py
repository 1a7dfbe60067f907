"""A network of the benchmarks: a torch module and its ONNX export."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

OPSET = 18
TEXT = {"input_ids": (128,), "attention_mask": (128,)}
VOCABULARY = 30522


@dataclass(frozen=True)
class BenchmarkModel:
    """One of the benchmark's networks.

    Attributes:
        name: Its key in ``MODELS``.
        description: A line for tables.
        build: Builds the torch module.
        inputs: Shape of each input without the batch dimension, by the name of the graph input.
        classes: The number of logits.
        vocabulary: Token inputs hold indices below it; 0 where inputs are floats.
        labels: Shape of the labels of one example: () for one label, (height, width) for one of every pixel.
    """

    name: str
    description: str
    build: Callable[[], torch.nn.Module]
    inputs: dict[str, tuple[int, ...]]
    classes: int = 10
    vocabulary: int = 0
    labels: tuple[int, ...] = ()

    def module(self, seed: int = 0) -> torch.nn.Module:
        """The torch module in training mode; the same seed gives the same weights, no two tensors equal."""
        import torch

        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            module = self.build().train()
            for parameter in module.parameters():
                # The exporter merges equal initializers (fresh scales and biases), which would tie them.
                parameter.add_(1e-3 * torch.randn_like(parameter))
            return module

    def batch(self, size: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Random inputs by name (a token model's mask is all ones) and int64 class indices [size, *labels]."""
        generator = np.random.default_rng(seed)
        inputs = {}
        for name, shape in self.inputs.items():
            if name == "attention_mask":
                inputs[name] = np.ones((size, *shape), np.int64)
            elif self.vocabulary:
                inputs[name] = generator.integers(0, self.vocabulary, (size, *shape))
            else:
                inputs[name] = generator.standard_normal((size, *shape)).astype(np.float32)
        return inputs, generator.integers(0, self.classes, (size, *self.labels))

    @staticmethod
    def torch_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """``LOSS`` as torch computes it."""
        from torch.nn import functional

        # torch expects [size, classes, length] for token logits.
        return functional.cross_entropy(logits.movedim(-1, 1) if logits.dim() == 3 else logits, target)

    def onnx(self, folder: str | os.PathLike[str], seed: int = 0) -> Path:
        """The path of the exported model in ``folder``, which is written there unless it is there already.

        The file has a dynamic batch, opset 18 and every parameter as an initializer of its own. A module with
        batch normalization is exported in training mode, so that both sides use the batch's statistics; no
        model has dropout, so the others are exported as for inference, with constants folded.
        """
        path = Path(folder) / f"{self.name}-{seed}.onnx"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            self._export(partial, seed)
            partial.replace(path)
        return path

    def _export(self, path: Path, seed: int) -> None:
        import torch

        module = self.module(seed)
        inputs, _ = self.batch(2)
        batch_norm = any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in module.modules())
        mode = torch.onnx.TrainingMode
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # deprecated, but the only exporter of training-mode batch norm
            torch.onnx.export(
                module,
                tuple(torch.from_numpy(array) for array in inputs.values()),
                str(path),
                dynamo=False,
                training=mode.TRAINING if batch_norm else mode.EVAL,
                do_constant_folding=not batch_norm,
                opset_version=OPSET,
                input_names=list(self.inputs),
                output_names=["logits"],
                dynamic_axes={name: {0: "batch"} for name in [*self.inputs, "logits"]},
            )


def architecture(name: str, *arguments: Any, **keywords: Any) -> Callable[[], torch.nn.Module]:
    """Build a module of tests/zoo/architectures.py, which tests and benchmarks share."""

    def build() -> torch.nn.Module:
        tests = str(Path(__file__).resolve().parent.parent / "tests")
        if tests not in sys.path:
            sys.path.append(tests)
        from zoo import architectures

        return getattr(architectures, name)(*arguments, **keywords)

    return build
