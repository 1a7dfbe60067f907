"""Face recognition: ArcFace teaches a network embeddings that tell apart people who were not in the training.

The faces are made up: each person is a smooth random image, and a photo of it is shifted, brighter or darker, and
noisy. The centres of the people in the training are a layer that is cut off at the end. The program writes the
network, `face_embeddings.onnx`, and a figure, `face_embeddings.png`: the cosines between two photos of one unseen
person and of two, before and after.
"""

from pathlib import Path

import numpy as np
import onnx

import onnxtrain
from onnxtrain.editing.layers import Cosine

SIZE, FEATURES = 16, 32


def photos(people: int, each: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return photos [N, 256] and the person in each [N]."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    images, labels = [], np.repeat(np.arange(people), each)
    for _ in range(people):
        spots = [(rng.uniform(2, 14, 2), rng.uniform(1.5, 4), rng.normal()) for _ in range(8)]
        for _ in range(each):
            down, right = rng.uniform(-1.5, 1.5, 2)
            face = sum(
                height * np.exp(-((rows - y - down) ** 2 + (columns - x - right) ** 2) / (2 * width**2))
                for (y, x), width, height in spots
            )
            images.append(rng.uniform(0.6, 1.4) * face + rng.normal(0, 0.3, face.shape) + rng.normal(0, 0.3))
    return np.array(images, np.float32).reshape(len(labels), -1), labels


def pairs(network: onnx.ModelProto, images: np.ndarray, people: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines of pairs of photos: of one person, and of two."""
    found = onnxtrain.predict(network, images)
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    first, second = np.triu_indices(len(people), 1)
    cosines = (unit @ unit.T)[first, second]
    same = people[first] == people[second]
    return cosines[same], cosines[~same]


def accuracy(same: np.ndarray, different: np.ndarray) -> float:
    """Return the balanced accuracy at the best threshold."""
    return max((np.mean(same > at) + np.mean(different <= at)) / 2 for at in np.linspace(-1, 1, 401))


def main(folder: Path) -> dict[str, float]:
    """Train on 150 people; return the accuracy on pairs of photos of 30 others, before and after."""
    network = onnxtrain.examples.mlp((SIZE * SIZE, 128, FEATURES))
    embedding = network.graph.output[0].name
    images, people = photos(150, 20, seed=0)
    unseen = photos(30, 6, seed=1)

    model = onnxtrain.append(network, Cosine(150))
    trainer = onnxtrain.Trainer(model, loss="arcface(scale=16, margin=0.3)", optimizer="adamw(lr=2e-3)")
    trainer.fit(images, people, epochs=15, batch_size=40, progress=False)
    tuned = onnxtrain.cut(trainer.model(), at=embedding)
    onnx.save(tuned, folder / "face_embeddings.onnx")

    found = {"before": pairs(network, *unseen), "after": pairs(tuned, *unseen)}
    draw(folder / "face_embeddings.png", found)
    return {when: float(accuracy(*cosines)) for when, cosines in found.items()}


def draw(path: Path, found: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Draw the histograms of the cosines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for axis, (when, (same, different)) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        for cosines, name in ((same, "one person"), (different, "two people")):
            axis.hist(cosines, np.linspace(-1, 1, 41), alpha=0.6, density=True, label=name)
        axis.set(title=f"{when}: {accuracy(same, different):.1%} right", xlabel="cosine of two photos")
        axis.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    print(main(Path.cwd()))
