"""A model with a memory listens to a stream: its state goes on from batch to batch, and a new recording resets it.

A high beep turns a light on, a low one turns it off. The sound comes in chunks of 0.1 s, most of them noise alone.
After each, the model says whether the light is on, which it can only know from its state. The inputs `sound`
[batch, samples] and `state` [1, batch, units] share no first axis: `fit` takes ready batches, here of a generator that
carries the state.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import parser

import onnxtrain

SAMPLES, UNITS = 160, 16
"""Samples of a chunk, of 1,600 a second; units of the recurrent layer."""


def recordings(count: int, chunks: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sounds [count, chunks, samples] and lights [count, chunks]: 1 for on."""
    rng, time = np.random.default_rng(seed), np.arange(SAMPLES) / 1600
    beeps = np.where(rng.random((count, chunks)) < 0.3, rng.integers(0, 2, (count, chunks)), -1)  # -1: noise alone
    tones = np.stack([np.zeros(SAMPLES), np.sin(2 * np.pi * 200 * time), np.sin(2 * np.pi * 500 * time)])
    sounds = tones[beeps + 1] + rng.normal(0, 0.3, (count, chunks, SAMPLES))
    lights = np.zeros((count, chunks), np.int64)
    for at in range(chunks):
        lights[:, at] = np.where(beeps[:, at] < 0, lights[:, at - 1] if at else 0, beeps[:, at])
    return sounds.astype(np.float32), lights


def model() -> onnx.ModelProto:
    """Return filters, a GRU that begins at `state`, and two scores; `after` is the state for the next chunk.

    `torch.onnx.export` writes such nodes for `y, after = self.gru(x, state)`.
    """
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    listener (float[batch, {SAMPLES}] sound, float[1, batch, {UNITS}] state)
        => (float[batch, 2] scores, float[1, batch, {UNITS}] after)
    <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{
        channel = Unsqueeze(sound, one)
        filtered = Conv<strides = [16]>(channel, filters)
        loud = Relu(filtered)
        steps = Transpose<perm = [2, 0, 1]>(loud)
        every, after = GRU<hidden_size = {UNITS}>(steps, w, r, b, , state)
        last = Squeeze(after, zero)
        scores = MatMul(last, head)
    }}"""
    made, rng = parser.parse_model(text), np.random.default_rng(0)
    sizes = {"filters": (16, 1, 32), "w": (1, 3 * UNITS, 16), "r": (1, 3 * UNITS, UNITS), "head": (UNITS, 2)}
    weights = {name: rng.normal(0, size[-1] ** -0.5, size) for name, size in sizes.items()}
    weights["b"] = np.zeros((1, 6 * UNITS))
    for name, values in weights.items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    return made


def stream(
    trainer: onnxtrain.Trainer, sounds: np.ndarray, lights: np.ndarray, *, carried: bool = True
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yield chunk after chunk of all recordings, each with the state that the one before left behind, or with zeros."""
    state = np.zeros((1, len(sounds), UNITS), np.float32)
    for at in range(sounds.shape[1]):
        inputs = {"sound": sounds[:, at], "state": state}
        if carried:
            state = trainer.predict(inputs)["after"]
        yield inputs, lights[:, at]


def main(folder: Path) -> dict[str, float]:
    """Train, write `stateful_audio.onnx`, and return the accuracy on new recordings, with and without a memory."""
    trainer = onnxtrain.Trainer(model(), loss="cross_entropy", optimizer="adam(lr=5e-3)")
    sounds, lights = recordings(64, 30, seed=0)
    # The function is called in every epoch: the states begin anew. Batches come from the weights of the step before,
    # so that none is read ahead.
    trainer.fit(lambda: stream(trainer, sounds, lights), epochs=15, prefetch=False, progress=False)
    trainer.save(folder / "stateful_audio.onnx")
    new = recordings(64, 30, seed=1)
    return {
        name: trainer.evaluate(list(stream(trainer, *new, carried=carried)), metrics="accuracy")["accuracy"]
        for name, carried in (("carried", True), ("reset", False))
    }


if __name__ == "__main__":
    print(main(Path.cwd()))
