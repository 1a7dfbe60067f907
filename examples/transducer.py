"""A transducer (RNN-T) that writes down sounds: sequences of notes in noise, of unknown times and lengths.

No note follows itself. The joint network scores each pair of a frame and the notes so far. The program writes the model
`transducer.onnx` and a figure of what it hears and when, `transducer.png`.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import onnxtrain

FRAMES, BANDS, NOTES, MOST = 40, 12, 5, 5
"""Frames of a recording, bands of its spectrum, kinds of notes, and most notes of a recording."""

BLANK, WIDTH = 0, 32


def joint() -> onnx.ModelProto:
    """`frames` [N, T, 12] and `history` [N, U + 1], the notes so far behind a 0, to `scores` [N, T, U + 1, 6]."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        transducer (float[n, t, {BANDS}] frames, int64[n, u] history) => (float[n, t, u, {NOTES + 1}] scores)
        <int64[1] one = {{1}}, int64[1] two = {{2}}> {{
            bands = Transpose<perm = [0, 2, 1]>(frames)
            conv1 = Conv<pads = [3, 3]>(bands, conv1_weight, conv1_bias)  heard = Relu(conv1)
            conv2 = Conv<pads = [3, 3]>(heard, conv2_weight, conv2_bias)  encoded = Transpose<perm = [0, 2, 1]>(conv2)
            written = Gather(embedding_weight, history)
            times = Unsqueeze(encoded, two)  notes = Unsqueeze(written, one)
            both = Add(times, notes)  joined = Tanh(both)  scores = MatMul(joined, joint_weight) }}""")
    rng = np.random.default_rng(0)
    shapes = {
        "conv1_weight": (WIDTH, BANDS, 7), "conv2_weight": (WIDTH, WIDTH, 7), "embedding_weight": (NOTES + 1, WIDTH),
        "joint_weight": (WIDTH, NOTES + 1), "conv1_bias": (WIDTH,), "conv2_bias": (WIDTH,),
    }  # fmt: skip
    for name, shape in shapes.items():
        scale = 0.0 if name.endswith("bias") else (np.prod(shape) / shape[0]) ** -0.5
        weight = rng.normal(0, 1, shape).astype(np.float32) * np.float32(scale)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def recordings(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return spectra [N, 40, 12], and the notes [N, 5] from 1, padded with -1."""
    rng = np.random.default_rng(seed)
    frames = rng.normal(0, 0.4, (count, FRAMES, BANDS)).astype(np.float32)
    notes = np.full((count, MOST), -1)
    for row in range(count):
        at = int(rng.integers(0, 4))
        for place in range(int(rng.integers(2, MOST + 1))):
            length = int(rng.integers(3, 6))
            last = notes[row, place - 1] if place else 0
            note = int(rng.choice([each for each in range(1, NOTES + 1) if each != last]))
            frames[row, at : at + length, 2 * note - 1 : 2 * note + 2] += rng.uniform(0.8, 1.2)
            notes[row, place] = note
            at += length + int(rng.integers(1, 3))
    return frames, notes


def data_of(frames: np.ndarray, notes: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of a training example: its frames, and all notes as history."""
    start = np.zeros((len(notes), 1), np.int64)
    return {"frames": frames, "history": np.concatenate([start, np.maximum(notes, 0)], axis=1)}


def write_down(model: onnxruntime.InferenceSession, frames: np.ndarray) -> list[list[tuple[int, int]]]:
    """Return the notes of each recording and their frames: at each frame the best score, up to the blank."""
    found: list[list[tuple[int, int]]] = [[] for _ in frames]
    history, rows = np.zeros((len(frames), 1 + MOST), np.int64), np.arange(len(frames))
    for frame in range(FRAMES):
        for _ in range(2):  # notes of one frame
            count = np.array([len(notes) for notes in found])
            scores = model.run(None, {"frames": frames, "history": history})[0][rows, frame, count]
            for row in np.flatnonzero((scores.argmax(-1) != BLANK) & (count < MOST)):
                note = int(scores[row].argmax())
                found[row].append((note, frame))
                history[row, len(found[row])] = note
    return found


def accuracy(found: list[list[tuple[int, int]]], notes: np.ndarray) -> float:
    """The share of recordings whose notes are all right."""
    pairs = zip(found, notes, strict=True)
    return float(np.mean([[note for note, _ in row] == [*true[true >= 0]] for row, true in pairs]))


def main(folder: Path) -> dict[str, float]:
    """Train, write the model and the figure, and return the share of new recordings that are written down rightly."""
    trainer = onnxtrain.Trainer(joint(), loss=f"transducer(blank={BLANK})", optimizer="adam(lr=5e-3)")
    frames, notes = recordings(800, seed=0)
    unseen, true = recordings(100, seed=1)
    before = accuracy(write_down(onnxruntime.InferenceSession(joint().SerializeToString()), unseen), true)
    history = trainer.fit(data_of(frames, notes), notes, epochs=12, batch_size=20, progress=False)
    trainer.save(folder / "transducer.onnx")
    found = write_down(onnxruntime.InferenceSession(folder / "transducer.onnx"), unseen)
    draw(folder, unseen[0], found[0], true[0], [float(row["loss"]) for row in history.rows])
    return {"before": before, "after": accuracy(found, true)}


def draw(
    folder: Path, frames: np.ndarray, found: list[tuple[int, int]], notes: np.ndarray, losses: list[float]
) -> None:
    """Draw a recording with the notes that were found at their frames, and the loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    sound, course = figure.subplots(1, 2, width_ratios=(2, 1))
    sound.imshow(frames.T, origin="lower", aspect="auto", cmap="Greys")
    for note, frame in found:
        sound.axvline(frame, color="tab:red", linewidth=1)
        sound.text(frame + 0.3, BANDS - 1.4, str(note), color="tab:red", weight="bold")
    played = " ".join(str(note) for note in notes if note > 0)
    sound.set(title=f"played {played}; in red, what the model writes, and when", xlabel="frame", ylabel="band")
    course.plot(range(1, len(losses) + 1), losses, marker="o")
    course.set(title="loss", xlabel="epoch", ylim=(0, None))
    figure.savefig(folder / "transducer.png", dpi=80)


if __name__ == "__main__":
    print(main(Path.cwd()))
