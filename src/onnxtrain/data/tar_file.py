"""Tar files of examples, as WebDataset has them: ``0001.jpg`` and ``0001.cls`` are one example."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.files import GrowingArray, Reader, check_regular, read_npy
from onnxtrain.data.images import SUFFIXES, Picture, read_pictures
from onnxtrain.errors import DataError
from onnxtrain.model_file.small_files import parse_json
from onnxtrain.spelling import checks_arguments

TAR_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz")

MOST_MEMBER_BYTES: Final = 2**28
"""Larger files of an example are not read: each is in memory as a whole, however small its archive is."""

_TARGETS: Final = (".cls", ".label", ".txt", ".json")


@checks_arguments
@dataclass(frozen=True)
class TarFile(Reader):
    """Examples in one tar file or several (shards), as WebDataset writes them.

    Files whose names are equal up to the first dot of their last part belong to one example: a picture (``.jpg``,
    ``.png`` ...) or an array (``.npy``), and its target: ``.cls`` or ``.label`` with a number or a text, ``.txt`` with
    a text, or ``.json`` with a number, a text, or an object with the key ``label``. Pictures are treated as those of an
    `ImageFolder`. Everything is read once, in the order of the files, and kept: in memory, or from 64 MiB on in a
    temporary file.

    Args:
        path: the file; a pattern such as ``"shards/*.tar"`` for several, taken in the order of their names.
        mean: one number, or one for each channel, that is subtracted from pictures.
        std: one number, or one for each channel, to divide by.
        skip_broken: leave out pictures that cannot be read and log how many, instead of raising an error.
    """

    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    skip_broken: bool = False

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """The examples by the name of the model's input, and the targets or None.

        Raises:
            DataError: a file cannot be read, or an example lacks its input or its target.
        """
        if target is not None:
            raise DataError(f"{self.name} holds examples whose targets are files beside them; leave out target=.")
        if len(specs) != 1:
            raise DataError(f"{self.name} holds one array for each example, but the model has {len(specs)} inputs.")
        import tarfile  # which training without it has no need of

        try:
            return self._read(specs[0], need_target)
        except (tarfile.TarError, EOFError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{self.name} cannot be read as a tar file: {reason}.") from error

    def _read(self, spec: TensorSpec, need_target: bool) -> tuple[dict[str, object], object | None]:
        targets: list[object] = []
        members = self._examples()
        first = next(members, None)
        if first is None:
            raise DataError(f"{self.name} holds no examples; it needs files such as 0001.jpg and 0001.cls.")
        arrays = GrowingArray((0,), np.dtype(np.float32))
        of_arrays = ".npy" in first.parts
        shape: tuple[int, ...] | None = None

        def pictures() -> Iterator[Picture]:
            for example in _chain(first, members):
                if need_target:
                    targets.append(self._target(example))
                suffix = self._picture(example)
                content = example.parts[suffix]
                yield Picture(f"{example.key}{suffix}", _opener(content))

        if not of_arrays:
            self._picture(first)
            values, kept = read_pictures(
                pictures(),
                spec,
                self.name,
                mean=self.mean,
                std=self.std,
                skip_broken=self.skip_broken,
                way_out="write them again, or leave them out: onnxtrain.data.TarFile(path, skip_broken=True)",
            )
            return {spec.name: values}, _joined([targets[index] for index in kept], self.name) if need_target else None
        for example in _chain(first, members):
            array = _array(example, self.name)
            if shape is None:
                shape, arrays = array.shape, GrowingArray(array.shape, array.dtype)
            elif array.shape != shape:
                raise DataError(
                    f"the array of '{example.key}' in {self.name} has shape {array.shape}, but the first one has "
                    f"{shape}."
                )
            arrays.append(array[None])
            if need_target:
                targets.append(self._target(example))
        return {spec.name: arrays.finish()}, _joined(targets, self.name) if need_target else None

    def _examples(self) -> Iterator[_Example]:
        """All examples: files that follow one another under one name."""
        import tarfile

        for path in self._files():
            example: _Example | None = None
            with tarfile.open(path, "r|*") as archive:  # as a stream, so that nothing is sought
                for member in archive:
                    if not member.isfile() or Path(member.name).name.startswith("."):
                        continue
                    folder, _, file = member.name.rpartition("/")
                    stem, dot, rest = file.partition(".")
                    key = f"{folder}/{stem}" if folder else stem
                    if member.size > MOST_MEMBER_BYTES:
                        raise DataError(
                            f"the file '{member.name}' in {self.name} has {member.size:,} bytes; files of an example "
                            f"are read up to {MOST_MEMBER_BYTES // 2**20} MiB: give the data as .npy or .npz files."
                        )
                    opened = archive.extractfile(member)
                    if opened is None:
                        continue
                    if example is None or key != example.key:
                        if example is not None:
                            yield example
                        example = _Example(key, {})
                    example.parts[(dot + rest).lower()] = opened.read()
            if example is not None:
                yield example

    def _files(self) -> list[Path]:
        path = os.fspath(self.path)
        found = [Path(path)] if os.path.exists(path) else [Path(name) for name in sorted(glob.glob(path))]
        if not found:
            raise DataError(f"{self.name} does not exist; give a tar file, or a pattern such as 'shards/*.tar'.")
        for each in found:
            check_regular(each)
        return found

    def _picture(self, example: _Example) -> str:
        """The end of the name of its picture."""
        suffix = next((suffix for suffix in example.parts if suffix in SUFFIXES), None)
        if suffix is None:
            raise DataError(
                f"the example '{example.key}' in {self.name} has no picture ({', '.join(SUFFIXES)}) and no array "
                f"(.npy): it has {', '.join(sorted(example.parts))}."
            )
        return suffix

    def _target(self, example: _Example) -> object:
        """A number or a text.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        suffix = next((suffix for suffix in _TARGETS if suffix in example.parts), None)
        if suffix is None:
            raise DataError(
                f"the example '{example.key}' in {self.name} has no target ({', '.join(_TARGETS)}): it has "
                f"{', '.join(sorted(example.parts))}."
            )
        try:
            text = example.parts[suffix].decode("utf-8").strip()
            found = parse_json(text) if suffix == ".json" else text
            if isinstance(found, dict):
                found = found.get("label")
            if isinstance(found, str) and suffix != ".txt" and found.lstrip("-").isdecimal():
                found = int(found)
        except (ValueError, RecursionError) as error:
            raise DataError(f"'{example.key}{suffix}' in {self.name} cannot be read: {error}.") from error
        if not isinstance(found, int | float | str) or found == "":
            raise DataError(f"'{example.key}{suffix}' in {self.name} holds no number, text, or object with a 'label'.")
        if isinstance(found, int) and not -(2**63) <= found < 2**63:
            raise DataError(f"'{example.key}{suffix}' in {self.name} holds a number that int64 cannot hold.")
        return found


@dataclass(frozen=True)
class _Example:
    """The files of an example by what follows the first dot of their names."""

    key: str
    parts: dict[str, bytes]


def is_tar(path: str | os.PathLike[str]) -> bool:
    """Return whether a path, or a pattern of paths, names tar files, by its ending."""
    return os.fspath(path).lower().endswith(TAR_SUFFIXES)


def _chain(first: _Example, rest: Iterator[_Example]) -> Iterator[_Example]:
    yield first
    yield from rest


def _opener(content: bytes) -> Callable[[], IO[bytes]]:
    return lambda: io.BytesIO(content)


def _array(example: _Example, what: str) -> Array:
    if ".npy" not in example.parts:
        raise DataError(
            f"the example '{example.key}' in {what} has no array (.npy): it has {', '.join(sorted(example.parts))}."
        )
    return read_npy(example.parts[".npy"], f"'{example.key}.npy' in {what}")


def _joined(targets: list[object], what: str) -> Array:
    """Targets as one array: all texts, or all numbers."""
    texts = sum(isinstance(target, str) for target in targets)
    if texts not in (0, len(targets)):
        raise DataError(f"{what} has {texts} targets that are texts and {len(targets) - texts} that are numbers.")
    return np.array(targets)
