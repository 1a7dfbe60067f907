"""Models with sparse weights, and sessions with and without the library of kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.plugins.sparse import compile as compiling


def make_every_layer_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers become sparse, and exchange what they can, whatever the timings say, which other programs disturb."""
    settings = {"_SECONDS": 0.0, "_WORTH_IT": 0.0, "_WHOLE": 0.0, "_DOUBT": 1.0, "_AS_FAST": float("inf")}
    for name, value in settings.items():
        monkeypatch.setattr(compiling, name, value)


def pruned(rng: np.random.Generator, shape: tuple[int, ...], zeros: float, block: int = 1) -> np.ndarray:
    """A weight [outputs, ...] of which that fraction is zero, in blocks of outputs."""
    kept = rng.random((shape[0] // block, 1, *shape[1:])) >= zeros
    weight = rng.standard_normal((shape[0] // block, block, *shape[1:]))
    scale = 1 / np.sqrt(np.prod(shape[1:]) * (1 - zeros) + 1)
    return (weight * kept * scale).reshape(shape).astype(np.float32)


def model_of(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX's text form, with these initializers."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def run(model: object, feeds: dict[str, np.ndarray], *, kernels: bool = False, threads: int = 1) -> np.ndarray:
    """The first output, with the library of kernels or without it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    if kernels:
        options.register_custom_ops_library(str(onnxtrain.custom_ops_library()))
    given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, feeds)[0]
    return found


def mlp(zeros: float = 0.98, width: int = 512) -> onnx.ModelProto:
    """Two layers: MatMul with Add and Relu, and Gemm with a residual sum."""
    rng = np.random.default_rng(0)
    text = f"""
    mlp (float[N, {width}] x) => (float[N, {width}] y) {{
      a = MatMul(x, w1)
      b = Add(a, b1)
      c = Relu(b)
      d = Gemm<alpha = 0.5, beta = 2.0, transB = 1>(c, w2, b2)
      y = Add(d, x)
    }}"""
    return model_of(
        text,
        w1=np.ascontiguousarray(pruned(rng, (width, width), zeros).T),
        b1=rng.standard_normal(width, np.float32),
        w2=pruned(rng, (width, width), zeros, 4),
        b2=rng.standard_normal(width, np.float32),
    )


def residual_network(zeros: float = 0.95, channels: int = 64) -> onnx.ModelProto:
    """A residual block of convolutions with batch normalization, and one with stride 2."""
    rng = np.random.default_rng(0)
    norm = {
        f"{name}{index}": rng.uniform(0.5, 1.5, channels).astype(np.float32)
        for index in (1, 2, 3)
        for name in ("scale", "shift", "mean", "variance")
    }
    text = f"""
    network (float[N, {channels}, 28, 28] x) => (float[N, {channels}, 14, 14] y) {{
      a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w1)
      b = BatchNormalization<epsilon = 0.001>(a, scale1, shift1, mean1, variance1)
      c = Relu(b)
      d = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(c, w2)
      e = BatchNormalization(d, scale2, shift2, mean2, variance2)
      f = Add(e, x)
      g = Relu(f)
      h = Conv<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(g, w3, bias)
      y = Clip(h, low, high)
    }}"""
    weights = {f"w{index}": pruned(rng, (channels, channels, 3, 3), zeros, 4) for index in (1, 2, 3)}
    return model_of(
        text,
        **weights,
        **norm,
        bias=rng.standard_normal(channels, np.float32),
        low=np.float32(-0.5),
        high=np.float32(1.5),
    )
