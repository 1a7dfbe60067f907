"""Records of checkpoints in a folder, and checks for damage."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.model_file.small_files import read_json

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
        raise damaged(entry, f"it belongs to step {record['step']} and was renamed")
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
        if not _is_ordinary(entry.tensors):
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


def _is_ordinary(path: Path) -> bool:
    """Return whether a path is a regular file: opening a pipe could block forever."""
    return stat.S_ISREG(path.stat().st_mode)


def checksum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum
