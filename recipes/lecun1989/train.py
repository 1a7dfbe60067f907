"""The network of LeCun et al. (1989) on 7,291 digits: 9,760 parameters, hyperbolic tangents, squared error.

Each step has one image. The digits of the paper are not public. As in Karpathy's repetition (2022), they are images of
MNIST, 7,291 for training and 2,007 for testing, resized to 16 x 16 and scaled to [-1, 1].
"""

from __future__ import annotations

import numpy as np
import onnx

import onnxtrain
from network import Network

TRAINING, TEST = 7291, 2007
EPOCHS, LEARNING_RATE = 23, 0.03


def network(seed: int) -> onnx.ModelProto:
    """`image` [N, 1, 16, 16] to ten values in [-1, 1].

    H1 has 12 filters 5x5, H2 12 filters 5x5 that each see 8 of the 12 planes of H1, both with stride 2 and a bias per
    unit, H3 30 units. Planes are padded by 2 with the background, -1.
    """
    net = Network(seed)

    def weight(name: str, *shape: int, fan_in: int) -> str:
        return net.uniform(name, 2.4 / fan_in**0.5, *shape)

    def activation(total: str, bias: str, layer: str) -> str:
        return net.node("Tanh", net.node("Add", total, bias, output=f"{layer}.sum"), output=layer)

    padding = net.constant("pads", [0, 0, 2, 2, 0, 0, 2, 2], np.int64)
    background = net.constant("background", -1)

    def padded(value: str) -> str:
        return net.node("Pad", value, padding, background, output=f"{value}.padded")

    h1 = net.node(
        "Conv", padded("image"), weight("H1.weight", 12, 1, 5, 5, fan_in=25), output="H1.conv", strides=[2, 2]
    )
    h1 = padded(activation(h1, net.zeros("H1.bias", 12, 8, 8), "H1"))
    groups = []
    for group, planes in enumerate((range(8), range(4, 12), [*range(4), *range(8, 12)])):
        planes = net.constant(f"planes{group}", planes, np.int64)
        seen = net.node("Gather", h1, planes, output=f"H1.{group}", axis=1)
        filters = weight(f"H2.weight{group}", 4, 8, 5, 5, fan_in=200)
        groups.append(net.node("Conv", seen, filters, output=f"H2.conv{group}", strides=[2, 2]))
    h2 = net.node("Concat", *groups, output="H2.conv", axis=1)
    h2 = net.node("Flatten", activation(h2, net.zeros("H2.bias", 12, 4, 4), "H2"), output="H2.flat")
    h3 = net.node("MatMul", h2, weight("H3.weight", 192, 30, fan_in=192), output="H3.product")
    h3 = activation(h3, net.zeros("H3.bias", 30), "H3")
    output = net.node("MatMul", h3, weight("output.weight", 30, 10, fan_in=30), output="output.product")
    activation(output, net.constant("output.bias", -np.ones(10)), "output")
    return net.model({"image": ("N", 1, 16, 16)}, {"output": ("N", 10)})


def resized(images: np.ndarray) -> np.ndarray:
    """Resize images [N, 1, 28, 28] in [0, 1] to 16 x 16 in [-1, 1], bilinearly."""
    place = np.clip((np.arange(16) + 0.5) * 28 / 16 - 0.5, 0, 27)
    low = place.astype(int)
    share = place - low
    rows = np.zeros((16, 28), np.float32)
    rows[np.arange(16), low] += 1 - share
    rows[np.arange(16), np.minimum(low + 1, 27)] += share
    return 2 * (rows @ images @ rows.T) - 1


def train(options, seed: int) -> dict[str, float]:
    """Train with a seed, which also chooses the images."""
    rng = np.random.default_rng(seed)
    count, epochs = (1000, 3) if options.quick else (TRAINING, EPOCHS)
    images, labels = options.images("mnist", "train")
    chosen = rng.permutation(len(labels))[:count]
    images, labels = resized(images[chosen]), labels[chosen]
    test_images, test_labels = options.images("mnist", "t10k")
    chosen = rng.permutation(len(test_labels))[:TEST]
    test_images, test_labels = resized(test_images[chosen]), test_labels[chosen]

    trainer = onnxtrain.Trainer(
        network(seed), loss="mean_squared_error", optimizer=onnxtrain.SGD(LEARNING_RATE), seed=seed, threads=1
    )
    trainer.fit(images, 2 * np.eye(10, dtype=np.float32)[labels] - 1, epochs=epochs, batch_size=1, progress=False)

    def error(images: np.ndarray, labels: np.ndarray) -> float:
        return 100 * float(np.mean(trainer.predict(images).argmax(axis=1) != labels))

    return {"test error, %": error(test_images, test_labels), "training error, %": error(images, labels)}
