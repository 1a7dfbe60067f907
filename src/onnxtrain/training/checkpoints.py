"""Checkpoints: a safetensors file and a small JSON file each, written atomically, and checks for damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from onnxtrain.data.conversion import Array
from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.model_file.small_files import read_json
from onnxtrain.model_file.writing import folder_lock
from onnxtrain.training.description import JSON, differences, how_to_change

_logger = logging.getLogger(__name__)

# A separate folder, since safetensors chooses the names of its temporary files itself.
_STAGING: Final = ".writing"


class CheckpointStore:
    """A folder with the last checkpoints of a training."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise OptionError(f"the number of checkpoints to keep is {keep}; it must be at least 1.").about(
                "keep", got=keep
            )
        self.folder = Path(folder)
        self.keep = keep

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Context that prepares the folder and locks it against other trainings."""
        with contextlib.suppress(OSError, ValueError):  # `prepare` raises the error with its reason
            self.folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.folder, error=CheckpointError):
            self.prepare()
            yield

    def prepare(self) -> None:
        """Create the folder, remove files of a killed process, and check that the folder can be written to."""
        probe = self.folder / _STAGING
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            try:
                probe.mkdir()
                (probe / "probe").write_bytes(b"")
            finally:
                with contextlib.suppress(OSError):  # rmtree fails if no file descriptors are left
                    (probe / "probe").unlink(missing_ok=True)
                    probe.rmdir()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, FileExistsError) and not self.folder.is_dir():
                reason = "it is not a folder"
            raise CheckpointError(
                f"checkpoints cannot be written to '{self.folder}': {reason}; give a writable folder."
            ).about(str(self.folder), got=reason) from error

    def save(self, step: int, tensors: Mapping[str, Array], metadata: Mapping[str, JSON]) -> Path:
        """Write a checkpoint, then remove the oldest above the number to keep."""
        if step < 0:
            raise OptionError(f"the step of a checkpoint is {step}; it must be at least 0.").about("step", got=step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            entries = self._entries()
            sequence = entries[-1].sequence + 1 if entries else 1
            stem = f"checkpoint-{sequence:06d}-step-{step}"
            entry = Entry(self.folder / f"{stem}.json", sequence, step)
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
            ).about(str(self.folder), got=step) from error
        return entry.path

    def latest(self) -> Path | None:
        """Return the JSON file of the checkpoint that was written last; ``None`` if there is none."""
        entries = self._entries()
        return entries[-1].path if entries else None

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in the order in which they were written."""
        return [entry.step for entry in self._entries()]

    def load(
        self,
        checkpoint: int | str | os.PathLike[str] | None = None,
        *,
        expect: Mapping[str, JSON] | None = None,
        change: Collection[str] = (),
    ) -> tuple[dict[str, Array], dict[str, JSON]]:
        """Read a checkpoint."""
        return self._load(self._find(checkpoint), expect, change)

    def metadata(self, checkpoint: int | str | os.PathLike[str] | None = None) -> dict[str, JSON] | None:
        """Return the metadata of a checkpoint, of the newest by default; ``None`` if it cannot be read."""
        try:
            found: dict[str, JSON] = read_record(self._find(checkpoint))["metadata"]
        except CheckpointError:
            return None
        return found

    def load_newest(
        self, *, expect: Mapping[str, JSON] | None = None, change: Collection[str] = ()
    ) -> tuple[dict[str, Array], dict[str, JSON]]:
        """Read the newest undamaged checkpoint; log a warning for each damaged one."""
        first: DamagedError | None = None
        for entry in reversed(self._entries()):
            try:
                return self._load(entry, expect, change)
            except DamagedError as error:
                _logger.warning("%s", error)
                first = first or error
        if first is not None:
            raise first
        return self._load(self._find(None), expect, change)

    def _load(
        self, entry: Entry, expect: Mapping[str, JSON] | None, change: Collection[str]
    ) -> tuple[dict[str, Array], dict[str, JSON]]:
        record = read_record(entry)
        if expect is not None:
            _compare_fingerprints(entry.path, record["metadata"].get("fingerprint"), expect, change)
        problem = damage_of(entry, record)
        if problem:
            raise damaged(entry, problem)
        try:
            tensors = decode(load_file(entry.tensors), record["types"])
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise damaged(entry, f"'{entry.tensors.name}' cannot be read ({error})") from error
        return tensors, {
            **record["metadata"],
            "step": record["step"],
            "format_version": record["format_version"],
        }

    def _write(self, entry: Entry, tensors: Mapping[str, Array], metadata: Mapping[str, JSON]) -> None:
        encoded, types = encode(tensors)
        staging = self.folder / _STAGING
        staging.mkdir()
        unfinished = staging / entry.tensors.name
        unfinished_record = staging / entry.path.name
        try:
            save_file(encoded, unfinished)
            _flush(unfinished)
            record = {
                "format_version": FORMAT_VERSION,
                "step": entry.step,
                "bytes": unfinished.stat().st_size,
                "crc32": checksum_of(unfinished),
                "types": types,
                "metadata": dict(metadata),
            }
            record = json.loads(to_json(record))  # the checksum is of the record as it will be read
            record["checksum"] = record_checksum(record)
            unfinished_record.write_text(to_json(record), encoding="utf-8")
            unfinished.chmod(stat.S_IMODE(unfinished_record.stat().st_mode))  # safetensors makes it private
            _flush(unfinished_record)
            unfinished.replace(entry.tensors)
            _flush(self.folder)  # the directory entry of the tensors reaches the disk before that of the JSON
            unfinished_record.replace(entry.path)
            _flush(self.folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _clear_leftovers(self) -> None:
        """Remove unfinished files of a killed process, and tensors without a JSON."""
        staging = self.folder / _STAGING
        if staging.is_dir() and not staging.is_symlink():
            shutil.rmtree(staging, ignore_errors=True)
        else:
            staging.unlink(missing_ok=True)
        for path in self.folder.glob("checkpoint-*.safetensors"):
            if STEM.fullmatch(path.stem) and not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    def _entries(self) -> list[Entry]:
        try:
            return entries_of(self.folder)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"'{self.folder}' cannot be read: {reason}; give a folder of checkpoints.") from error

    def _find(self, checkpoint: int | str | os.PathLike[str] | None) -> Entry:
        entries = self._entries()
        if isinstance(checkpoint, str | os.PathLike):
            path = Path(checkpoint).with_suffix(".json")
            match = STEM.fullmatch(path.stem)
            if not match or not path.is_file():
                raise CheckpointError(f"'{checkpoint}' is not a checkpoint; {newest_of(path.parent)}.")
            return Entry(path, int(match["sequence"]), int(match["step"]))
        if not entries:
            raise CheckpointError(f"'{self.folder}' holds no checkpoint; train with a checkpoint folder first.").about(
                str(self.folder)
            )
        if checkpoint is None:
            return entries[-1]
        for entry in reversed(entries):
            if entry.step == checkpoint:
                return entry
        listed = ", ".join(str(step) for step in self.steps())
        raise CheckpointError(f"'{self.folder}' holds no checkpoint of step {checkpoint}, only of {listed}.").about(
            str(self.folder), got=checkpoint
        )


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, JSON]]:
    """Read tensors and metadata of a checkpoint, or of the newest one in a folder."""
    given = Path(path)
    if given.is_dir():
        return CheckpointStore(given).load_newest()
    return CheckpointStore(given.parent).load(given)


