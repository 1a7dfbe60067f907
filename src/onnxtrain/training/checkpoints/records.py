"""What lies in a folder of checkpoints: their records, and whether they are whole."""

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
# Deeply nested brackets are no JSON of ours, but the parser gives up on them in a way of its own.
_UNREADABLE: Final = (OSError, ValueError, RecursionError)


@dataclass(frozen=True)
class Entry:
    """One checkpoint, as its file name tells."""

    path: Path
    sequence: int
    step: int

    @property
    def tensors(self) -> Path:
        """The file of its arrays."""
        return self.path.with_suffix(".safetensors")


class DamagedError(CheckpointError):
    """Files of a checkpoint are not what was written; another one may be."""


def entries_of(folder: Path) -> list[Entry]:
    """All checkpoints of a folder, in the order in which they were written."""
    entries = []
    for path in folder.glob("checkpoint-*.json"):
        match = STEM.fullmatch(path.stem)
        if match:
            entries.append(Entry(path, int(match["sequence"]), int(match["step"])))
    return sorted(entries, key=lambda entry: entry.sequence)


def to_json(record: dict[str, Any]) -> str:
    """The text of a record, with plain numbers for NumPy's.

    Raises:
        CheckpointError: Something in it is no JSON.
    """

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
                "it has no checksum, which an earlier onnxtrain did not write: finish the training with that"
            )
        if record["checksum"] != record_checksum(record):
            raise ValueError("it has another checksum than when it was written")
    return record


def record_checksum(record: Mapping[str, Any]) -> str:
    """A hash of what the JSON says, apart from size and checksum of the tensors' file, which that file confirms."""
    content = {key: value for key, value in record.items() if key not in ("bytes", "crc32", "checksum")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_record(entry: Entry) -> dict[str, Any]:
    """What the JSON of a checkpoint says.

    Raises:
        CheckpointError: It is damaged, or of another version of the format.
    """
    try:
        record = _parse_record(entry.path)
    except _UNREADABLE as error:
        raise damaged(entry, f"its JSON cannot be read ({error})") from error
    if record["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"'{entry.path}' has format version {record['format_version']}, this onnxtrain reads version "
            f"{FORMAT_VERSION}; use the onnxtrain that wrote it."
        )
    if record["step"] != entry.step:
        raise damaged(entry, f"it is that of step {record['step']}, under another name")
    return record


def damaged(entry: Entry, problem: str) -> DamagedError:
    """The error that says what is wrong with a checkpoint, and which one is whole."""
    newest = newest_of(entry.path.parent, apart_from=entry.path.name)
    return DamagedError(f"the checkpoint '{entry.path}' is damaged: {problem}; {newest}.")


def newest_of(folder: Path, apart_from: str = "") -> str:
    """How an error message ends: with the newest checkpoint of a folder that is complete."""
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
    """What is wrong with the tensors' file; None if nothing."""
    name = entry.tensors.name
    try:
        if not _is_ordinary(entry.tensors):
            return f"'{name}' is no ordinary file"
        size = entry.tensors.stat().st_size
        if size != record["bytes"]:
            return f"'{name}' has {size} bytes instead of {record['bytes']}"
        if checksum_of(entry.tensors) != record["crc32"]:
            return f"'{name}' has another checksum than when it was written"
    except FileNotFoundError:
        return f"'{name}' is missing"
    except OSError as error:
        return f"'{name}' cannot be read ({error.strerror or error})"
    return None


def _is_ordinary(path: Path) -> bool:
    """Whether a file may be opened: a pipe waits for its writer, perhaps for ever."""
    return stat.S_ISREG(path.stat().st_mode)


def checksum_of(path: Path) -> int:
    """The CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum
