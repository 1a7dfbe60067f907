"""Check that an installed onnxtrain trains: a few steps with native kernels and a few without give the same losses.

    python tools/try_wheel.py            # the kernels must be there
    python tools/try_wheel.py --bodies   # they must not: an installation without a C++ compiler

For wheels of systems and processors on which the whole suite is not run.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import onnxtrain
from onnxtrain.runtime.native import instruction_set, kernels_available


def losses(kernels: bool | None) -> list[float]:
    """Those of five steps of a small convolutional network."""
    rng = np.random.default_rng(0)
    images, labels = rng.random((32, 1, 8, 8), np.float32), np.arange(32) % 10
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.digits_cnn(),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Adam(learning_rate=0.01),
        options=onnxtrain.RuntimeOptions(threads=1, kernels=kernels),
    )
    found = [trainer.train_step(images, labels) for _ in range(5)]
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder) / "tuned.onnx")
        saved = onnxtrain.predict(Path(folder) / "tuned.onnx", images)
    if not np.allclose(saved, trainer.predict(images), atol=1e-5):
        raise SystemExit("The saved model does not predict what the trainer does.")
    return found


def main(arguments: Sequence[str]) -> None:
    """Train with and without kernels, and compare."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        with_kernels = kernels_available()
        without = losses(kernels=False)
        chosen = losses(kernels=None)
    said = [str(warning.message) for warning in caught if "native kernels" in str(warning.message)]
    if with_kernels == ("--bodies" in arguments):
        raise SystemExit(f"Kernels available: {with_kernels}, which is not what was asked for. {' '.join(said)}")
    if len(said) != (0 if with_kernels else 1):
        raise SystemExit(f"{len(said)} warnings about native kernels: {' '.join(said)}")
    if not np.allclose(chosen, without, rtol=1e-4):
        raise SystemExit(f"Losses with kernels {chosen} are not those without {without}.")
    where = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    what = f"kernels ({instruction_set()})" if with_kernels else "standard operators"
    print(f"{where}: {what} train, loss {chosen[-1]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
