"""Recurrent networks for ``recurrent.py``: one or two layers over 100 time steps, and logits of the last state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmark_model import BenchmarkModel

if TYPE_CHECKING:
    import torch

STEPS = 100
KINDS = ("LSTM", "GRU", "RNN")
WIDTHS = (64, 256, 1024)
LAYERS = (1, 2)


def _network(kind: str, width: int, layers: int) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        from torch import nn

        class Network(nn.Module):
            """[batch, steps, width] to logits."""

            def __init__(self) -> None:
                super().__init__()
                self.recurrent = getattr(nn, kind)(width, width, layers)
                self.head = nn.Linear(width, 10)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.recurrent(x.transpose(0, 1))[0][-1])

        return Network()

    return build


RECURRENT: dict[str, BenchmarkModel] = {
    model.name: model
    for model in (
        BenchmarkModel(
            f"{kind.lower()}-{width}-{layers}",
            f"{kind}, {width} wide, {layers} layer{'s' if layers > 1 else ''}",
            _network(kind, width, layers),
            {"x": (STEPS, width)},
        )
        for kind in KINDS
        for width in WIDTHS
        for layers in LAYERS
    )
}