def _compare_fingerprints(
    path: Path, found: object, expected: Mapping[str, JSON], change: Collection[str] = ()
) -> None:
    fingerprint = found if isinstance(found, dict) else {}
    # JSON turns tuples into lists and keys into strings, so both sides must have passed through it.
    different = differences(fingerprint, json.loads(to_json(dict(expected))))
    refused = {key: words for key, words in different.items() if key not in change}
    if refused:
        raise CheckpointError(
            f"the checkpoint '{path}' belongs to another training: {', '.join(refused.values())}; "
            f"{how_to_change(different)}."
        )


def _flush(path: Path) -> None:
    writable = os.name == "nt"  # Windows can flush only files that are open for writing, and no folders
    if writable and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Types that safetensors reads back into NumPy. Others are stored as bytes, with their type in the JSON.
_NATIVE_TYPES: Final = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
# safetensors reserves one name; names that match it, with any number of underscores, get one more underscore.
_RESERVED_NAME: Final = re.compile(r"_*__metadata__")


def encode(tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, str]]:
    """Convert arrays to types and names that safetensors accepts; return them and the original types by name."""
    encoded: dict[str, Array] = {}
    types: dict[str, str] = {}
    for name, tensor in tensors.items():
        array = np.asarray(tensor)
        if array.dtype.hasobject or array.dtype.kind in "USTMm" or array.dtype.fields is not None:
            raise CheckpointError(f"tensor '{name}' has type {array.dtype}; a checkpoint holds numbers only.").about(
                name, got=array.dtype
            )
        # safetensors writes raw memory, so it must be in C order and little-endian.
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if array.dtype.name not in _NATIVE_TYPES:
            types[name] = array.dtype.name
            array = array.reshape(*array.shape, 1).view(np.uint8)
        encoded[f"_{name}" if _RESERVED_NAME.fullmatch(name) else name] = array
    return encoded, types


def decode(encoded: Mapping[str, Array], types: Mapping[str, str]) -> dict[str, Array]:
    """Restore names and types of arrays; the inverse of `encode`."""
    tensors: dict[str, Array] = {}
    for stored_name, array in encoded.items():
        name = stored_name[1:] if _RESERVED_NAME.fullmatch(stored_name) else stored_name
        if name in types:
            array = array.view(np.dtype(types[name])).reshape(array.shape[:-1])
        tensors[name] = array
    return tensors


