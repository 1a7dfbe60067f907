"""Folders of pictures by class: ``folder/class/*.png``; the name of a folder is the target of what is in it."""

from __future__ import annotations

import logging
import os
import types
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxtrain.errors import DataError, OptionError
from onnxtrain.training.data.conversion import Array, TensorSpec, kind_of
from onnxtrain.training.data.growing import GrowingArray
from onnxtrain.training.data.rescaled import Rescaled

_logger = logging.getLogger(__name__)

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageFolder:
    """Pictures in one folder for each class, which the folder's name names.

    Size, channels and layout are those of the model's input: [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, or
    [N, H, W] for grey. A picture of another size is stretched to it (bilinear), turned as its EXIF tag says, and
    converted to grey or RGB; of a GIF or TIFF the first frame is taken. Where the model leaves the size open, all must
    have the same. A model of floats gets (pixel / 255 - mean) / std, one of integers gets pixels from 0 to 255.

    All pictures are read once, and kept as bytes: in memory, or from 64 MiB on in a temporary file. Examples are in the
    order of their paths.

    Args:
        path: the folder.
        mean: one number, or one for each channel, that is subtracted.
        std: one number, or one for each channel, to divide by.
        skip_broken: leave out pictures that cannot be read and log how many, instead of raising an error.
    """

    path: str | os.PathLike[str]
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    skip_broken: bool = False

    @property
    def name(self) -> str:
        """How error messages call it."""
        return f"the folder '{Path(self.path)}'"

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """The pictures by the name of the model's input, and the names of their classes or None.

        Where no targets are needed, pictures may lie in the folder itself.

        Raises:
            DataError: the folder holds no pictures, some cannot be read, or the model's input is not one for pictures.
        """
        if target is not None:
            raise DataError(
                f"{self.name} holds pictures, whose targets are the names of their folders; leave out target=."
            )
        if len(specs) != 1:
            raise DataError(f"{self.name} holds pictures, but the model has {len(specs)} inputs; it needs one.")
        files = self._files(need_target)
        layout = _Layout.of(specs[0], self.name)
        mean, std = (self._channels(name, layout.channels, specs[0]) for name in ("mean", "std"))
        pixels, read = self._read_pixels(files, layout)
        folder = Path(self.path)
        classes = np.array([file.relative_to(folder).parts[0] for file in read]) if need_target else None
        if kind_of(specs[0].dtype) != "float":
            return {specs[0].name: pixels}, classes
        std = np.ones(1) if std is None else std
        shift = np.zeros(1) if mean is None else -mean / std
        return {specs[0].name: Rescaled(pixels, layout.aligned(1 / (255 * std)), layout.aligned(shift))}, classes

    def _files(self, need_target: bool) -> list[Path]:
        """All pictures, in the order of their paths."""
        folder = Path(self.path)
        if not folder.is_dir():
            raise DataError(f"'{folder}' is not a folder; pictures lie in one folder for each class.")
        loose = pictures(folder.iterdir())
        if not need_target:
            found = pictures(folder.rglob("*"))
            if not found:
                raise DataError(f"{self.name} holds no pictures ({', '.join(SUFFIXES)}).")
            return found
        if loose:
            raise DataError(
                f"{self.name} holds pictures itself, such as '{loose[0].name}'; for training they need to lie in one "
                "folder for each class."
            )
        found = []
        for each in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            inside = pictures(each.rglob("*"))
            if not inside:
                raise DataError(
                    f"the folder '{each}' holds no pictures ({', '.join(SUFFIXES)}); fill it, or remove it if it is no "
                    "class."
                )
            found += inside
        if not found:
            raise DataError(f"{self.name} is empty; it needs one folder of pictures for each class.")
        return found

    def _channels(self, name: str, channels: int, spec: TensorSpec) -> Array | None:
        """``mean`` or ``std`` as an array of 1 or ``channels`` numbers."""
        given = getattr(self, name)
        if given is None:
            return None
        if kind_of(spec.dtype) != "float":
            raise OptionError(f"{name} is {given}, but the input '{spec.name}' takes {spec.dtype}; leave it out.")
        values = np.atleast_1d(np.asarray(given, np.float64))
        if values.ndim != 1 or len(values) not in (1, channels) or not np.isfinite(values).all():
            raise OptionError(f"{name} is {given}; it needs one number, or one for each of {channels} channels.")
        if name == "std" and not (values > 0).all():
            raise OptionError(f"std is {given}; it needs numbers greater than 0.")
        return values

    def _read_pixels(self, files: list[Path], layout: _Layout) -> tuple[Array, list[Path]]:
        """Pictures as bytes in the model's layout, and the files that they are from."""
        pillow = _pillow()
        size, array = layout.size, None
        read: list[Path] = []
        broken: list[Path] = []
        for file in files:
            try:
                pixels = _pixels(pillow, file, layout.channels, size)
            except DataError:
                raise
            except Exception as error:  # a damaged picture breaks Pillow in more ways than it documents
                _logger.debug("'%s' cannot be read: %s", file, error)
                broken.append(file)
                continue
            if array is None:
                size_of_first = pixels.shape[:2]
                array = GrowingArray(layout.arranged(pixels).shape, np.dtype(np.uint8))
            elif pixels.shape[:2] != size_of_first:
                raise DataError(
                    f"'{file}' has {_size(pixels.shape)} pixels, but '{read[0]}' has {_size(size_of_first)}, "
                    "and the model's input leaves the size open; give all pictures one size."
                )
            array.append(layout.arranged(pixels)[None])
            read.append(file)
        if broken:
            self._report(broken, len(files))
        assert array is not None
        return array.finish(), read

    def _report(self, broken: list[Path], of: int) -> None:
        names = ", ".join(f"'{file}'" for file in broken[:8]) + (", ..." if len(broken) > 8 else "")
        if not self.skip_broken or len(broken) == of:
            raise DataError(
                f"{len(broken)} of {of} pictures cannot be read: {names}; correct or remove them, or leave them out: "
                "onnxtrain.data.ImageFolder(path, skip_broken=True)."
            )
        _logger.warning("%d of %d pictures cannot be read and are left out: %s.", len(broken), of, names)


