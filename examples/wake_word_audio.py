"""A wake word detector that takes audio: a mel spectrogram becomes part of the model, which then learns the word.

The audio is made up: the word is a tone that rises and then falls. Other sounds rise, fall, fall and then rise, or
stay; all are in noise. The program writes the detector `wake_word_audio.onnx`, which takes a second of samples
[N, 7936], and a figure of what it hears, `wake_word_audio.png`.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

RATE = 8000
WINDOW, HOP = 256, 128
MELS, FRAMES = 32, 61
SAMPLES = WINDOW + (FRAMES - 1) * HOP


def detector() -> onnx.ModelProto:
    """`mel` [N, 1, 32, 61] to `logit` [N, 1]: three convolutions, pooling, and a linear layer."""
    rng = np.random.default_rng(0)
    sizes = {"conv1": (8, 1, 5, 5), "conv2": (16, 8, 3, 3), "conv3": (16, 16, 3, 3), "out": (1, 16 * 4 * 8)}
    weights = [
        numpy_helper.from_array(rng.normal(0, np.prod(shape[1:]) ** -0.5, shape).astype(np.float32), f"{name}.weight")
        for name, shape in sizes.items()
    ]
    weights.append(numpy_helper.from_array(np.zeros(1, np.float32), "out.bias"))
    nodes, x = [helper.make_node("Mul", ["mel", "tenth"], ["scaled"])], "scaled"
    weights.append(numpy_helper.from_array(np.float32(0.1), "tenth"))
    for name in ("conv1", "conv2", "conv3"):
        nodes.append(helper.make_node("Conv", [x, f"{name}.weight"], [name], strides=[2, 2], auto_pad="SAME_UPPER"))
        nodes.append(helper.make_node("Relu", [name], [f"{name}/relu"]))
        x = f"{name}/relu"
    nodes.append(helper.make_node("Flatten", [x], ["flat"]))
    nodes.append(helper.make_node("Gemm", ["flat", "out.weight", "out.bias"], ["logit"], transB=1))
    inputs = [helper.make_tensor_value_info("mel", TensorProto.FLOAT, ["n", 1, MELS, FRAMES])]
    outputs = [helper.make_tensor_value_info("logit", TensorProto.FLOAT, ["n", 1])]
    graph = helper.make_graph(nodes, "wake_word", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def recordings(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return audio [N, 7936] and whether each is the word [N, 1]."""
    rng = np.random.default_rng(seed)
    shapes = np.array([[0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1, 1]])  # pitch over time; the first is the word
    kinds = np.where(rng.random(count) < 0.5, 0, rng.integers(1, len(shapes), count))
    time = np.arange(SAMPLES) / RATE
    audio = np.empty((count, SAMPLES), np.float32)
    for row, kind in enumerate(kinds):
        start, length = rng.uniform(0.05, 0.25), rng.uniform(0.5, 0.7)
        lowest, range_ = rng.uniform(300, 700), rng.uniform(600, 1200)
        inside = (time - start) / length
        pitch = lowest + range_ * np.interp(inside, [0, 0.5, 1], shapes[kind])
        tone = np.sin(2 * np.pi * np.cumsum(pitch) / RATE) * ((inside > 0) & (inside < 1))
        audio[row] = rng.uniform(0.2, 0.5) * tone + rng.normal(0, rng.uniform(0.05, 0.2), SAMPLES)
    return audio, (kinds == 0).astype(np.float32)[:, None]


def main(folder: Path) -> dict[str, float]:
    """Train, write the detector and the figure, and return the accuracy on new recordings before and after."""
    model = onnxtrain.prepend_mel(detector(), RATE, window=WINDOW, hop=HOP, fft=WINDOW, low=100, scale="slaney")
    trainer = onnxtrain.Trainer(model, loss="binary_cross_entropy", optimizer="adam(lr=2e-3)")
    data, unseen = recordings(600, seed=0), recordings(300, seed=1)
    before = trainer.evaluate(unseen, metrics=["accuracy"])["accuracy"]
    history = trainer.fit(*data, epochs=10, batch_size=20, validation=unseen, metrics=["accuracy"], progress=False)
    trainer.save(folder / "wake_word_audio.onnx")
    course = [before, *(row["val_accuracy"] for row in history.rows)]
    draw(folder, unseen[0], unseen[1][:, 0], course)
    return {"before": before, "after": course[-1]}


def draw(folder: Path, audio: np.ndarray, is_word: np.ndarray, course: list[float]) -> None:
    """Draw the spectrograms of a word and another sound, as the saved detector computes them, and the accuracy."""
    from matplotlib.figure import Figure

    path = folder / "wake_word_audio.onnx"
    spectrogram = onnxruntime.InferenceSession(onnxtrain.cut(path, at="mel").SerializeToString())
    chosen = [int(np.flatnonzero(is_word == kind)[0]) for kind in (1, 0)]
    pictures = spectrogram.run(None, {"audio": audio[chosen]})[0][:, 0]
    scores = 1 / (1 + np.exp(-onnxruntime.InferenceSession(path).run(None, {"audio": audio[chosen]})[0][:, 0]))
    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, picture, score, kind in zip(axes, pictures, scores, ("the word", "another sound"), strict=False):
        axis.imshow(picture, origin="lower", aspect="auto", extent=(0, SAMPLES / RATE, 0, MELS))
        axis.set(title=f"{kind}: p = {score:.2f}", xlabel="seconds", ylabel="mel filter")
    axes[2].plot(course, marker="o")
    axes[2].set(title="accuracy on new recordings", xlabel="epochs", ylim=(0.4, 1.02))
    figure.savefig(folder / "wake_word_audio.png", dpi=100)


if __name__ == "__main__":
    print(main(Path.cwd()))
