"""Base of readers of images whose targets depend on the loss, and class maps as such targets."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self

import numpy as np

from onnxtrain.data.conversion import Array, Rescaled, TensorSpec, kind_of
from onnxtrain.data.files import GrowingArray, check_regular
from onnxtrain.data.images import ImageReader, ImageSource, Layout, check_image
from onnxtrain.errors import DataError
from onnxtrain.graph.value import dimensions
from onnxtrain.losses.heads import LossHead

IGNORED: Final = 255
"""Class of pixels that the loss leaves out, in a map of bytes."""

_ORIENTATION: Final = 0x0112
_TURNED: Final = (5, 6, 7, 8)


@dataclass(frozen=True)
class LabelledImages(ImageReader):
    """Images with targets in the form of a loss."""

    head: LossHead | None = field(default=None, init=False, repr=False, compare=False)

    def for_head(self, head: LossHead | None) -> Self:
        """Return the same images with targets for an output of the model and its loss."""
        found = copy.copy(self)  # which shares the list of examples
        object.__setattr__(found, "head", head)
        return found

    def turns(self, spec: TensorSpec) -> bool:
        """Return whether images are rotated by their EXIF tag."""
        return self.orient if self.orient is not None else spec.pixels is None or spec.pixels.orient

    def read_sources(
        self, sources: Sequence[ImageSource], specs: Sequence[TensorSpec]
    ) -> tuple[dict[str, object], list[int]]:
        """Return the images by the name of the only input, and the indices of those that can be read."""
        self.layout(specs)
        advice = f"correct or remove them, or skip them: onnxtrain.images.{type(self).__name__}(path, skip_broken=True)"
        pixels: Array | Rescaled
        pixels, kept = self.read_images(sources, specs[0], advice)
        self.examples_read[:] = [sources[index].name for index in kept]
        return {specs[0].name: pixels}, kept

    def layout(self, specs: Sequence[TensorSpec]) -> Layout:
        """Return the layout of the only input, before errors about files."""
        if len(specs) != 1:
            raise DataError(f"{self.name} holds images, but the model has {len(specs)} inputs; it needs one.")
        return Layout.of(specs[0], self.name)


def shown_size(image: Any, *, turned: bool) -> tuple[int, int]:
    """Return width and height of a Pillow image, rotated by its EXIF tag if asked for, without decoding it."""
    swapped = turned and image.getexif().get(_ORIENTATION) in _TURNED
    return (image.height, image.width) if swapped else (image.width, image.height)


def checked_file(
    path: Path, check: Callable[[Path, tuple[int, int]], None], *, turned: bool
) -> Callable[[], IO[bytes]]:
    """Return a function that opens a file of an image after a check of its width and height."""

    def opened() -> IO[bytes]:
        from PIL import Image

        check_regular(path)
        content = BytesIO(path.read_bytes())
        with Image.open(content) as image:
            check(path, shown_size(image, turned=turned))
        content.seek(0)
        return content

    return opened


def part_of(
    path: Path,
    box: tuple[int, int, int, int],
    check: Callable[[Path, tuple[int, int]], None],
    *,
    turned: bool,
) -> Callable[[], IO[bytes]]:
    """Return a function that opens a part of a checked image: left, top, right and bottom in pixels."""

    def opened() -> IO[bytes]:
        from PIL import Image, ImageOps

        check_regular(path)
        with Image.open(path) as image:
            check_image(image, f"'{path}'")
            check(path, shown_size(image, turned=turned))
            if turned:
                ImageOps.exif_transpose(image, in_place=True)
            content = BytesIO()
            image.convert("RGB").crop(box).save(content, "BMP")
        content.seek(0)
        return content

    return opened


class PixelTargets(NamedTuple):
    """Form of the targets of each pixel: labels, or values with an axis of channels or without."""

    head: LossHead
    channels: int
    axis: int | None
    size: tuple[int, int] | None

    @classmethod
    def of(cls, head: LossHead, layout: Layout, whose: str) -> PixelTargets:
        """Return the form of an output with a value per pixel."""
        shape = dimensions(head.prediction) or ()
        axis = None if len(shape) == 3 else 3 if layout.axis == 2 else 1
        pixels = [size for index, size in enumerate(shape) if index not in (0, axis)]
        if len(shape) not in (3, 4) or head.spec.shape is None or len(head.spec.shape) < 3:
            shown = ", ".join("any" if size is None else str(size) for size in shape)
            raise DataError(
                f"{whose}, but the loss {head.loss.name} on the output {head.name!r} ({shown}) reads no value per "
                "pixel; it needs an output (batch, classes, height, width)."
            ).about(head.name)
        height, width = pixels
        given = (height, width) if isinstance(height, int) and isinstance(width, int) else layout.size
        found = 1 if axis is None else shape[axis]
        classes = found if isinstance(found, int) else head.classes
        if classes is None:
            raise DataError(f"{whose}, but the output {head.name!r} does not say how many classes it has.")
        return cls(head, classes, axis, given)

    def of_labels(self, labels: Array, holder: Callable[[int], str]) -> Array:
        """Convert maps of classes [N, H, W] of bytes, in which 255 is ignored, to the targets of the loss.

        Raises:
            DataError: The loss cannot ignore pixels, or a label is not one of its classes.
        """
        values = kind_of(self.head.spec.dtype) == "float" or self.channels == 1
        limit = max(self.channels, 2)
        ignores = False
        for index, own in enumerate(labels):
            present = np.flatnonzero(np.bincount(own.reshape(-1), minlength=256))
            some, most = IGNORED in present, max((int(label) for label in present if label != IGNORED), default=0)
            if some and values:
                raise DataError(
                    f"'{holder(index)}' has pixels to ignore (255), which the loss {self.head.loss.name} on "
                    f"{self.head.name!r} cannot leave out; use cross_entropy on an output with a channel per class."
                ).about(holder(index))
            if most >= limit:
                raise DataError(
                    f"'{holder(index)}' has the label {most}, but the output {self.head.name!r} has {limit} classes, "
                    f"0 to {limit - 1}."
                ).about(holder(index), got=most, wanted=limit)
            ignores |= some
        if values:
            numbers = np.arange(self.channels, dtype=np.uint8) if self.channels > 1 else np.ones(1, np.uint8)

            def of_channels(block: Array) -> Array:
                if self.axis is None:
                    return np.equal(block, 1)
                found = block[:, None] == numbers[:, None, None] if self.axis == 1 else block[..., None] == numbers
                return np.asarray(found)

            return _converted(labels, np.dtype(bool), of_channels(labels[:1]).shape[1:], of_channels)
        if not ignores:
            return labels
        given = getattr(self.head.declared, "ignore_index", None)
        ignored = np.int64(-100 if given is None else given)
        kind = np.dtype(np.int16 if abs(ignored) < 2**15 else np.int64)
        return _converted(labels, kind, labels.shape[1:], lambda block: np.where(block == IGNORED, ignored, block))


_BLOCK: Final = 16
"""Images that are converted at a time."""


def _converted(labels: Array, dtype: np.dtype[Any], rows: tuple[int, ...], change: Callable[[Array], Array]) -> Array:
    found = GrowingArray(rows, dtype)
    for start in range(0, len(labels), _BLOCK):
        found.append(change(labels[start : start + _BLOCK]))
    return found.finish()


def default_folder(path: str | os.PathLike[str], file_name: str) -> Path:
    """Return the folder of images of a file: where it lies, or ``images`` there."""
    beside = Path(path).parent
    inside = beside / "images"
    return inside if not (beside / file_name).exists() and (inside / file_name).exists() else beside
