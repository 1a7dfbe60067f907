"""Count the work between a model and its first step: functions, files, calls across files, conversions, inferences.

    python tools/walk.py [MODEL.onnx]

trains one step on random data and counts. Without a model it uses the small convolutional network of
onnxtrain.examples. Conversions between ONNX and onnx-ir, shape inferences and checks are counted where they
are called, everything else by the functions of this package.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import onnxtrain

PACKAGE = Path(onnxtrain.__file__).resolve().parent


class Walk:
    """Counts calls among the files of the package."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.files: set[str] = set()
        self.across = 0
        self.counts: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profiling function of :func:`sys.setprofile`."""
        if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        file = frame.f_code.co_filename
        self.functions.add(frame.f_code)
        self.files.add(file)
        caller = frame.f_back
        if caller is not None:
            other = caller.f_code.co_filename
            self.across += other.startswith(str(PACKAGE)) and other != file

    def watch(self, module: Any, name: str, label: str) -> None:
        """Count the calls of a function of another package."""
        function = getattr(module, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.counts[label] += 1
            return function(*arguments, **keywords)

        setattr(module, name, counted)


def main() -> int:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    path = parser.parse_args().model
    walk = Walk()
    walk.watch(ir.serde, "deserialize_model", "from ONNX's form to onnx-ir")
    walk.watch(ir.serde, "serialize_model", "from onnx-ir to ONNX's form")
    walk.watch(onnx.shape_inference, "infer_shapes", "shape inferences")
    walk.watch(onnx.checker, "check_model", "checks of a whole model")
    walk.watch(onnx.version_converter, "convert_version", "opset conversions")
    model = path or onnxtrain.examples.digits_cnn()
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-3))
    _ = trainer.executor.session  # so that all modules are loaded, which would be counted as well
    walk.counts.clear()
    sys.setprofile(walk)
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-3))
    generator = np.random.default_rng(0)
    arrays = {}
    for spec in trainer.objective.inputs:
        sizes = [size if isinstance(size, int) else 4 for size in spec.shape or ()]
        arrays[spec.name] = generator.random(sizes).astype(spec.dtype)
    trainer.train_step(arrays, np.zeros(len(next(iter(arrays.values()))), np.int64))
    sys.setprofile(None)
    rows = {"functions": len(walk.functions), "files": len(walk.files), "calls across files": walk.across}
    for label, count in {**rows, **walk.counts}.items():
        print(f"{label:32}{count:8,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
