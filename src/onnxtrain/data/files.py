"""Array files, memory-mapped (``.npz``, ``.npy``, ``.safetensors``), and the base of readers of other formats."""

from __future__ import annotations

import functools
import io
import logging
import os
import shutil
import stat
import struct
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Final, Self

import ml_dtypes
import numpy as np
from numpy.lib import format as npy_format

from onnxtrain.data.conversion import Array, DeferredArray, TensorSpec, check_possible
from onnxtrain.errors import DataError
from onnxtrain.model_file.small_files import check_regular_file, parse_json

SAFETENSORS_SUFFIX: Final = ".safetensors"

_TYPES: Final[dict[str, Any]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "BF16": ml_dtypes.bfloat16,
}


def map_safetensors(path: Path, *, may_be_empty: bool = False) -> dict[str, Array]:
    """Map the arrays of a safetensors file, read-only, by name."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular_file(path)
        with safe_open(path, "np"):  # it checks lengths, offsets and overlaps
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
        raise DataError(f"'{path}' cannot be read as a safetensors file: {reason}.").about(
            str(path), got=reason
        ) from error
    header.pop("__metadata__", None)
    if not header and not may_be_empty:
        raise DataError(f"'{path}' holds no arrays.")
    found = {}
    for name, entry in header.items():
        stored = entry["dtype"]
        if stored not in _TYPES:
            raise DataError(f"'{name}' in '{path}' has the type {stored}, which data cannot have; convert it.")
        dtype, shape = np.dtype(_TYPES[stored]), tuple(entry["shape"])
        check_possible(shape, dtype, f"'{name}' in '{path}'")
        offset = 8 + length + entry["data_offsets"][0]
        found[name] = np.memmap(path, dtype, "r", offset, shape) if 0 not in shape else np.empty(shape, dtype)
    return found


_logger = logging.getLogger(__name__)

_NPY_MAGIC: Final = b"\x93NUMPY"
_ZIP_MAGICS: Final = (b"PK\x03\x04", b"PK\x05\x06")
_ZIP_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
# Total size of compressed arrays that are read into memory; others are extracted to a temporary file and mapped.
_READ_WHOLE_BYTES: Final = 64 * 2**20


def read_arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Open and decompress the arrays of a file or folder; see `open_arrays`."""
    return {name: np.asanyarray(array) for name, array in open_arrays(path).items()}


def open_arrays(path: str | os.PathLike[str]) -> dict[str, Array | DeferredArray]:
    """Open the arrays of a ``.npz``, ``.npy``, ``.safetensors`` file or ``.npy`` folder, mapped where possible."""
    path = Path(path)
    try:
        if path.is_dir():
            return {**_read_folder(path)}
        check_regular(path)
        if path.suffix.lower() == SAFETENSORS_SUFFIX:
            return {**map_safetensors(path)}
        with path.open("rb") as file:
            start = file.read(len(_NPY_MAGIC))  # the content decides, not the name
            file.seek(0, os.SEEK_END)
            size = file.tell()
            if start == _NPY_MAGIC:
                return {path.stem: _map_npy(file, 0, size, f"'{path}'")}
            if start.startswith(_ZIP_MAGICS):
                return _read_npz(file, path)
    except FileNotFoundError as error:
        raise DataError(
            f"'{path}' does not exist; give a .npz, .npy or .csv file, or a folder of .npy files or images."
        ) from error
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    found = f"starts with {start!r}" if size else "is empty"
    need = "write one with numpy.savez"
    if path.suffix.lower() == ".json":
        need = "write texts to a .jsonl file, a row per line, and arrays with numpy.savez"
    raise DataError(f"'{path}' {found}, so it is neither a .npz nor a .npy file, and not named .csv; {need}.")


