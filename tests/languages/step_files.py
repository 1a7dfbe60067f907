"""Step graphs, states and batches as files, with Python's losses, for loops in other languages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser
from safetensors.numpy import save_file

import onnxtrain

RANDOM = np.random.default_rng(0)
STEPS = 20


def recurrent(operator: str) -> onnx.ModelProto:
    """One recurrent layer and a linear one over the last state."""
    gates = {"GRU": 3, "LSTM": 4}[operator]
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,5,4] x) => (float[N,3] y) {{
            t = Transpose<perm = [1, 0, 2]>(x)
            s, h = {operator}<hidden_size = 6>(t, w, r, b)
            l = Squeeze(h, axis)  m = MatMul(l, head)  y = Add(m, bias) }}""")
    shapes = {"w": (1, gates * 6, 4), "r": (1, gates * 6, 6), "b": (1, 12 * gates), "head": (6, 3), "bias": (3,)}
    for name, shape in shapes.items():
        array = 0.5 * RANDOM.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axis"))
    return model


def convolutional() -> onnx.ModelProto:
    """Two convolutions and a linear layer, without pooling."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,2,8,8] x) => (float[N,3] y) {
            a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)  c = Relu(a)
            d = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(c, w2, b2)  e = Relu(d)
            f = Flatten(e)  y = Gemm(f, w3, b3) }""")
    shapes = {"w1": (4, 2, 3, 3), "b1": (4,), "w2": (6, 4, 3, 3), "b2": (6,), "w3": (96, 3), "b3": (3,)}
    for name, shape in shapes.items():
        array = 0.3 * RANDOM.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def noise(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal((16, *shape)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A training task.

    Attributes:
        model: Makes the model.
        inputs: A batch.
        classes: How many labels there are.
        optimizer: The update rule.
        modes: Further arguments of the training model.
    """

    model: object
    inputs: dict[str, np.ndarray]
    classes: int
    optimizer: object = onnxtrain.Adam(0.01)
    modes: tuple[tuple[str, object], ...] = ()

    def feeds(self) -> dict[str, np.ndarray]:
        return self.inputs | {"target": np.arange(16) % self.classes}


def _mlp() -> onnx.ModelProto:
    return onnxtrain.examples.mlp((6, 16, 8, 3))


CASES = {
    "mlp": Case(_mlp, {"input": noise(6)}, 3),
    "mlp_sgd": Case(_mlp, {"input": noise(6)}, 3, onnxtrain.Momentum(0.1, alpha=0.0)),
    "mlp_momentum": Case(_mlp, {"input": noise(6)}, 3, onnxtrain.Momentum(0.05)),
    "mlp_adagrad": Case(_mlp, {"input": noise(6)}, 3, onnxtrain.Adagrad(0.1)),
    "mlp_ssgd": Case(_mlp, {"input": noise(6)}, 3, onnxtrain.SSGD(0.05)),
    "digits_cnn": Case(onnxtrain.examples.digits_cnn, {"image": noise(1, 8, 8)}, 10),
    "lenet5": Case(onnxtrain.examples.lenet5, {"image": noise(1, 28, 28)}, 10, onnxtrain.Adam(0.001)),
    "lenet5_momentum": Case(onnxtrain.examples.lenet5, {"image": noise(1, 28, 28)}, 10, onnxtrain.Momentum(0.01)),
    "resnet": Case(
        onnxtrain.examples.small_resnet,
        {"image": noise(3, 16, 16)},
        10,
        onnxtrain.Adam(0.001),
        modes=(("batch_norm", "train"),),
    ),
    "resnet_momentum": Case(
        onnxtrain.examples.small_resnet,
        {"image": noise(3, 16, 16)},
        10,
        onnxtrain.Momentum(0.01),
        modes=(("batch_norm", "train"),),
    ),
    "transformer": Case(
        onnxtrain.examples.small_transformer,
        {"input_ids": RANDOM.integers(1, 20, (16, 8)), "attention_mask": np.ones((16, 8), np.int64)},
        4,
        onnxtrain.Adam(0.001),
    ),
    "transformer_momentum": Case(
        onnxtrain.examples.small_transformer,
        {"input_ids": RANDOM.integers(1, 20, (16, 8)), "attention_mask": np.ones((16, 8), np.int64)},
        4,
        onnxtrain.Momentum(0.01),
    ),
    "lstm": Case(lambda: recurrent("LSTM"), {"x": noise(5, 4)}, 3),
    "gru": Case(lambda: recurrent("GRU"), {"x": noise(5, 4)}, 3),
    "conv": Case(convolutional, {"x": noise(2, 8, 8)}, 3, onnxtrain.Momentum(0.02)),
    "mlp_clipped": Case(_mlp, {"input": noise(6)}, 3, onnxtrain.Adam(0.01), modes=(("clip_norm", 0.5),)),
}
"""Trainings: all four optimizers, and the kinds of networks that people train on devices."""


def write(name: str, folder: Path, *, kernels: bool = False, portable: str | None = None) -> list[float]:
    """Write ``model.onnx``, ``step.onnx``, ``states.safetensors`` and ``batch.safetensors``.

    Returns:
        The losses of the first steps on this batch, as Python finds them.
    """
    case = CASES[name]
    model = case.model()
    training = onnxtrain.training_model(
        model, loss="softmax_cross_entropy", optimizer=case.optimizer, **dict(case.modes)
    )
    options = onnxtrain.RuntimeOptions(threads=1, kernels=kernels)
    session = onnxtrain.TrainingSession(training, options=options)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    onnx.save(onnxtrain.lower(training, kernels=kernels, portable=portable), folder / "step.onnx")
    save_file({key: np.array(value) for key, value in session.state.items()}, folder / "states.safetensors")
    save_file(case.feeds(), folder / "batch.safetensors")
    feeds = case.feeds() | {"learning_rate": np.float32(case.optimizer.learning_rate)}
    losses = [float(session.step(feeds)["loss"]) for _ in range(STEPS)]
    save_file({key: np.array(value) for key, value in session.state.items()}, folder / "trained.safetensors")
    return losses
