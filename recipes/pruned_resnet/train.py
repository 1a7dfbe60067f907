"""A residual network on Fashion-MNIST (32 x 32 pixels) pruned by SSGD and by three published methods at equal effort.

The network has the CIFAR form of He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016: a
convolution, three stages of 16, 32 and 64 channels with one block each, and batch normalization (ResNet-8). Every
method has the same images, batches, momentum and number of updates in all:

- SSGD: after the dense training, steps that grow with a weight's magnitude, with a cut after each epoch, then training
  under the last mask (`onnxtrain.prune`);
- gradual: the same cuts without SSGD's steps. Zhu, Gupta, "To prune, or not to prune", 2017;
- magnitude: one cut of the dense network, then training under its mask. Han, Pool, Tran, Dally, "Learning both weights
  and connections for efficient neural networks", NeurIPS 2015;
- SNIP: the weights with the smallest |weight * gradient| are cut before the training, which takes as many updates as
  dense training and pruning together. Lee, Ajanthan, Torr, "SNIP: single-shot network pruning", ICLR 2019.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx

import onnxtrain
from network import Network

METHODS = ("SSGD", "gradual", "magnitude", "SNIP")
RUNS = {95: METHODS, 90: METHODS[:3]}
"""Methods by percent of zeros: SNIP, whose training is the longest, has only one run."""

RATES = {"dense": 0.1, "SSGD": 0.1, "gradual": 0.2, "magnitude": 0.2, "SNIP": 0.2}
"""Learning rates, chosen on held-out images with 95 % zeros and seed 0: the best of 0.025, 0.05 and 0.1 for SSGD, of
0.05, 0.1 and 0.2 for gradual and magnitude, of 0.1 and 0.2 for SNIP; the dense training has that of He et al."""

DENSE, CUTS, TUNING = 8, 3, 2
"""Epochs: of the dense training, with a cut after each, and under the last mask."""

DECAY, BATCH, HELD_OUT = 1e-4, 64, 5000


def resnet(widths: tuple[int, ...], seed: int) -> onnx.ModelProto:
    """`image` [N, 1, 32, 32] to `logits` [N, 10]."""
    net = Network(seed)

    def convolution(x: str, inputs: int, outputs: int, size: int, stride: int, name: str) -> str:
        weight = net.normal(f"{name}.weight", (2 / (inputs * size * size)) ** 0.5, outputs, inputs, size, size)
        x = net.node("Conv", x, weight, output=f"{name}.conv", pads=[size // 2] * 4, strides=[stride] * 2)
        values = {"scale": np.ones(outputs), "bias": np.zeros(outputs), "mean": np.zeros(outputs)}
        names = [net.constant(f"{name}.{key}", array) for key, array in values.items()]
        variance = net.constant(f"{name}.var", np.ones(outputs))
        return net.node("BatchNormalization", x, *names, variance, output=f"{name}.norm", momentum=0.9)

    value, channels = net.node("Relu", convolution("image", 1, widths[0], 3, 1, "stem"), output="stem"), widths[0]
    for stage, width in enumerate(widths):
        name, stride = f"stage{stage}", 2 if stage else 1
        inner = convolution(value, channels, width, 3, stride, f"{name}.first")
        inner = convolution(net.node("Relu", inner, output=f"{name}.relu"), width, width, 3, 1, f"{name}.second")
        if stage:
            value = convolution(value, channels, width, 1, stride, f"{name}.across")
        value, channels = net.node("Relu", net.node("Add", inner, value, output=f"{name}.sum"), output=name), width
    value = net.node("Flatten", net.node("GlobalAveragePool", value, output="mean"), output="features")
    weight = net.normal("head.weight", channels**-0.5, channels, 10)
    net.node("Gemm", value, weight, net.zeros("head.bias", 10), output="logits")
    return net.model({"image": ("N", 1, 32, 32)}, {"logits": ("N", 10)})


class Comparison:
    """The data, the settings and the dense network of a seed."""

    def __init__(self, options, seed: int, rates: dict[str, float] = RATES) -> None:
        self.seed, self.rates = seed, rates
        self.epochs = (1, 1, 1) if options.quick else (DENSE, CUTS, TUNING)
        self.widths = (4, 8, 16) if options.quick else (16, 32, 64)
        count, held_out = (1000, 500) if options.quick else (12_000, HELD_OUT)
        images, labels = options.images("fashion", "train")
        self.train = padded(images[:count]), labels[:count]
        self.validation = padded(images[-held_out:]), labels[-held_out:]
        images, labels = options.images("fashion", "t10k", 500 if options.quick else None)
        self.test = padded(images), labels

    def dense(self) -> onnxtrain.Trainer:
        """Train a dense network."""
        return self.fitted(self.rates["dense"], self.epochs[0])

    def fitted(self, rate: float, epochs: int, masks: dict[str, np.ndarray] | None = None) -> onnxtrain.Trainer:
        """Train a fresh network, under masks if they are given."""
        optimizer = onnxtrain.Momentum(rate, norm_coefficient=DECAY)
        trainer = self.trainer(resnet(self.widths, self.seed), optimizer)
        if masks is not None:
            trainer.set_masks(masks)
        trainer.fit(
            *self.train, epochs=epochs, batch_size=BATCH, schedule="warmup(0.05)+cosine", progress=False,
        )  # fmt: skip
        return trainer

    def trainer(self, model: onnx.ModelProto, optimizer: onnxtrain.Optimizer) -> onnxtrain.Trainer:
        """A trainer of the seed."""
        return onnxtrain.Trainer(
            model, loss="softmax_cross_entropy", optimizer=optimizer, batch_norm="train", seed=self.seed, threads=1
        )

    def pruned(self, dense: onnx.ModelProto, method: str, sparsity: float) -> onnxtrain.Trainer:
        """Prune the dense network, or for SNIP a fresh one, and return a trainer of the result."""
        rate, (first, cuts, tuning) = self.rates[method], self.epochs
        plain = onnxtrain.Momentum(rate, norm_coefficient=DECAY)
        if method == "SNIP":
            return self.fitted(rate, first + cuts + tuning, self.snip_masks(sparsity))
        ssgd = onnxtrain.SSGD(rate, alpha=0.9, max_scale=5.0, regularization=1e-4)  # but for the rate prune's default
        epochs, rounds, tuning = (0, 1, cuts + tuning) if method == "magnitude" else (cuts, cuts, tuning)
        some = tuple(array[:1000] for array in self.validation)  # which chooses a point of the fine-tuning
        result = onnxtrain.prune(
            dense, self.train, loss="softmax_cross_entropy", validation=some, sparsity=sparsity,
            method="ssgd" if method == "SSGD" else "magnitude", optimizer=ssgd if method == "SSGD" else plain,
            fine_tune_optimizer=plain, epochs=epochs, rounds=rounds, fine_tune_epochs=tuning, batch_size=BATCH,
            batch_norm="train", seed=self.seed, threads=1, progress=lambda line: None,
        )  # fmt: skip
        return self.trainer(result.model(), plain)

    def snip_masks(self, sparsity: float) -> dict[str, np.ndarray]:
        """Keep the weights of a fresh network with the largest |weight * gradient|: one step of rate 1 has both."""
        trainer = self.trainer(resnet(self.widths, self.seed), onnxtrain.SGD(1.0))
        before = {name: array.copy() for name, array in trainer.get_weights().items() if array.ndim > 1}
        trainer.train_step(*(array[:1000] for array in self.train))
        scores = {name: abs(array * (array - trainer.parameters[name])) for name, array in before.items()}
        everything = np.sort(np.concatenate([score.ravel() for score in scores.values()]))
        bound = everything[round(sparsity * everything.size)]
        return {name: score >= bound for name, score in scores.items()}

    def accuracy(self, trainer: onnxtrain.Trainer, images: np.ndarray, labels: np.ndarray) -> float:
        """Accuracy in percent."""
        return 100 * trainer.evaluate(images, labels, batch_size=500, metrics="accuracy")["accuracy"]


def padded(images: np.ndarray) -> np.ndarray:
    """Images of 32 x 32 pixels, with zeros at the edges."""
    return np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))


def train(options, seed: int) -> dict[str, float]:
    """Train the dense network and prune it by each method; return the test accuracies in percent."""
    task = Comparison(options, seed)
    dense = task.dense()
    with tempfile.TemporaryDirectory() as folder:
        dense.save(Path(folder) / "dense.onnx")
        model = onnx.load(Path(folder) / "dense.onnx")
    found = {"dense": task.accuracy(dense, *task.test)}
    runs = [(zeros, method) for zeros, methods in RUNS.items() for method in methods]
    for zeros, method in runs[: len(METHODS)] if options.quick else runs:
        pruned = task.pruned(model, method, zeros / 100)
        found[f"{method}, {zeros} % zeros"] = task.accuracy(pruned, *task.test)
    if not options.quick:
        magnitude, snip = (100 - found[f"{method}, 95 % zeros"] for method in ("magnitude", "SNIP"))
        found["error of magnitude over SNIP's, 95 % zeros"] = magnitude / snip
    return found