def check_regular(path: Path) -> None:
    """Refuse pipes, devices and sockets: opening may block, and reading may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError(f"'{path}' is a pipe, a device or a folder, not a regular file; write arrays to a file.").about(
            str(path)
        )


def _read_folder(folder: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    # An array name may contain a slash ("encoder/tokens"): it is a file in a subfolder.
    for path in sorted(folder.rglob("*.npy")):
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            name = path.relative_to(folder).with_suffix("").as_posix()
            arrays[name] = _map_npy(file, 0, size, f"'{path}'")
    if not arrays:
        raise DataError(
            f"the folder '{folder}' holds no .npy file; it needs one file per array, named like it, or one folder of "
            "images per class."
        )
    return arrays


def _extract(path: Path, member: zipfile.ZipInfo, subject: str) -> Array:
    """Decompress an array of a ``.npz`` file to a temporary file and map it."""
    size, folder = member.file_size, tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(
            f"{subject} is compressed and needs {size / 1e9:.1f} GB in '{folder}', where {free / 1e9:.1f} GB are free; "
            "write it with numpy.savez, which does not compress, or set TMPDIR to a larger disk."
        ).about(subject, got=free, wanted=size)
    _logger.warning(
        "%s is compressed: %.1f GB are extracted to a temporary file; numpy.savez does not compress.",
        subject,
        size / 1e9,
    )
    try:
        # The file has no name, so that it disappears however the process ends.
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(member) as packed,
            tempfile.TemporaryFile() as extracted,
        ):
            shutil.copyfileobj(packed, extracted, 2**20)
            extracted.flush()
            return _map_npy(extracted, 0, extracted.tell(), subject)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{subject} cannot be extracted: {error.strerror or error}.") from error
    except Exception as error:  # as when the file was opened
        raise _damaged(f"'{path}'", error) from error


def _read_npz(file: IO[bytes], path: Path) -> dict[str, Array | DeferredArray]:
    arrays: dict[str, Array | DeferredArray] = {}
    subject, in_memory = f"'{path}'", 0
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                name, _, suffix = member.filename.rpartition(".")
                if suffix != "npy":
                    continue
                whose = f"array '{name}' in {subject}"
                if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
                    start = _data_offset(file, member)
                    arrays[name] = _map_npy(file, start, start + member.file_size, whose)
                    continue
                with archive.open(member) as packed:
                    if in_memory + member.file_size <= _READ_WHOLE_BYTES:
                        in_memory += member.file_size
                        arrays[name] = read_npy(packed.read(), whose)
                        continue
                    shape, _, dtype = _read_header(packed, 0, whose)
                    _check_length(member.file_size - packed.tell(), shape, dtype, whose)
                    arrays[name] = DeferredArray(shape, dtype, functools.partial(_extract, path, member, whose))
    except (DataError, OSError):
        raise
    except Exception as error:  # zipfile and zlib raise undocumented errors for damaged files
        raise _damaged(subject, error) from error
    if not arrays:
        raise DataError(f"{subject} holds no arrays; write them with numpy.savez, each under its input's name.")
    return arrays


def _damaged(subject: str, error: Exception) -> DataError:
    return DataError(f"{subject} is truncated, damaged or not a .npz file ({_reason(error)}); write it again.")


def _data_offset(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Return the offset of a member's bytes, which follow the local header and its two fields of variable length."""
    file.seek(member.header_offset)
    header = file.read(_ZIP_LOCAL_HEADER.size)
    if len(header) < _ZIP_LOCAL_HEADER.size or header[:4] != _ZIP_MAGICS[0]:
        raise zipfile.BadZipFile(f"the header of {member.filename} is not where it should be")
    _, name_length, extra_length = _ZIP_LOCAL_HEADER.unpack(header)
    return int(member.header_offset + _ZIP_LOCAL_HEADER.size + name_length + extra_length)


def read_npy(content: bytes, subject: str) -> Array:
    """Read the array in the bytes of a ``.npy`` file."""
    file = io.BytesIO(content)
    shape, fortran_order, dtype = _read_header(file, 0, subject)
    data = file.read()
    _check_length(len(data), shape, dtype, subject)
    return np.ndarray(shape, dtype, data, order="F" if fortran_order else "C")


def _map_npy(file: IO[bytes], start: int, end: int, subject: str) -> Array:
    shape, fortran_order, dtype = _read_header(file, start, subject)
    offset = file.tell()
    _check_length(end - offset, shape, dtype, subject)
    if 0 in shape:
        return np.empty(shape, dtype)  # no bytes to map
    return np.memmap(file, dtype, "r", offset, shape, "F" if fortran_order else "C")


