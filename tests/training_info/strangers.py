"""Training models written by hand, as other tools would write them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

_HEADER = '<ir_version: 8, opset_import: ["" : 18, "ai.onnx.preview.training" : 1]>'


def graph(text: str) -> onnx.GraphProto:
    return parser.parse_model(f"{_HEADER}\n{text}").graph


def initializer(name: str, values: object, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype=dtype), name)


def entry(
    algorithm: onnx.GraphProto,
    update: dict[str, str],
    *,
    states: Sequence[onnx.TensorProto] = (),
    initialization: onnx.GraphProto | None = None,
    initial: dict[str, str] | None = None,
) -> onnx.TrainingInfoProto:
    algorithm.initializer.extend(states)
    info = onnx.TrainingInfoProto(algorithm=algorithm)
    for field, pairs in (("update_binding", update), ("initialization_binding", initial or {})):
        getattr(info, field).extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in pairs.items())
    if initialization is not None:
        info.initialization.CopyFrom(initialization)
    return info


def model(main: onnx.GraphProto, entries: Sequence[onnx.TrainingInfoProto], weights: Sequence[onnx.TensorProto]):
    main.initializer.extend(weights)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.preview.training", 1)]
    result = helper.make_model(main, opset_imports=imports, ir_version=8)
    result.training_info.extend(entries)
    return result


WEIGHT = np.array([[0.5], [-0.3], [0.2]], dtype=np.float32)
MAIN = "main (float[N,3] x) => (float[N,1] y) { y = MatMul(x, w) }"

SGD = """sgd (float[N,1] t, float rate) => (float loss, float[3,1] w_next) {
    d = Sub(y, t)  s = Mul(d, d)  loss = ReduceMean<keepdims = 0>(s)
    g = ai.onnx.preview.training.Gradient<xs = ["w"], y = "loss">(w)
    step = Mul(rate, g)  w_next = Sub(w, step)
}"""


def plain_sgd() -> onnx.ModelProto:
    """Return a training model of w <- w - rate dL/dw, with the mean squared error L."""
    info = entry(graph(SGD), {"w": "w_next"})
    return model(graph(MAIN), [info], [initializer("w", WEIGHT)])


def sgd_reference(w: np.ndarray, x: np.ndarray, t: np.ndarray, rate: float) -> tuple[float, np.ndarray]:
    d = x @ w - t
    return float(np.mean(d * d)), w - rate * (2 / d.size) * x.T @ d