def pictures(paths: Iterable[Path]) -> list[Path]:
    """The pictures among paths, as their names tell, sorted; hidden files are none."""
    return sorted(
        path for path in paths if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def is_image_folder(path: Path) -> bool:
    """Whether a path is a folder that holds pictures, itself or in its folders, and no arrays."""
    if not path.is_dir() or next(path.rglob("*.npy"), None) is not None:
        return False
    return any(file.suffix.lower() in SUFFIXES for file in path.rglob("*"))


@dataclass(frozen=True)
class _Layout:
    """What the model's input makes of a picture.

    Attributes:
        channels: 1 or 3.
        axis: where the channels are in an example: 0, 2, or None for a grey picture without such an axis.
        size: height and width; None where the model leaves them open.
    """

    channels: int
    axis: int | None
    size: tuple[int, int] | None

    @classmethod
    def of(cls, spec: TensorSpec, what: str) -> _Layout:
        """The layout that an input has.

        Raises:
            DataError: it is not one for pictures.
        """
        shape = spec.shape or ()
        axis: int | None = None
        if len(shape) == 4 and (shape[1] in (1, 3) or shape[3] in (1, 3)):
            axis = 0 if shape[1] in (1, 3) else 2
        elif len(shape) != 3 or kind_of(spec.dtype) not in ("float", "integer"):
            raise DataError(
                f"{what} holds pictures, but the input '{spec.name}' is {spec.dtype} {spec.describe_shape()}; it needs "
                "(batch, channels, height, width), (batch, height, width, channels) with 1 or 3 channels, or "
                "(batch, height, width)."
            )
        sides = list(shape[1:])
        channels = 1 if axis is None else sides.pop(axis)
        height, width = sides
        assert isinstance(channels, int)
        return cls(channels, axis, (height, width) if isinstance(height, int) and isinstance(width, int) else None)

    def arranged(self, pixels: Array) -> Array:
        """A picture [H, W, C] in this layout."""
        if self.axis is None:
            return pixels[..., 0]
        return pixels.transpose(2, 0, 1) if self.axis == 0 else pixels

    def aligned(self, values: Array) -> Array:
        """Numbers for the channels, so that they broadcast with pictures."""
        return values.reshape(-1, 1, 1) if self.axis == 0 else values


def _pixels(pillow: types.ModuleType, file: Path, channels: int, size: tuple[int, int] | None) -> Array:
    """A picture as bytes [H, W, C].

    Raises:
        DataError: it has more than 8 bits for each channel.
    """
    from PIL import ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged tags, of very many pixels: what cannot be read raises an error
        with pillow.open(file) as opened:
            if opened.mode.startswith(("I", "F")):
                raise DataError(f"'{file}' has more than 8 bits for each pixel (mode {opened.mode}); save it with 8.")
            image = ImageOps.exif_transpose(opened).convert("RGB" if channels == 3 else "L")
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], pillow.Resampling.BILINEAR)
    return np.asarray(image, np.uint8).reshape(image.height, image.width, channels)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading pictures needs Pillow; install it: pip install 'onnxtrain[images]'.") from None
    return Image


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]}"
