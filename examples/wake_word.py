"""A custom wake word: a typical wake-word model learns another word from 60 recordings.

Such a model takes 16 frames of 96 speech-embedding features, one example at a time, and ends in a Sigmoid. Its fixed
batch size of one and its Sigmoid are kept. The data are synthetic: a word is a pattern over the frames, in
noise.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

FRAMES, FEATURES = 16, 96


def shipped_model() -> onnx.ModelProto:
    """`frames` [1, 16, 96] to `score` [1, 1] from 0 to 1: two layers with a normalization between, and a Sigmoid."""
    rng, size, width = np.random.default_rng(0), FRAMES * FEATURES, 32

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Flatten", ["frames"], ["flat"]),
        helper.make_node("Gemm", ["flat", "layer1.weight", "layer1.bias"], ["first"]),
        helper.make_node("LayerNormalization", ["first", "norm.weight", "norm.bias"], ["normal"]),
        helper.make_node("Relu", ["normal"], ["relu"]),
        helper.make_node("Gemm", ["relu", "layer2.weight", "layer2.bias"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["score"]),
    ]
    weights = [
        weight("layer1.weight", size, width),
        weight("layer2.weight", width, 1),
        numpy_helper.from_array(np.zeros(width, np.float32), "layer1.bias"),
        numpy_helper.from_array(np.zeros(1, np.float32), "layer2.bias"),
        numpy_helper.from_array(np.ones(width, np.float32), "norm.weight"),
        numpy_helper.from_array(np.zeros(width, np.float32), "norm.bias"),
    ]
    inputs = [helper.make_tensor_value_info("frames", TensorProto.FLOAT, [1, FRAMES, FEATURES])]
    outputs = [helper.make_tensor_value_info("score", TensorProto.FLOAT, [1, 1])]
    graph = helper.make_graph(nodes, "wake_word", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def recordings(words: int, others: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return frames [N, 16, 96] and labels: the word is a bump that moves over the features, with a random start."""
    rng = np.random.default_rng(seed)
    sounds = rng.normal(0, 1, (words + others, FRAMES, FEATURES)).astype(np.float32)
    time, feature = np.arange(FRAMES)[:, None], np.arange(FEATURES)
    for sound in sounds[:words]:
        start = rng.integers(-2, 3)
        sound += 3 * np.exp(-(((feature - 5 * (time + start) - 10) / 4) ** 2))
    return sounds, (np.arange(words + others) < words).astype(np.float32)


def main(folder: Path) -> dict[str, float]:
    """Train, write `wake_word.onnx`, and return accuracy, precision and recall on new recordings."""
    trainer = onnxtrain.Trainer(shipped_model(), loss="binary_cross_entropy", optimizer="adamw(lr=1e-3)")
    trainer.fit(*recordings(60, 440, seed=0), epochs=10, progress=False)
    trainer.save(folder / "wake_word.onnx")
    found = trainer.evaluate(recordings(50, 200, seed=1), metrics=["accuracy", "precision", "recall"])
    return {name: found[name] for name in ("accuracy", "precision", "recall")}


if __name__ == "__main__":
    print(main(Path.cwd()))
