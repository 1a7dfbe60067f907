"""A character-level language model: an LSTM learns a nursery rhyme and continues it.

The target of every letter is the next one, so targets are labels [N, T] for logits [N, T, V].
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

RHYME = """twinkle twinkle little star
how i wonder what you are
up above the world so high
like a diamond in the sky
"""
LETTERS = sorted(set(RHYME))
LENGTH = 32


def letter_model(width: int = 64) -> onnx.ModelProto:
    """`letters` [N, T] (int64) to `logits` [N, T, V]: embedding, LSTM, and output projection."""
    rng, count = np.random.default_rng(0), len(LETTERS)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.normal(0, 0.1, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Gather", ["embedding", "letters"], ["embedded"]),
        helper.make_node("Transpose", ["embedded"], ["steps"], perm=[1, 0, 2]),  # ONNX's LSTM is time-major
        helper.make_node("LSTM", ["steps", "lstm.w", "lstm.r", "lstm.b"], ["states"], hidden_size=width),
        helper.make_node("Squeeze", ["states", "directions"], ["state"]),
        helper.make_node("Transpose", ["state"], ["hidden"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["hidden", "output"], ["logits"]),
    ]
    weights = [
        weight("embedding", count, width),
        weight("lstm.w", 1, 4 * width, width),
        weight("lstm.r", 1, 4 * width, width),
        weight("lstm.b", 1, 8 * width),
        weight("output", width, count),
        numpy_helper.from_array(np.array([1]), "directions"),
    ]
    inputs = [helper.make_tensor_value_info("letters", TensorProto.INT64, ["N", "T"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", "T", count])]
    graph = helper.make_graph(nodes, "letters", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def recite(model: Path, start: str, length: int) -> str:
    """Continue a text by greedy decoding."""
    numbers = [LETTERS.index(letter) for letter in start]
    for _ in range(length):
        logits = onnxtrain.predict(model, np.array([numbers[-LENGTH:]]))
        numbers.append(int(logits[0, -1].argmax()))
    return "".join(LETTERS[number] for number in numbers)


def main(folder: Path) -> str:
    """Train, write `letters.onnx`, and return the model's continuation of "twinkle"."""
    numbers = np.array([LETTERS.index(letter) for letter in RHYME * 2])
    windows = np.lib.stride_tricks.sliding_window_view(numbers, LENGTH + 1)[: len(RHYME)]

    trainer = onnxtrain.Trainer(
        letter_model(), loss="softmax_cross_entropy(axis=-1)", optimizer="adamw(lr=0.01)", clip_norm=1.0
    )
    inputs, targets = windows[:, :-1], windows[:, 1:]
    trainer.fit(inputs, targets, epochs=25, batch_size=16, schedule="cosine", progress=False)
    print(f"perplexity {trainer.evaluate((inputs, targets), metrics='perplexity')['perplexity']:.2f}")
    trainer.save(folder / "letters.onnx")
    return recite(folder / "letters.onnx", "twinkle", 60)


if __name__ == "__main__":
    print(main(Path.cwd()))
