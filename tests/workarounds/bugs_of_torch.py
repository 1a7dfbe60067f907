"""Reproductions of bugs of PyTorch's exporters."""

from __future__ import annotations

import numpy as np
import onnxruntime

from workarounds.shown import shows


@shows("one tensor given twice")
def one_tensor_given_twice() -> bool:
    import torch

    class Difference(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - 2 * b

    one = torch.ones(3)
    program = torch.onnx.export(Difference().eval(), (one, one), dynamo=True, verbose=False)
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    feeds = {"a": np.ones(3, np.float32), "b": np.zeros(3, np.float32)}
    return not np.allclose(session.run(None, feeds)[0], 1)
