"""Routers of mixtures of experts have the same gradients as in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import onnxtrain


def _weights(torch: Any, kind: str, scores: Any, number: int) -> Any:
    zeros = torch.zeros_like(scores)
    if kind == "softmax after":
        best, places = scores.topk(number, -1)
        return zeros.scatter(-1, places, best.softmax(-1))
    chances = scores.softmax(-1)
    best, places = chances.topk(number, -1)
    if kind == "softmax before":
        return zeros.scatter(-1, places, best / best.sum(-1, keepdim=True))
    if kind == "one hot":
        return (torch.nn.functional.one_hot(places, 4).to(scores.dtype) * best.unsqueeze(-1)).sum(1)
    return zeros.scatter_add(-1, places, chances.gather(-1, places))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled("number")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("kind", ["softmax after", "softmax before", "one hot", "gathered"])
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_router_has_the_gradients_of_pytorch(tmp_path: Path, kind: str, number: int, dynamo: bool) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(6, 4)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 5) for _ in range(4))

        def forward(self, x):
            outputs = torch.stack([expert(x) for expert in self.experts], 1)
            return (outputs * _weights(torch, kind, self.gate(x), number).unsqueeze(-1)).sum(1)

    network, x = Experts().eval(), torch.randn(7, 6, requires_grad=True)
    path = tmp_path / "experts.onnx"
    named = {"input_names": ["x"], "output_names": ["y"]}
    if dynamo:
        torch.onnx.export(network, (x,), path, dynamo=True, external_data=False, verbose=False, **named)
    else:
        torch.onnx.export(network, (x,), path, dynamo=False, **named)
    network(x).sum().backward()
    derivative = onnxtrain.gradient(path, xs=["x"])
    session = onnxruntime.InferenceSession(derivative.SerializeToString())
    (found,) = session.run(["x_grad"], {"x": x.detach().numpy()})
    np.testing.assert_allclose(found, x.grad.numpy(), atol=1e-5)