def _read_header(file: Any, start: int, subject: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file.seek(start)
    try:
        version = npy_format.read_magic(file)
        # Version 3 differs in the encoding of field names only, and fields are refused below.
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran_order, dtype = read(file)
    except OSError:
        raise
    except Exception as error:  # the header is parsed as Python, which raises many kinds of errors
        raise DataError(f"{subject} is truncated or not in .npy format ({_reason(error)}); write it again.") from error
    if dtype.hasobject:
        raise DataError(
            f"{subject} holds Python objects, which only pickle can read and which could run code: "
            f"save it as numbers (array.astype)."
        ).about(subject)
    if dtype.fields is not None:
        raise DataError(f"{subject} is a structured array with fields {dtype.names}; save each field as its own array.")
    return tuple(map(int, shape)), fortran_order, dtype  # True is an integer, too


def _check_length(available: int, shape: tuple[int, ...], dtype: np.dtype[Any], subject: str) -> None:
    # dtype=object: Python integers, which a corrupted header cannot overflow.
    needed = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if available < needed or any(size < 0 for size in shape):
        raise DataError(
            f"{subject} is truncated: shape {shape} of {dtype} needs {needed} bytes, {available} are there; "
            f"write it again."
        )
    check_possible(shape, dtype, subject)


def _reason(error: Exception) -> str:
    """Return the message of an error in one short line; NumPy's messages quote the whole header."""
    return " ".join(str(error).split())[:100]


@dataclass(frozen=True)
class Reader(ABC):
    """A file or folder of examples."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Ends, in lower case, of the paths that the reader opens; it takes no other arguments for them."""

    called: ClassVar[str] = ""
    """The kind of path, before its name in error messages."""

    path: str | os.PathLike[str]

    @classmethod
    def reads(cls, path: str | os.PathLike[str]) -> bool:
        """Return whether a path without further settings is read by this class."""
        return Path(path).suffix.lower() in cls.suffixes

    @property
    def name(self) -> str:
        """Name of the file or folder in error messages."""
        return f"{self.called}'{Path(self.path)}'"

    @abstractmethod
    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return all examples: the inputs of a model by name, and the targets, which ``target`` names, or None."""


MEMORY_BYTES: Final = 64 * 2**20
"""Size from which an array is moved to a temporary file."""

# Rows that are converted at a time.
_ROWS: Final = 2**17


class GrowingArray:
    """An array that grows block by block: in memory while it is small, then in an unnamed temporary file."""

    def __init__(self, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._row_shape, self.dtype = row_shape, dtype
        self._blocks: list[Array] = []
        self._bytes = self._rows = 0
        self._file: IO[bytes] | None = None

    @classmethod
    def of(cls, array: Array, dtype: np.dtype[Any], change: Callable[[Array], Array] | None = None) -> Self:
        """Convert the rows of an array, block by block."""
        result = cls(array.shape[1:], dtype)
        for start in range(0, len(array), _ROWS):
            block = array[start : start + _ROWS]
            result.append(block if change is None else change(block))
        return result

    def append(self, block: Array) -> None:
        """Add rows at the end."""
        block = np.ascontiguousarray(block, self.dtype)
        self._rows += len(block)
        self._bytes += block.nbytes
        self._blocks.append(block)
        if self._bytes > MEMORY_BYTES and self.dtype.kind not in "OT":  # strings are stored outside the array
            import tempfile  # a slow import, for large arrays only

            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - the array keeps it open
            for each in self._blocks:
                self._file.write(each.reshape(-1).view(np.uint8).data)
            self._blocks = []

    def finish(self) -> Array:
        """Return all rows."""
        shape = (self._rows, *self._row_shape)
        if self._file is None:
            return np.concatenate([np.empty((0, *self._row_shape), self.dtype), *self._blocks])
        self._file.flush()
        with self._file:
            return np.memmap(self._file, self.dtype, "r", 0, shape)


class GrowingTexts:
    """A growing array of strings that stores each distinct string once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._found = GrowingArray((), np.dtype(np.int32))

    def append(self, block: Iterable[str]) -> None:
        """Add strings at the end."""
        self._found.append(np.array([self._numbers.setdefault(text, len(self._numbers)) for text in block], np.int32))

    @property
    def distinct(self) -> Iterable[str]:
        """The different strings."""
        return self._numbers

    def finish(self) -> Array:
        """Return all strings."""
        texts = np.array(list(self._numbers), str)
        return GrowingArray.of(self._found.finish(), texts.dtype, texts.__getitem__).finish()
