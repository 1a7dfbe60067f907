"""A training holds its weights once: the file's copies are released, and its buffers do not move."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain

X, Y = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32), np.arange(6) % 3


def trainer_of(folder: Path, **options: object) -> onnxtrain.Trainer:
    path = folder / "mlp.onnx"
    if not path.exists():
        onnx.save(onnxtrain.examples.mlp((40, 50, 3)), path)
    arguments = {"loss": "softmax_cross_entropy", "optimizer": onnxtrain.Adam(0.01), "threads": 1, **options}
    return onnxtrain.Trainer(path, **arguments)  # type: ignore[arg-type]


def largest(trainer: onnxtrain.Trainer) -> str:
    return max(trainer.parameters, key=lambda name: trainer.parameters[name].size)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fate", ["kept", "replaced", "overwritten", "removed"])
def test_a_trainer_does_not_need_the_file_any_more(fate: str, tmp_path: Path) -> None:
    """Evaluation, prediction, masks and other target types build new graphs; saving writes the weights."""
    trainer, reference = trainer_of(tmp_path), trainer_of(tmp_path)
    path = tmp_path / "mlp.onnx"
    if fate == "replaced":
        trainer.save(path)
    elif fate == "overwritten":
        path.write_bytes(b"not a model")
    elif fate == "removed":
        path.unlink()
    name = largest(trainer)
    mask = np.random.default_rng(1).random(trainer.parameters[name].shape) < 0.5
    for each in (trainer, reference):
        each.train_step(X, Y)
        each.set_masks({name: mask})
        each.train_step(X, np.eye(3, dtype=np.float32)[Y])
    assert trainer.evaluate((X, Y)) == reference.evaluate((X, Y))
    np.testing.assert_array_equal(trainer.predict(X), reference.predict(X))
    trainer.save(tmp_path / "trained.onnx")
    again = onnxtrain.Trainer(tmp_path / "trained.onnx", loss="softmax_cross_entropy")
    for each in again.parameters:
        np.testing.assert_array_equal(again.parameters[each], reference.parameters[each])


def test_a_rebuilt_session_continues_in_the_same_buffers(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train_step(X, Y)
    name = largest(trainer)
    array = trainer.parameters[name]
    trainer.set_masks({name: np.ones(array.shape, bool)})
    trainer.train_step(X, np.eye(3, dtype=np.float32)[Y])
    assert trainer.parameters[name] is array


def test_the_first_values_come_from_the_file_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    name = largest(trainer)
    first = trainer.parameters[name].copy()
    trainer.train_step(X, Y)
    assert (trainer.parameters[name] != first).any()
    trainer.executor.session.initialize()
    np.testing.assert_array_equal(trainer.parameters[name], first)
    trainer.save(tmp_path / "mlp.onnx")
    with pytest.raises(onnxtrain.errors.ModelError, match=rf"^The initial values of '{name}' are gone: "):
        trainer.executor.session.initialize()


MEASURE = """
import re, sys
from pathlib import Path
import numpy as np, onnxtrain

def anonymous(kind):
    return 1024 * int(re.search(kind + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def train(path, **options):
    trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", threads=1, **options)
    trainer.train_step(np.ones((2, 64), np.float32), np.zeros(2, np.int64))
    return trainer

warm = train({small!r})  # imports, and what libraries keep
before = anonymous("RssAnon")
trainer = train({large!r})
trainer.train_step(np.ones((2, 64), np.float32), np.zeros(2, np.int64))
print((anonymous("RssAnon") - before) / sum(array.nbytes for array in trainer.parameters.values()))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc")
def test_a_training_with_adam_takes_four_times_its_weights(tmp_path: Path) -> None:
    """Weights, two states and gradients take four times the memory; the file's weights would make it five."""
    paths = {"small": (64, 64, 64), "large": (64, 3000, 3000, 64)}
    for name, sizes in paths.items():
        onnx.save(onnxtrain.examples.mlp(sizes), tmp_path / f"{name}.onnx")
    code = MEASURE.format(**{name: str(tmp_path / f"{name}.onnx") for name in paths})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 3.5 < float(done.stdout) < 4.5


USES: dict[str, Callable[[onnxtrain.Trainer], object]] = {
    "made": lambda trainer: trainer.executor.session,
    "steps": lambda trainer: trainer.train_step(X, Y),
    "other targets": lambda trainer: [trainer.train_step(X, y) for y in (Y, np.eye(3, dtype=np.float32)[Y])],
    "fit": lambda trainer: trainer.fit(X, Y, epochs=2, batch_size=4, progress=False, validation=(X, Y)),
    "predictions": lambda trainer: (trainer.evaluate(X, Y), trainer.predict(X)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["whole batches", "micro-batches"])
@pytest.mark.parametrize("use", USES)
def test_the_memory_of_a_training_that_nobody_has_any_more_is_free_at_once(
    use: str, options: dict[str, object], tmp_path: Path
) -> None:
    """Buffers are in no reference cycle, so that they do not wait for the cyclic garbage collector."""
    trainer = trainer_of(tmp_path, **options)
    USES[use](trainer)
    states = weakref.ref(trainer.executor.states)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert states() is None
    finally:
        gc.enable()
