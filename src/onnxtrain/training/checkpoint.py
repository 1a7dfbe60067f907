"""Checkpoints: safetensors files with a small JSON each, written so that no kill leaves a broken one."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.training.data.conversion import Array

JSON = None | bool | int | float | str | list[Any] | dict[str, Any]

FORMAT_VERSION: Final = 1
_STEM: Final = re.compile(r"checkpoint-(?P<sequence>\d+)-step-(?P<step>\d+)")
# A folder inside, not only names of our own: safetensors writes to a temporary name that it chooses itself.
_WORKSHOP: Final = ".writing"
# What safetensors reads back into NumPy. Everything else is stored as its bits, its type in the JSON.
_NATIVE_TYPES: Final = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
# safetensors keeps one name for itself; names that could be taken for it get one more underscore in the file.
_RESERVED_NAME: Final = re.compile(r"_*__metadata__")


@dataclass(frozen=True)
class _Entry:
    """One checkpoint, as its file name tells."""

    path: Path
    sequence: int
    step: int

    @property
    def tensors(self) -> Path:
        return self.path.with_suffix(".safetensors")


class CheckpointStore:
    """A folder that keeps the last checkpoints of a training.

    One is ``checkpoint-<sequence>-step-<step>.safetensors`` and ``.json``. Both are written in a hidden folder
    inside, flushed to the disk and renamed into place, the JSON last: it is what makes a checkpoint exist,
    and it holds the size and the CRC-32 of the tensors. A removal takes the JSON first. So a process may die
    at any moment: what is in the folder is complete, and what was left half done, the next `save` clears.

    The newest checkpoint is the one written last (the sequence), also when a training went back to an earlier
    step. One process at a time may write to a folder; any number may read.

    Args:
        folder: where the checkpoints lie; the first `save` creates it.
        keep: how many checkpoints to keep; at least 1.

    Raises:
        OptionError: keep is below 1.

    >>> import tempfile
    >>> store = CheckpointStore(tempfile.mkdtemp(), keep=2)
    >>> for step in (10, 20, 30):
    ...     _ = store.save(step, {"weight": np.full(3, step)}, {"epoch": 0})
    >>> store.steps()
    [20, 30]
    >>> tensors, metadata = store.load()
    >>> tensors["weight"].tolist(), metadata["step"]
    ([30, 30, 30], 30)
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise OptionError(f"the number of checkpoints to keep is {keep}; it must be at least 1.")
        self.folder = Path(folder)
        self.keep = keep

    def save(self, step: int, tensors: Mapping[str, Array], metadata: Mapping[str, JSON]) -> Path:
        """Write a checkpoint, then remove the oldest above the number to keep.

        Args:
            step: how many steps the training has done.
            tensors: arrays by any name, of any numeric type and shape.
            metadata: what JSON can hold; NumPy numbers become plain ones. ``fingerprint``, a dictionary, is
                what `load` compares; ``step`` and ``format_version`` are set here.

        Returns:
            The path of the JSON file, which stands for the checkpoint.

        Raises:
            CheckpointError: the folder cannot be written, or the metadata cannot be JSON.
            OptionError: the step is negative.
        """
        if step < 0:
            raise OptionError(f"the step of a checkpoint is {step}; it must be at least 0.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            entries = _entries(self.folder)
            sequence = entries[-1].sequence + 1 if entries else 1
            stem = f"checkpoint-{sequence:06d}-step-{step}"
            entry = _Entry(self.folder / f"{stem}.json", sequence, step)
            self._write(entry, tensors, metadata)
            kept = [*(other for other in entries if other.step != step), entry][-self.keep :]
            for other in entries:
                if other not in kept:
                    other.path.unlink(missing_ok=True)
                    other.tensors.unlink(missing_ok=True)
        except (OSError, SafetensorError, UnicodeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to '{self.folder}': {error}; "
                f"the ones before it are kept."
            ) from error
        return entry.path

    def latest(self) -> Path | None:
        """The JSON file of the checkpoint that was written last, or None if there is none."""
        entries = _entries(self.folder)
        return entries[-1].path if entries else None

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in the order in which they were written."""
        return [entry.step for entry in _entries(self.folder)]

    def load(
        self,
        checkpoint: int | str | os.PathLike[str] | None = None,
        *,
        expect: Mapping[str, JSON] | None = None,
    ) -> tuple[dict[str, Array], dict[str, JSON]]:
        """Read a checkpoint.

        Args:
            checkpoint: the step, or the path of either of its files; None for the one written last.
            expect: the fingerprint that the checkpoint must have.

        Returns:
            The tensors, and the metadata with ``step`` and ``format_version``.

        Raises:
            CheckpointError: there is no such checkpoint, its files are damaged, or its fingerprint differs.
        """
        entry = self._find(checkpoint)
        record = _read_record(entry)
        if expect is not None:
            _compare_fingerprints(entry.path, record["metadata"].get("fingerprint"), expect)
        problem = _damage(entry, record)
        if problem:
            raise _damaged(entry, problem)
        try:
            tensors = _decode(load_file(entry.tensors), record["types"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(entry, f"'{entry.tensors.name}' cannot be read ({error})") from error
        return tensors, {
            **record["metadata"],
            "step": record["step"],
            "format_version": record["format_version"],
        }

    def _write(self, entry: _Entry, tensors: Mapping[str, Array], metadata: Mapping[str, JSON]) -> None:
        encoded, types = _encode(tensors)
        workshop = self.folder / _WORKSHOP
        workshop.mkdir()
        unfinished = workshop / entry.tensors.name
        unfinished_record = workshop / entry.path.name
        try:
            save_file(encoded, unfinished)
            _flush(unfinished)
            record = {
                "format_version": FORMAT_VERSION,
                "step": entry.step,
                "bytes": unfinished.stat().st_size,
                "crc32": _checksum(unfinished),
                "types": types,
                "metadata": dict(metadata),
            }
            unfinished_record.write_text(_to_json(record), encoding="utf-8")
            _flush(unfinished_record)
            unfinished.replace(entry.tensors)
            _flush(self.folder)  # the tensors' name is on the disk before the JSON's can be
            unfinished_record.replace(entry.path)
            _flush(self.folder)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)

    def _clear_leftovers(self) -> None:
        """Remove what a killed process left: unfinished files, and tensors without a JSON."""
        shutil.rmtree(self.folder / _WORKSHOP, ignore_errors=True)
        for path in self.folder.glob("checkpoint-*.safetensors"):
            if _STEM.fullmatch(path.stem) and not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    def _find(self, checkpoint: int | str | os.PathLike[str] | None) -> _Entry:
        entries = _entries(self.folder)
        if isinstance(checkpoint, str | os.PathLike):
            path = Path(checkpoint).with_suffix(".json")
            match = _STEM.fullmatch(path.stem)
            if not match or not path.is_file():
                raise CheckpointError(f"'{checkpoint}' is not a checkpoint; {_newest(path.parent)}.")
            return _Entry(path, int(match["sequence"]), int(match["step"]))
        if not entries:
            raise CheckpointError(f"'{self.folder}' holds no checkpoint; train with a checkpoint folder first.")
        if checkpoint is None:
            return entries[-1]
        for entry in reversed(entries):
            if entry.step == checkpoint:
                return entry
        listed = ", ".join(str(step) for step in self.steps())
        raise CheckpointError(f"'{self.folder}' holds no checkpoint of step {checkpoint}, only of {listed}.")


def _entries(folder: Path) -> list[_Entry]:
    """All checkpoints of a folder, in the order in which they were written."""
    entries = []
    for path in folder.glob("checkpoint-*.json"):
        match = _STEM.fullmatch(path.stem)
        if match:
            entries.append(_Entry(path, int(match["sequence"]), int(match["step"])))
    return sorted(entries, key=lambda entry: entry.sequence)


def _encode(tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays that safetensors can store, by names that it accepts, and the types that it cannot store."""
    encoded: dict[str, Array] = {}
    types: dict[str, str] = {}
    for name, tensor in tensors.items():
        array = np.asarray(tensor)
        if array.dtype.hasobject or array.dtype.kind in "USTMm" or array.dtype.fields is not None:
            raise CheckpointError(f"tensor '{name}' has type {array.dtype}; a checkpoint holds numbers only.")
        # safetensors writes the memory as it lies, so the order must be C and the byte order little-endian.
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if array.dtype.name not in _NATIVE_TYPES:
            types[name] = array.dtype.name
            array = array.reshape(*array.shape, 1).view(np.uint8)
        encoded[f"_{name}" if _RESERVED_NAME.fullmatch(name) else name] = array
    return encoded, types


def _decode(encoded: Mapping[str, Array], types: Mapping[str, str]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for stored_name, array in encoded.items():
        name = stored_name[1:] if _RESERVED_NAME.fullmatch(stored_name) else stored_name
        if name in types:
            array = array.view(_type_by_name(types[name])).reshape(array.shape[:-1])
        tensors[name] = array
    return tensors


def _type_by_name(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # onnx brings it along; only bfloat16 and its like need it

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def _to_json(record: dict[str, Any]) -> str:
    def plain(value: object) -> object:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__name__} is not a JSON value")

    try:
        return json.dumps(record, default=plain, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the metadata of a checkpoint cannot be written as JSON: {error}.") from error


def _parse_record(path: Path) -> dict[str, Any]:
    """Read the JSON of a checkpoint; raise ValueError if something is not there."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or "format_version" not in record:
        raise ValueError("it has no format version")
    if record["format_version"] == FORMAT_VERSION:
        kinds = {"step": int, "bytes": int, "crc32": int, "types": dict, "metadata": dict}
        wrong = [key for key, kind in kinds.items() if not isinstance(record.get(key), kind)]
        if wrong:
            raise ValueError(f"it has no valid {', '.join(wrong)}")
    return record


def _read_record(entry: _Entry) -> dict[str, Any]:
    try:
        record = _parse_record(entry.path)
    except (OSError, ValueError) as error:
        raise _damaged(entry, f"its JSON cannot be read ({error})") from error
    if record["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"'{entry.path}' has format version {record['format_version']}, this onnxtrain reads version "
            f"{FORMAT_VERSION}; use the onnxtrain that wrote it."
        )
    return record


def _damaged(entry: _Entry, problem: str) -> CheckpointError:
    newest = _newest(entry.path.parent, apart_from=entry.path.name)
    return CheckpointError(f"the checkpoint '{entry.path}' is damaged: {problem}; {newest}.")


def _newest(folder: Path, apart_from: str = "") -> str:
    """How an error message ends: with the newest checkpoint of a folder that is complete."""
    for entry in reversed(_entries(folder)):
        try:
            record = _parse_record(entry.path)
        except (OSError, ValueError):
            continue
        complete = record["format_version"] == FORMAT_VERSION and not _damage(entry, record)
        if complete and entry.path.name != apart_from:
            return f"the newest complete one is '{entry.path}' of step {entry.step}"
    return "the folder holds no other complete one" if apart_from else "the folder holds no complete one"


def _damage(entry: _Entry, record: dict[str, Any]) -> str | None:
    """What is wrong with the tensors' file; None if nothing."""
    name = entry.tensors.name
    try:
        size = entry.tensors.stat().st_size
        if size != record["bytes"]:
            return f"'{name}' has {size} bytes instead of {record['bytes']}"
        if _checksum(entry.tensors) != record["crc32"]:
            return f"'{name}' has another checksum than when it was written"
    except FileNotFoundError:
        return f"'{name}' is missing"
    except OSError as error:
        return f"'{name}' cannot be read ({error.strerror or error})"
    return None


def _compare_fingerprints(path: Path, found: object, expected: Mapping[str, JSON]) -> None:
    fingerprint = found if isinstance(found, dict) else {}
    # What went through JSON has lists for tuples and text for keys: compare what came through on both sides.
    wanted = json.loads(_to_json(dict(expected)))
    differences = [
        f"{key} is {_shown(fingerprint, key)} there and {_shown(wanted, key)} here"
        for key in sorted(wanted.keys() | fingerprint.keys())
        if _shown(fingerprint, key) != _shown(wanted, key)
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint '{path}' belongs to another training: {', '.join(differences)}; "
            f"resume with the same model, data and settings."
        )


def _shown(fingerprint: Mapping[str, Any], key: str) -> str:
    return json.dumps(fingerprint[key], sort_keys=True) if key in fingerprint else "missing"


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
