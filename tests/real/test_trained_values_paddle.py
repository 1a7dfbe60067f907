"""Files of paddle2onnx: trainable parameters equal the layer's; needs an environment with PaddlePaddle."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from zoo.framework_steps import check_steps

paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed; .ci/run says how")
pytest.importorskip("paddle2onnx", reason="paddle2onnx is not installed; .ci/run says how")
pytestmark = pytest.mark.filterwarnings("ignore")
nn = paddle.nn


class Transformer(nn.Layer):
    """A projection, a layer of a transformer's encoder, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.encoder, self.last = nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.encoder(self.first(x)))


class Recurrent(nn.Layer):
    """A recurrent layer, whose initial state is zeros, and a linear layer."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.last = getattr(nn, kind)(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.layer(x)[0])


def convolutions():
    return nn.Sequential(
        nn.Conv2D(3, 8, 3),
        nn.BatchNorm2D(8),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.GroupNorm(2, 8),
        nn.PReLU(8),
        nn.Flatten(),
        nn.Linear(72, 3),
    )


def without_affine():
    return nn.Sequential(
        nn.Conv2D(3, 8, 3),
        nn.GroupNorm(2, 8, weight_attr=False, bias_attr=False),
        nn.InstanceNorm2D(8),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(288, 3),
    )


def with_epsilon(model):
    """Write Paddle's default epsilon: paddle2onnx 2.1 writes an arbitrary number for GroupNorm, now and then NaN."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "InstanceNormalization" and attribute.name == "epsilon":
                attribute.f = 1e-5
    return model


MODELS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)), (4, 6)),
    "convolutions": (convolutions, (2, 3, 8, 8)),
    "without affine": (without_affine, (2, 3, 8, 8)),
    "transformer": (Transformer, (2, 5, 6)),
    "LSTM": (lambda: Recurrent("LSTM"), (2, 5, 4)),
    "GRU": (lambda: Recurrent("GRU"), (2, 5, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_three_steps(name, tmp_path):
    make, shape = MODELS[name]
    paddle.seed(0)
    layer = make()
    layer.eval()
    if name in ("LSTM", "GRU"):  # Paddle differentiates these in training mode only
        layer.train()
    generator = np.random.default_rng(0)
    parameters = {key: one for key, one in layer.named_parameters() if not one.stop_gradient}
    for one in parameters.values():
        one.set_value(one.numpy() + 0.02 * generator.random(one.shape).astype(np.float32))
    x = generator.normal(size=shape).astype(np.float32)
    y = layer(paddle.to_tensor(x))
    target = generator.normal(size=y.shape).astype(np.float32)
    loss = ((y - paddle.to_tensor(target)) ** 2).mean()
    loss.backward()
    slopes = {key: one.grad.numpy() for key, one in parameters.items()}
    layer.eval()
    spec = [paddle.static.InputSpec([None, *shape[1:]], "float32", "x")]
    paddle.onnx.export(layer, str(tmp_path / "model"), input_spec=spec, opset_version=17)
    check_steps(
        with_epsilon(onnx.load(tmp_path / "model.onnx")),
        {key: one.numpy() for key, one in parameters.items()},
        slopes,
        float(loss),
        x,
        target,
        tmp_path / "trained.onnx",
    )
