"""Model files: every operation on a model, on mutants of small models."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxtrain.model_file.proto import all_tensors
from reliability import plain
from reliability.gentle import mutate_gently
from reliability.mutation import mutate
from reliability.outcome import WrongError
from reliability.seeds import CROSS_ENTROPY, DATA_FILE, SEEDS, write_seed
from reliability.worker import Operations


class Subject:
    """Mutants of the models of ``seeds``."""

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        self._models = {}
        for name, seed in SEEDS.items():
            write_seed(seed.build(), shared)
            self._models[name] = onnx.load(shared / "model.onnx", load_external_data=False)
        self._names = [*SEEDS]
        # Large ones take long, and hold few parts that others do not.
        self._weights = [1 / (1 + len(model.graph.node) / 10) for model in self._models.values()]

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Make a mutant, and run all operations on it."""
        generator = random.Random(f"models {seed} {index}")
        name = generator.choices(self._names, self._weights)[0]
        model = onnx.ModelProto()
        model.CopyFrom(self._models[name])
        shutil.copyfile(self._shared / DATA_FILE, case / DATA_FILE)
        (case / "link").symlink_to("/etc/hostname")
        (case / "folder").mkdir()
        path = case / "model.onnx"
        change = mutate_gently if generator.random() < 0.4 else mutate
        path.write_bytes(change(model, generator))
        # Two of three parts per mutant, so that more mutants are tried; other mutants get the third.
        parts = {*generator.sample(PARTS[:3], 2)}
        if generator.random() < (0.5 if name == "training model" else 0.1):
            parts.add("lower")
        use_model(path, operations, loss=SEEDS[name].loss, parts=parts)


PARTS = ("look", "run", "train", "lower")


def use_model(path: Path, operations: Operations, *, loss: str = CROSS_ENTROPY, parts: Container[str] = PARTS) -> None:
    """Run all or some operations on a model file, each with its outcome."""
    import onnxtrain
    from onnxtrain.runtime.options import RuntimeOptions
    from onnxtrain.training.inference.forward import evaluate
    from onnxtrain.training.inference.forward import predict_all as predict

    warnings.simplefilter("ignore")  # numbers overflow in many mutants
    original = _content(path)
    options = RuntimeOptions(threads=1)
    feeds, predicted, trainer = _feeds(original), None, None
    needs_targets = not loss.startswith("output:")
    if "look" in parts:
        operations.run("inspect", lambda: onnxtrain.inspect(path))
        operations.run("gradient", lambda: onnxtrain.gradient(path))
    if "run" in parts:
        predicted = operations.run("predict", lambda: predict(path, feeds, runtime=options))
        if predicted is not None:
            operations.run("comparison", lambda: _compare(path, feeds, predicted))
        data: Any = (feeds, _targets(predicted, loss)) if needs_targets else feeds
        operations.run("evaluate", lambda: evaluate(path, data, loss=loss, runtime=options))
    if "train" in parts:
        optimizer = onnxtrain.Momentum(0.01)
        trainer = operations.run(
            "Trainer", lambda: onnxtrain.Trainer(path, loss=loss, optimizer=optimizer, runtime=options)
        )
        if trainer is not None:
            targets = _targets(predicted, loss) if needs_targets else None
            operations.run("step", lambda: trainer.train_step(feeds, targets))
            operations.run("save", lambda: _save(trainer, path))
    if "lower" in parts:
        operations.run("lower", lambda: onnxtrain.lower(path if trainer is None else trainer.training_model()))
    if _content(path) != original:
        operations.run("original", _changed)


def _content(path: Path) -> bytes:
    """Return the bytes of a file; no bytes if the path is not a file."""
    return path.read_bytes() if path.is_file() else b""


def _changed() -> None:
    raise WrongError("the file that was given has changed")


def _feeds(data: bytes) -> dict[str, Any]:
    """Return arrays for the inputs, if they can be read from the file."""
    try:
        return plain.feeds(onnx.ModelProto.FromString(data))
    except Exception:  # a mutant may raise anything in protobuf and NumPy
        return {"x": np.zeros((3, 4), np.float32)}


def _targets(predicted: dict[str, Any] | None, loss: str) -> Any:
    """Return targets of the shape that the predictions require."""
    first = next(
        (array for array in (predicted or {}).values() if getattr(array, "dtype", np.dtype("U")).kind == "f"), None
    )
    if first is None:
        first = np.zeros((3, 3), np.float32)
    if loss == CROSS_ENTROPY and first.ndim > 1:
        return np.zeros((*first.shape[:1], *first.shape[2:]), np.int64)
    return np.zeros_like(first)


RANDOM = ("Random", "Bernoulli", "Multinomial", "Dropout")


def _compare(path: Path, feeds: dict[str, Any], predicted: dict[str, Any]) -> None:
    """Compare predictions with plain onnxruntime's for the unchanged file."""
    import onnxruntime

    if any(word.encode() in path.read_bytes() for word in RANDOM):
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        expected = session.run(list(predicted), feeds)
    except Exception:  # a refusal is fine
        return
    for (name, found), wanted in zip(predicted.items(), expected, strict=True):
        if not isinstance(wanted, np.ndarray) or found.shape != wanted.shape or found.dtype != wanted.dtype:
            continue  # examples that are put together again have an axis of their own
        close = np.array_equal(found, wanted)
        if not close and wanted.dtype.kind in "fc":
            close = np.allclose(found, wanted, rtol=1e-2, atol=1e-3, equal_nan=True)
        if not close:
            raise WrongError(f"output {name!r} differs from plain onnxruntime's:\n{found}\n{wanted}")


def _save(trainer: Any, path: Path) -> None:
    """Save, and check that only the data of initializers and trained constants, and the names of data files, differ."""
    saved = path.parent / "away" / "saved.onnx"
    saved.parent.mkdir(exist_ok=True)
    trainer.save(saved)
    trained = {*trainer.parameters}
    given, written = (_without_data(file.read_bytes(), trained) for file in (path, saved))
    if (
        b"sparse" not in path.read_bytes()
        and given != written
        and not trainer.config.model.proto.graph.sparse_initializer
    ):
        raise WrongError("the saved model differs in more than the data of its initializers")


def _without_data(data: bytes, trained: Container[str]) -> bytes:
    model = onnx.ModelProto.FromString(data)
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output and node.output[0] in trained:
            for attribute in node.attribute:
                attribute.ClearField("floats")
    for tensor in model.graph.initializer:
        for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
            tensor.ClearField(field)
    for tensor in all_tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":  # data files are named after their model
                entry.value = ""
    return bytes(model.SerializeToString(deterministic=True))
