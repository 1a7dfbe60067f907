"""The residual network of Ismail Fawaz et al. on time series of the UCR archive.

Three blocks of convolutions of widths 8, 5 and 3 with 64, 128 and 128 filters, each with batch normalization,
and Adam. The paper trains for 1,500 epochs and keeps the weights with the lowest training loss; here the learning rate
falls along a cosine within 100 or 150 epochs. sktime has the data. Source: Ismail Fawaz et al., "Deep
learning for time series classification: a review", 2019.
"""

from __future__ import annotations

import numpy as np
import onnx
from sktime.datasets import load_gunpoint, load_italy_power_demand

import onnxtrain
from network import Network

SETS = {"GunPoint": (load_gunpoint, 100), "ItalyPowerDemand": (load_italy_power_demand, 150)}


def resnet(length: int, classes: int, filters: tuple[int, ...], seed: int) -> onnx.ModelProto:
    """`series` [N, 1, length] to `logits` [N, classes]."""
    net = Network(seed)

    def uniform(name: str, *shape: int) -> str:
        fan = (shape[0] + shape[1]) * int(np.prod(shape[2:]))
        return net.constant(name, net.rng.uniform(-1, 1, shape) * (6 / fan) ** 0.5)

    def batch_norm(x: str, count: int, name: str) -> str:
        values = {"scale": np.ones(count), "bias": np.zeros(count), "mean": np.zeros(count), "var": np.ones(count)}
        names = [net.constant(f"{name}.{key}", array) for key, array in values.items()]
        return net.node("BatchNormalization", x, *names, output=name, epsilon=1e-3, momentum=0.9)

    def convolution(x: str, inputs: int, outputs: int, width: int, name: str) -> str:
        names = uniform(f"{name}.weight", outputs, inputs, width), net.zeros(f"{name}.bias", outputs)
        x = net.node("Conv", x, *names, output=f"{name}.conv", pads=[(width - 1) // 2, width // 2])
        return batch_norm(x, outputs, f"{name}.norm")

    value, channels = "series", 1
    for block, count in enumerate(filters):
        name, inner, inputs = f"block{block}", value, channels
        for width in (8, 5, 3):
            inner, inputs = convolution(inner, inputs, count, width, f"{name}.{width}"), count
            if width != 3:
                inner = net.node("Relu", inner, output=f"{name}.{width}.relu")
        if channels == count:
            across = batch_norm(value, count, f"{name}.across")
        else:
            across = convolution(value, channels, count, 1, f"{name}.across")
        value = net.node("Relu", net.node("Add", inner, across, output=f"{name}.sum"), output=name)
        channels = count
    value = net.node("Flatten", net.node("GlobalAveragePool", value, output="mean"), output="features")
    net.node("Gemm", value, uniform("head.weight", channels, classes), net.zeros("head.bias", classes), output="logits")
    return net.model({"series": ("N", 1, length)}, {"logits": ("N", classes)})


def train(options, seed: int) -> dict[str, float]:
    """Train on each set, and return the test accuracies in percent."""
    return {
        f"accuracy on {name}, %": accuracy(load, 10 if options.quick else epochs, options.quick, seed)
        for name, (load, epochs) in SETS.items()
    }


def accuracy(load, epochs: int, quick: bool, seed: int) -> float:
    """Train on one set."""
    (series, texts), (test_series, test_texts) = (
        load(part, return_X_y=True, return_type="numpy3D") for part in ("train", "test")
    )
    classes, labels = np.unique(texts, return_inverse=True)
    filters = (8, 16, 16) if quick else (64, 128, 128)
    trainer = onnxtrain.Trainer(
        resnet(series.shape[2], len(classes), filters, seed), loss="softmax_cross_entropy",
        optimizer=onnxtrain.Adam(1e-3), batch_norm="train", seed=seed, threads=1,
    )  # fmt: skip
    trainer.fit(series, labels, epochs=epochs, batch_size=16, schedule="cosine", progress=False)
    return 100 * float(np.mean(classes[trainer.predict(test_series).argmax(axis=1)] == test_texts))
