"""Resume trainings from damaged and forged checkpoint folders."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from reliability.mutation import damage
from reliability.mutation_of_fields import FLOATS, INTEGERS, TEXTS
from reliability.outcome import WrongError
from reliability.worker import Operations


class Subject:
    """A short training that is resumed from damaged checkpoints."""

    def __init__(self, shared: Path) -> None:
        import onnxtrain

        self._model = onnxtrain.examples.mlp((4, 5, 3))
        points = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
        self._data = (points, points[:, :3].argmax(1))
        self._good = shared / "checkpoints"
        shutil.rmtree(self._good, ignore_errors=True)
        self._trainer().fit(self._data, epochs=2, batch_size=8, checkpoint=self._good, checkpoint_every=2)
        finished = self._trainer()
        finished.fit(self._data, epochs=3, batch_size=8)
        self._expected = {name: array.tobytes() for name, array in finished.weights.items()}

    def _trainer(self) -> Any:
        import onnxtrain

        return onnxtrain.Trainer(self._model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(), threads=1)

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Damage a copy of the folder, and resume."""
        generator = random.Random(f"checkpoints {seed} {index}")
        warnings.simplefilter("ignore")
        folder = case / "checkpoints"
        shutil.copytree(self._good, folder)
        forged = spoil(folder, generator)
        trainer = self._trainer()

        def resume() -> bool:
            trainer.fit(self._data, epochs=3, batch_size=8, checkpoint=folder, resume=True)
            return True

        if operations.run("resume", resume) and not forged:
            operations.run("comparison", lambda: self._compare(trainer))

    def _compare(self, trainer: Any) -> None:
        found = {name: array.tobytes() for name, array in dict(trainer.weights).items()}
        if found != self._expected:
            raise WrongError("a damaged checkpoint was resumed without a word, to other weights")


def spoil(folder: Path, generator: random.Random) -> bool:
    """Damage a folder of checkpoints; return whether the result may be accepted."""
    records = sorted(folder.glob("*.json"))
    record = generator.choice([records[-1], records[-1], *records])
    tensors = record.with_suffix(".safetensors")
    match generator.randrange(8):
        case 0:
            record.write_bytes(damage(record.read_bytes(), generator))
            return True  # a digit for another: nothing guards the text
        case 1:
            tensors.write_bytes(damage(tensors.read_bytes(), generator))
            return False
        case 2 | 3:
            _change_json(record, generator)
        case 4:
            tensors.write_bytes(damage(tensors.read_bytes(), generator))
            _make_fit(record)
        case 5:
            tensors.write_bytes(_change_header(tensors.read_bytes(), generator))
            _make_fit(record)
        case 6:
            _rename(record, generator)
        case 7:
            _replace(generator.choice((record, tensors)), generator)
            return False
    return True


def _make_fit(record: Path) -> None:
    """Write the size and checksum of the tensors into a record, as a forger would."""
    content = json.loads(record.read_text())
    data = record.with_suffix(".safetensors").read_bytes()
    content |= {"bytes": len(data), "crc32": zlib.crc32(data)}
    record.write_text(json.dumps(content))


def _change_json(record: Path, generator: random.Random) -> None:
    content = json.loads(record.read_text())
    for _ in range(generator.choice((1, 1, 2))):
        _change_value(content, generator)
    text = json.dumps(content)
    if generator.random() < 0.1:
        text = generator.choice((text.replace(":", ":" + "[" * 5000, 1), text.replace("{", '{"a": 1, "a": 2, ', 1)))
    record.write_text(text)


def _change_value(content: Any, generator: random.Random) -> None:
    """Change a value at a random depth."""
    keys = [*content] if isinstance(content, dict) else [*range(len(content))]
    if not keys:
        return
    key = generator.choice(keys)
    if isinstance(content[key], dict | list) and content[key] and generator.random() < 0.8:
        _change_value(content[key], generator)
    elif generator.random() < 0.2:
        del content[key]
    else:
        content[key] = generator.choice(
            (None, True, [], {}, generator.choice(INTEGERS), generator.choice(FLOATS), generator.choice(TEXTS),
             "\ud800", 10**400, 0.5, -1, [[]], {"a": None})
        )  # fmt: skip


def _change_header(data: bytes, generator: random.Random) -> bytes:
    """Change the header of the tensors file, and its length field."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for _ in range(generator.choice((1, 1, 2))):
        _change_value(header, generator)
    text = json.dumps(header).encode("utf-8", "replace")
    size = len(text) if generator.random() < 0.9 else generator.choice((0, 2**40, 2**64 - 1))
    return size.to_bytes(8, "little") + text + data[8 + length :]


def _rename(record: Path, generator: random.Random) -> None:
    name = generator.choice(
        ("checkpoint-000099-step-3", "checkpoint-000001-step-99", "checkpoint-" + "9" * 200 + "-step-1",
         "checkpoint-1-step-", "checkpoint--step--1", "checkpoint-\u0664-step-\u0664", "checkpoint-000000-step-0",
         "checkpoint-7-step-" + "9" * 30)
    )  # fmt: skip
    for suffix in (".json", ".safetensors"):
        if generator.random() < 0.8:
            record.with_suffix(suffix).rename(record.with_name(name + suffix))


def _replace(path: Path, generator: random.Random) -> None:
    content = path.read_bytes()
    path.unlink()
    match generator.randrange(7):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path)
        case 2:
            os.mkfifo(path)
        case 3:
            path.write_bytes(b"")
        case 4:
            path.write_bytes(content[: len(content) // 2])
        case 5:
            path.write_bytes(content + b"\0")
        case 6:
            pass
