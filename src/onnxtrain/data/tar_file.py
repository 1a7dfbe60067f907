"""Tar files in the format of WebDataset: ``0001.jpg`` and ``0001.cls`` are one example."""

from __future__ import annotations

import functools
import glob
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from onnxtrain.data.conversion import Array, Rescaled, TensorSpec
from onnxtrain.data.files import GrowingArray, check_regular, read_npy
from onnxtrain.data.images import SUFFIXES, ImageReader, ImageSource
from onnxtrain.errors import DataError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.small_files import parse_json

TAR_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz")

MOST_MEMBER_BYTES: Final = 2**28
"""Larger files of an example are refused: each is read into memory, however small its archive is."""

_TARGETS: Final = (".cls", ".label", ".txt", ".json")


@checks_arguments
@dataclass(frozen=True)
class TarFile(ImageReader):
    """Examples in one tar file or several (shards), in the format of WebDataset.

    Files whose paths are equal up to the first dot of the file name belong to one example: an image (``.jpg``, ``.png``
    ...) or an array (``.npy``), and its target: ``.cls`` or ``.label`` with a number or a label, ``.txt`` with a label,
    or ``.json`` with a number, a label, or an object with the key ``label``. Images are read as in an `ImageFolder`.
    Everything is read once, in the order of the files, and kept: in memory, or from 64 MiB on in a temporary file.

    Args:
        path: The file; a pattern such as ``"shards/*.tar"`` for several, read in the order of their names.
        mean: Number, or one per channel, that is subtracted from images.
        std: Divisor, or one per channel.
        skip_broken: Skip images that cannot be read and log their number, instead of raising an error.
        orient: Rotate images by their EXIF tag; by default as in the model's training, else yes.
    """

    @classmethod
    def reads(cls, path: str | os.PathLike[str]) -> bool:
        """Return whether a path or a pattern has the suffix of tar files."""
        return os.fspath(path).lower().endswith(TAR_SUFFIXES)

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return the examples by the name of the model's input, and the targets or None.

        Raises:
            DataError: A file cannot be read, or an example lacks its input or its target.
        """
        if target is not None:
            raise DataError(f"{self.name} holds examples whose targets are in files of their own; leave out target=.")
        if len(specs) != 1:
            raise DataError(
                f"{self.name} holds one array per example, but the model has {len(specs)} inputs; it needs one."
            )
        import tarfile  # imported for tar files only

        try:
            return self._read(specs[0], need_target)
        except (tarfile.TarError, EOFError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{self.name} cannot be read as a tar file: {reason}.") from error

    def _read(self, spec: TensorSpec, need_target: bool) -> tuple[dict[str, object], object | None]:
        members = self._examples()
        first = next(members, None)
        if first is None:
            raise DataError(f"{self.name} holds no examples; it needs files such as 0001.jpg and 0001.cls.")
        targets: list[object] = []
        names: list[str] = []

        def parts(suffix_of: Callable[[_Example], str]) -> Iterator[tuple[str, bytes]]:
            for example in itertools.chain([first], members):
                if need_target:
                    targets.append(self._target(example))
                suffix = suffix_of(example)
                names.append(f"{example.key}{suffix}")
                yield names[-1], example.parts[suffix]

        values: Array | Rescaled
        if ".npy" in first.parts:
            values = self._stacked(parts(self._array_suffix))
            kept = [*range(len(names))]
        else:
            self._image_suffix(first)
            images = (
                ImageSource(name, functools.partial(io.BytesIO, part)) for name, part in parts(self._image_suffix)
            )
            advice = "write them again, or skip them: onnxtrain.data.TarFile(path, skip_broken=True)"
            values, kept = self.read_images(images, spec, advice)
        self.examples_read[:] = [names[index] for index in kept]
        return {spec.name: values}, _joined([targets[index] for index in kept], self.name) if need_target else None

    def _stacked(self, parts: Iterable[tuple[str, bytes]]) -> Array:
        arrays: GrowingArray | None = None
        shape: tuple[int, ...] = ()
        for name, part in parts:
            array = read_npy(part, f"'{name}' in {self.name}")
            if arrays is None:
                shape, arrays = array.shape, GrowingArray(array.shape, array.dtype)
            elif array.shape != shape:
                raise DataError(
                    f"the array of '{name.removesuffix('.npy')}' in {self.name} has shape {array.shape}, but the first "
                    f"one has {shape}."
                )
            arrays.append(array[None])
        assert arrays is not None
        return arrays.finish()

    def _examples(self) -> Iterator[_Example]:
        """Yield the examples: adjacent files of one name."""
        import tarfile

        for path in self._files():
            example: _Example | None = None
            with tarfile.open(path, "r|*") as archive:  # read as a stream, without seeking
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
                        ).about(member.name, got=member.size, wanted=MOST_MEMBER_BYTES)
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
            raise DataError(f"{self.name} does not exist; give a tar file, or a pattern such as 'shards/*.tar'.").about(
                self.name
            )
        for each in found:
            check_regular(each)
        return found

    def _image_suffix(self, example: _Example) -> str:
        suffix = next((suffix for suffix in example.parts if suffix in SUFFIXES), None)
        if suffix is None:
            raise DataError(
                f"the example '{example.key}' in {self.name} has no image ({', '.join(SUFFIXES)}) and no array "
                f"(.npy): it has {', '.join(sorted(example.parts))}."
            )
        return suffix

    def _array_suffix(self, example: _Example) -> str:
        if ".npy" not in example.parts:
            raise DataError(
                f"the example '{example.key}' in {self.name} has no array (.npy): it has "
                f"{', '.join(sorted(example.parts))}."
            )
        return ".npy"

    def _target(self, example: _Example) -> object:
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
            raise DataError(
                f"'{example.key}{suffix}' in {self.name} is not a number, a string, or an object with a 'label'."
            )
        if isinstance(found, int) and not -(2**63) <= found < 2**63:
            raise DataError(f"'{example.key}{suffix}' in {self.name} is too large for int64.")
        return found


@dataclass(frozen=True)
class _Example:
    """The contents of an example's files, by suffix from the first dot of their names."""

    key: str
    parts: dict[str, bytes]


def _joined(targets: list[object], subject: str) -> Array:
    """Combine targets, all strings or all numbers, into one array."""
    texts = sum(isinstance(target, str) for target in targets)
    if texts not in (0, len(targets)):
        raise DataError(
            f"{subject} has {texts} targets that are strings and {len(targets) - texts} that are numbers; use one type."
        )
    return np.array(targets)
