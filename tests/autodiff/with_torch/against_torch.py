"""Compare float32 gradients of ONNX Runtime with PyTorch's in float64, where ONNX's reference evaluator errs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper

from onnxtrain.runtime.testing import projected_gradient

Function = Callable[..., "torch.Tensor | Sequence[torch.Tensor]"]


def check_against_torch(
    node: onnx.NodeProto,
    inputs: Sequence[np.ndarray],
    function: Function,
    *,
    shapes: str = "static",
    opset: int = 18,
    tolerance: float = 1e-4,
) -> None:
    """Check that the first output and the gradients of all floating inputs of a node equal those of a function."""
    names = [name for name in node.input if name]
    feeds = {name: _single(array) for name, array in zip(names, inputs, strict=True)}
    tensors = [torch.tensor(array, requires_grad=array.dtype.kind == "f") for array in inputs]
    result = function(*tensors)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    wanted_names = [name for name, tensor in zip(names, tensors, strict=True) if tensor.requires_grad]
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=tuple(output.shape)) for output in outputs]
    objective = sum((torch.tensor(w) * y).sum() for w, y in zip(weights, outputs, strict=True))
    expected = torch.autograd.grad(objective, [t for t in tensors if t.requires_grad], allow_unused=True)
    produced = [name for name in node.output if name]
    model = _model(node, feeds, opset, len(outputs))
    built = projected_gradient(model, wanted_names, dict(zip(produced, map(_single, weights), strict=False)), shapes)
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    found = dict(zip([o.name for o in built.graph.output], session.run(None, feeds), strict=True))
    for name, output in zip(produced, outputs, strict=False):
        _close(found[name], output.detach().numpy(), tolerance, f"output {name}")
    for name, gradient in zip(wanted_names, expected, strict=True):
        reference = np.zeros_like(feeds[name]) if gradient is None else gradient.numpy()
        _close(found[f"{name}_grad"], reference, tolerance, f"gradient of {name}")


def _model(node: onnx.NodeProto, feeds: dict[str, np.ndarray], opset: int, count: int) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in list(node.output)[:count] if name]
    graph = helper.make_graph([node], "node", infos, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _single(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _close(found: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    assert found.shape == expected.shape, what
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    error = float(np.abs(found - expected).max(initial=0.0)) / scale
    assert error <= tolerance, f"{what}: {error:.2g} of its largest value"
