"""Three clients with uneven parts of MNIST train LeNet-5: `python examples/federated/mnist.py MNIST_FOLDER`.

Every digit is divided among the clients by a Dirichlet distribution (alpha 0.5), so that one client may have nearly all
of its examples and another nearly none. The folder has the four files of MNIST, as they are distributed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from processes import federation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from idx import read_digits

from onnxtrain.training.examples import lenet5


def divide(labels: np.ndarray, clients: int, seed: int = 0) -> list[np.ndarray]:
    """Return the indices of each client's examples, distributed unevenly by label."""
    rng = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        indices = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet([0.5] * clients)
        for part, own in zip(
            parts, np.split(indices, (np.cumsum(shares[:-1]) * len(indices)).astype(int)), strict=True
        ):
            part.append(own)
    return [np.concatenate(part) for part in parts]


def main() -> None:
    """Make the folder, run the federation, and print a line per round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mnist", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=3)
    arguments = parser.parse_args()
    images, labels = read_digits(arguments.mnist, "train")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(lenet5(), folder / "model.onnx")
        for part, indices in enumerate(divide(labels, arguments.clients)):
            np.savez(folder / f"part{part}.npz", image=images[indices], label=labels[indices])
            print(f"client {part}: {np.bincount(labels[indices], minlength=10).tolist()} of the digits 0 to 9")
        test_images, test_labels = read_digits(arguments.mnist, "t10k")
        np.savez(folder / "test.npz", image=test_images, label=test_labels)
        start = time.monotonic()
        with federation(folder, arguments.clients, {"ROUNDS": str(arguments.rounds)}) as processes:
            if processes.run().wait() or not (folder / "federated.onnx").exists():
                sys.exit(processes.log("run"))
        for row in json.loads((folder / "history.json").read_text()):
            print(f"round {row['round']}: accuracy {row['accuracy']:.4f}", *row["left_out"])
        print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