FORMAT_VERSION: Final = 1
STEM: Final = re.compile(r"checkpoint-(?P<sequence>\d+)-step-(?P<step>\d+)")
# The JSON parser raises RecursionError on deeply nested brackets.
_UNREADABLE: Final = (OSError, ValueError, RecursionError)


@dataclass(frozen=True)
class Entry:
    """A checkpoint, by its file name."""

    path: Path
    sequence: int
    step: int

    @property
    def tensors(self) -> Path:
        """Path of the file with its arrays."""
        return self.path.with_suffix(".safetensors")


class DamagedError(CheckpointError):
    """Files of a checkpoint have changed since they were written; other checkpoints may be intact."""


def entries_of(folder: Path) -> list[Entry]:
    """Return all checkpoints in a folder, in the order in which they were written."""
    entries = []
    for path in folder.glob("checkpoint-*.json"):
        match = STEM.fullmatch(path.stem)
        if match:
            entries.append(Entry(path, int(match["sequence"]), int(match["step"])))
    return sorted(entries, key=lambda entry: entry.sequence)


def to_json(record: dict[str, Any]) -> str:
    """Serialize a record; NumPy scalars become Python numbers."""

    def plain(value: object) -> object:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__name__} is not a JSON value")

    try:
        return json.dumps(record, default=plain, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the metadata of a checkpoint cannot be written as JSON: {error}.") from error


def _parse_record(path: Path) -> dict[str, Any]:
    """Read the JSON of a checkpoint; raise ValueError if a field is missing or wrong."""
    record = read_json(path, finite=False)
    if not isinstance(record, dict) or "format_version" not in record:
        raise ValueError("it has no format version")
    if record["format_version"] == FORMAT_VERSION:
        kinds = {"step": int, "bytes": int, "crc32": int, "types": dict, "metadata": dict}
        wrong = [key for key, kind in kinds.items() if not isinstance(record.get(key), kind)]
        if wrong:
            raise ValueError(f"it has no valid {', '.join(wrong)}")
        if "checksum" not in record:
            raise ValueError(
                "it has no checksum, since an earlier onnxtrain wrote it: finish the training with that version"
            )
        if record["checksum"] != record_checksum(record):
            raise ValueError("it has not the checksum that it was written with")
    return record


def record_checksum(record: Mapping[str, Any]) -> str:
    """Hash a record, except size and checksum of the tensors' file, which that file verifies."""
    content = {key: value for key, value in record.items() if key not in ("bytes", "crc32", "checksum")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_record(entry: Entry) -> dict[str, Any]:
    """Read the JSON of a checkpoint."""
    try:
        record = _parse_record(entry.path)
    except _UNREADABLE as error:
        raise damaged(entry, f"its JSON cannot be read ({error})") from error
    if record["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"'{entry.path}' has format version {record['format_version']}, this onnxtrain reads version "
            f"{FORMAT_VERSION}; use the onnxtrain that wrote it."
        ).about(str(entry.path), got=record["format_version"], wanted=FORMAT_VERSION)
    if record["step"] != entry.step:
        raise damaged(entry, f"it belongs to step {record['step']}, not to that of its name")
    return record


def damaged(entry: Entry, problem: str) -> DamagedError:
    """Return the error about a damaged checkpoint, which names the newest complete one."""
    newest = newest_of(entry.path.parent, apart_from=entry.path.name)
    return DamagedError(f"the checkpoint '{entry.path}' is damaged: {problem}; {newest}.")


def newest_of(folder: Path, apart_from: str = "") -> str:
    """Return the end of an error message, which names the newest complete checkpoint in a folder."""
    for entry in reversed(entries_of(folder)):
        try:
            record = _parse_record(entry.path)
        except _UNREADABLE:
            continue
        complete = record["format_version"] == FORMAT_VERSION and not damage_of(entry, record)
        if complete and entry.path.name != apart_from:
            return f"the newest complete one is '{entry.path}' of step {entry.step}"
    return "the folder holds no other complete one" if apart_from else "the folder holds no complete one"


def damage_of(entry: Entry, record: dict[str, Any]) -> str | None:
    """Describe the damage of a checkpoint's tensors file; return ``None`` if it is intact."""
    name = entry.tensors.name
    try:
        if not stat.S_ISREG(entry.tensors.stat().st_mode):  # opening a pipe could block forever
            return f"'{name}' is not a regular file"
        size = entry.tensors.stat().st_size
        if size != record["bytes"]:
            return f"'{name}' has {size} bytes instead of {record['bytes']}"
        if checksum_of(entry.tensors) != record["crc32"]:
            return f"'{name}' has not the checksum that it was written with"
    except FileNotFoundError:
        return f"'{name}' is missing"
    except OSError as error:
        return f"'{name}' cannot be read ({error.strerror or error})"
    return None


def checksum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum
