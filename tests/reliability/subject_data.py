"""Data files: arrays of every type and shape, damaged headers, archives and folders, Python objects."""

from __future__ import annotations

import io
import json
import os
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from reliability.mutation import damage
from reliability.mutation_of_fields import INTEGERS, TEXTS
from reliability.outcome import WrongError
from reliability.worker import Operations

DTYPES = (
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "F", "D", "G", "S5", "U5", "O", "M8[s]",
    "m8[D]", ">f4", ">i8", "V4", "<f4,<i4",
)  # fmt: skip
SHAPES = ((60, 4), (60,), (), (0, 4), (60, 0), (1, 4), (59, 4), (60, 4, 1), (4, 60), (60, 3), (7, 2, 2))
VALUES = (0.0, -1.0, 3.0, 1e30, -1e30, float("nan"), float("inf"), 0.5, 2**63, 255)
NAMES = (
    "input",
    "label",
    "x",
    "",
    "input.npy",
    "a/b",
    "../up",
    "/abs",
    "\u03bb",
    "input",
    "label",
    "__metadata__",
    "a\x1bb",
)


class Trap:
    """Makes a folder when it is unpickled, which must never happen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


class Subject:
    """A small model, trained, evaluated and run on files of all kinds."""

    def __init__(self, shared: Path) -> None:
        import onnxtrain

        self._model = onnxtrain.examples.mlp((4, 5, 3))
        self._make_trainer()

    def _make_trainer(self) -> None:
        import onnxtrain

        self._trainer = onnxtrain.Trainer(
            self._model, loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(1e-3), threads=1
        )

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Write a data file, and pass it to everything that reads data."""
        generator = random.Random(f"data {seed} {index}")
        warnings.simplefilter("ignore")
        trap = case / "unpickled"
        path = make_data(case, generator, Trap(trap))
        trainer = self._trainer
        operations.run("fit", lambda: trainer.fit(path, epochs=1, target="label"))
        if not all(np.isfinite(array).all() for array in dict(trainer.weights).values()):
            self._make_trainer()
        operations.run("evaluate", lambda: trainer.evaluate(path, target="label"))
        operations.run("predict", lambda: trainer.predict(path))
        if trap.exists():
            operations.run("pickle", _ran)


def _ran() -> None:
    raise WrongError("code in a pickle was run")


def make_data(folder: Path, generator: random.Random, trap: Trap) -> Path:
    """Write a file or folder of data; return its path."""
    arrays = {"input": _values(generator, (60, 4), "f4"), "label": np.arange(60) % 3}
    for _ in range(generator.choice((0, 0, 1, 2))):
        arrays[generator.choice(NAMES)] = _values(generator, generator.choice(SHAPES), generator.choice(DTYPES))
    files = {name: _npy(array, generator, trap) for name, array in arrays.items()}
    for name in files:
        if generator.random() < 0.08:
            files[name] = _spoil_header(files[name], generator)
        if generator.random() < 0.08:
            files[name] = damage(files[name], generator)
    match generator.randrange(8):
        case 0:
            return _folder(folder / "data", files, generator)
        case 1:
            path = folder / "data.npy"
            path.write_bytes(generator.choice([*files.values()]))
            return path
        case _:
            path = folder / "data.npz"
            content = _archive(files, generator)
            path.write_bytes(damage(content, generator) if generator.random() < 0.2 else content)
            return path


def _values(generator: random.Random, shape: tuple[int, ...], kind: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(generator.getrandbits(32))
    values = rng.normal(size=shape)
    if generator.random() < 0.2 and values.size:
        values.reshape(-1)[generator.randrange(values.size)] = generator.choice(VALUES)
    dtype = np.dtype(kind)
    if dtype.kind in "MmVS" or dtype.names:
        return np.zeros(shape, dtype)
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(dtype)


def _npy(array: np.ndarray[Any, Any], generator: random.Random, trap: Trap) -> bytes:
    file = io.BytesIO()
    if array.dtype.hasobject:
        array = np.empty(array.shape, object)
        array.fill(trap)
    if generator.random() < 0.1:
        array = np.asfortranarray(array)
    version = generator.choice(((1, 0), (2, 0), (3, 0), None))
    np.lib.format.write_array(file, array, version, allow_pickle=True)
    return file.getvalue()


def _spoil_header(data: bytes, generator: random.Random) -> bytes:
    """Change the text of the header, and its length field."""
    start = data.find(b"{")
    end = data.find(b"\n", start)
    if start < 0 or end < 0:
        return data
    text = data[start:end].decode("latin1")
    number = str(generator.choice(INTEGERS))
    text = generator.choice(
        (
            text.replace("60", number),
            text.replace("(", "(" * generator.choice((1, 2, 90, 5000))),
            text.replace(
                "'<f4'", generator.choice(("'|O'", "'<f3'", "'<f99999999999'", "[('a', '<f4')]", "None", "5"))
            ),
            text.replace("False", generator.choice(("True", "2", "'x'", "__import__('os')"))),
            text.replace("'shape'", generator.choice(("'shap'", "'shape': (1,), 'shape'", "shape"))),
            text + generator.choice(TEXTS),
            "",
            "{" * 1000,
            "-" * 10000 + "1",
        )
    )
    body = text.encode("utf-8", "replace") + b"\n"
    length = len(body) if generator.random() < 0.9 else generator.choice((0, 65535))
    return b"\x93NUMPY\x01\x00" + min(length, 65535).to_bytes(2, "little") + body + data[end + 1 :]


def _archive(files: dict[str, bytes], generator: random.Random) -> bytes:
    content = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(content, "w") as archive:
        warnings.simplefilter("ignore")  # names that are there twice are part of it
        for name, data in files.items():
            method = generator.choice((0, 0, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
            suffix = ".npy" if generator.random() < 0.95 else generator.choice((".txt", ".NPY", "", ".npy/"))
            info = zipfile.ZipInfo((name + suffix) or "nameless")
            info.compress_type = method
            archive.writestr(info, data)
            if generator.random() < 0.05:
                archive.writestr(info, data)
        if generator.random() < 0.05:
            archive.comment = b"PK\x05\x06" * 8
        if generator.random() < 0.1 and archive.filelist:  # a directory that does not say the truth
            info = generator.choice(archive.filelist)
            field = generator.choice(
                ("file_size", "compress_size", "header_offset", "flag_bits", "compress_type", "CRC")
            )
            limit = {"flag_bits": 0xFFFF, "compress_type": 99}.get(field, 2**32 - 1)
            setattr(info, field, generator.choice((0, 1, 7, 2**20, 2**31, limit)) % (limit + 1))
    return content.getvalue()


def _folder(folder: Path, files: dict[str, bytes], generator: random.Random) -> Path:
    folder.mkdir()
    for name, data in files.items():
        path = folder / (name.strip("/").replace("..", "up") + ".npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    match generator.randrange(10):
        case 0:
            os.mkfifo(folder / "pipe.npy")
        case 1:
            (folder / "loop").symlink_to(folder)
        case 2:
            (folder / "nothing.npy").symlink_to(folder / "missing")
        case 3:
            (folder / "folder.npy").mkdir()
        case 4:
            (folder / "text.npy").write_text(json.dumps({"a": 1}))
    return folder
