"""The residual network of Ismail Fawaz et al. on time series of the UCR archive.

Three blocks of convolutions of widths 8, 5 and 3 with 64, 128 and 128 filters, each with batch normalization,
and Adam. The paper trains for 1,500 epochs and keeps the weights with the lowest training loss; here the learning rate
falls along a cosine within 200 or 300 epochs. sktime has the data. Source: Ismail Fawaz et al., "Deep
learning for time series classification: a review", 2019.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sktime.datasets import load_gunpoint, load_italy_power_demand

import onnxtrain

SETS = {"GunPoint": (load_gunpoint, 200), "ItalyPowerDemand": (load_italy_power_demand, 300)}


def resnet(length: int, classes: int, filters: tuple[int, ...], seed: int) -> onnx.ModelProto:
    """`series` [N, 1, length] to `logits` [N, classes]."""
    rng = np.random.default_rng(seed)
    nodes, initializers = [], []

    def tensor(name: str, array: np.ndarray) -> str:
        initializers.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def node(operator: str, *inputs: str, output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def uniform(name: str, *shape: int) -> str:
        fan = (shape[0] + shape[1]) * int(np.prod(shape[2:]))
        return tensor(name, rng.uniform(-1, 1, shape) * (6 / fan) ** 0.5)

    def batch_norm(x: str, count: int, name: str) -> str:
        values = {"scale": np.ones(count), "bias": np.zeros(count), "mean": np.zeros(count), "var": np.ones(count)}
        names = [tensor(f"{name}.{key}", array) for key, array in values.items()]
        return node("BatchNormalization", x, *names, output=name, epsilon=1e-3, momentum=0.9)

    def convolution(x: str, inputs: int, outputs: int, width: int, name: str) -> str:
        weight, bias = uniform(f"{name}.weight", outputs, inputs, width), tensor(f"{name}.bias", np.zeros(outputs))
        pads = [(width - 1) // 2, width // 2]
        return batch_norm(node("Conv", x, weight, bias, output=f"{name}.conv", pads=pads), outputs, f"{name}.norm")

    value, channels = "series", 1
    for block, count in enumerate(filters):
        name = f"block{block}"
        inner = convolution(value, channels, count, 8, f"{name}.8")
        inner = convolution(node("Relu", inner, output=f"{name}.8.relu"), count, count, 5, f"{name}.5")
        inner = convolution(node("Relu", inner, output=f"{name}.5.relu"), count, count, 3, f"{name}.3")
        same = channels == count
        across = (
            batch_norm(value, count, f"{name}.across")
            if same
            else convolution(value, channels, count, 1, f"{name}.across")
        )
        value = node("Relu", node("Add", inner, across, output=f"{name}.sum"), output=name)
        channels = count
    value = node("Flatten", node("GlobalAveragePool", value, output="mean"), output="features")
    head = uniform("head.weight", channels, classes), tensor("head.bias", np.zeros(classes))
    node("Gemm", value, *head, output="logits")
    graph = helper.make_graph(
        nodes,
        "resnet",
        [helper.make_tensor_value_info("series", TensorProto.FLOAT, ["N", 1, length])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", classes])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


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
