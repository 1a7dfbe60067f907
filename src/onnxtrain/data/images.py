"""Images as arrays: layout and size of the model's input, decoded in threads, kept as bytes; folders by class."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from onnxtrain.data.conversion import Array, Rescaled, TensorSpec, kind_of
from onnxtrain.data.files import GrowingArray, Reader, check_regular
from onnxtrain.errors import DataError, OptionError
from onnxtrain.spelling import checks_arguments

_logger = logging.getLogger(__name__)

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")

MOST_PIXELS: Final = 2**26
"""Larger pictures are not read: one of 67 million pixels takes 0.6 GB while it is decoded."""

_LARGE_PIXELS: Final = 2**23
"""Larger pictures are decoded one at a time."""

_THREADS: Final = min(8, os.cpu_count() or 1)
"""Number of images that are decoded in parallel: decoders release the GIL."""


@dataclass(frozen=True)
class Picture:
    """One picture that is to be read.

    Attributes:
        name: how messages call it.
        open: its file, or what opens it.
    """

    name: str
    open: Path | Callable[[], IO[bytes]]


def read_pictures(
    found: Iterable[Picture],
    spec: TensorSpec,
    what: str,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    skip_broken: bool = False,
    way_out: str,
) -> tuple[Array | Rescaled, list[int]]:
    """Pictures as the input of a model takes them.

    Args:
        found: the pictures.
        spec: the input.
        what: how messages call the data.
        mean: one number, or one for each channel, that is subtracted.
        std: one number, or one for each channel, to divide by.
        skip_broken: leave out pictures that cannot be read and log how many, instead of raising an error.
        way_out: what else a message about broken pictures says.

    Returns:
        The pictures [N, ...], and the indices of those that could be read.

    Raises:
        DataError: some cannot be read, sizes differ where the model leaves them open, or the input is none for
            pictures.
        OptionError: mean or std do not fit.
    """
    layout = Layout.of(spec, what)
    shift, scale = (_channels(name, value, layout.channels, spec) for name, value in (("mean", mean), ("std", std)))
    try:
        pixels, kept = _read_pixels(found, layout, skip_broken, way_out)
    except OSError as error:  # also of the temporary file
        raise DataError(f"{what} cannot be read: {error.strerror or error}.") from error
    if kind_of(spec.dtype) != "float":
        return pixels, kept
    scale = np.ones(1) if scale is None else scale
    offset = np.zeros(1) if shift is None else -shift / scale
    return Rescaled(pixels, layout.aligned(1 / (255 * scale)), layout.aligned(offset)), kept


def _channels(name: str, given: float | Sequence[float] | None, channels: int, spec: TensorSpec) -> Array | None:
    """``mean`` or ``std`` as an array of 1 or ``channels`` numbers."""
    if given is None:
        return None
    if kind_of(spec.dtype) != "float":
        raise OptionError(f"{name} is {given}, but the input '{spec.name}' takes {spec.dtype}; leave it out.")
    values = np.atleast_1d(np.asarray(given, np.float64))
    if values.ndim != 1 or len(values) not in (1, channels) or not np.isfinite(values).all():
        raise OptionError(f"{name} is {given}; it needs one finite number, or one for each of {channels} channels.")
    if name == "std" and not (values > 0).all():
        raise OptionError(f"std is {given}; it needs numbers greater than 0.")
    return values


def _read_pixels(found: Iterable[Picture], layout: Layout, skip_broken: bool, way_out: str) -> tuple[Array, list[int]]:
    """Pictures as bytes in the model's layout, and which these are."""
    array, first = None, None
    kept: list[int] = []
    broken: list[str] = []
    index = -1
    for index, (picture, pixels) in enumerate(_decoded(found, layout)):
        if isinstance(pixels, DataError) and not skip_broken:
            raise pixels
        if isinstance(pixels, Exception):
            _logger.debug("'%s' cannot be read: %s", picture.name, pixels)
            broken.append(picture.name)
            continue
        if array is None or first is None:
            first = picture.name, pixels.shape
            array = GrowingArray(layout.arranged(pixels).shape, np.dtype(np.uint8))
        elif pixels.shape != first[1]:
            raise DataError(
                f"'{picture.name}' has {_size(pixels.shape)} pixels, but '{first[0]}' has {_size(first[1])}, "
                "and the model's input leaves the size open; give all pictures one size."
            )
        array.append(layout.arranged(pixels)[None])
        kept.append(index)
    if broken:
        _report(broken, index + 1, skip_broken, way_out)
    assert array is not None
    return array.finish(), kept


def _decoded(found: Iterable[Picture], layout: Layout) -> Iterator[tuple[Picture, Array | Exception]]:
    """Each picture with its pixels, or with what went wrong, in their order; some are decoded at a time."""
    pillow = _pillow()
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS, "onnxtrain-pictures") as pool:
        warnings.simplefilter("ignore")  # of damaged tags, of very many pixels: what cannot be read raises an error
        pending: deque[tuple[Picture, Future[Array | Exception]]] = deque()
        for picture in found:
            pending.append((picture, pool.submit(_attempt, pillow, picture, layout)))
            if len(pending) > 4 * _THREADS:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()


def _attempt(pillow: types.ModuleType, picture: Picture, layout: Layout) -> Array | Exception:
    try:
        return _pixels(pillow, picture, layout.channels, layout.size)
    except Exception as error:  # a damaged picture breaks Pillow in more ways than it documents
        return error


def _report(broken: list[str], of: int, skip_broken: bool, way_out: str) -> None:
    names = ", ".join(f"'{name}'" for name in broken[:8]) + (", ..." if len(broken) > 8 else "")
    if skip_broken and len(broken) == of:
        raise DataError(f"none of {of} pictures can be read: {names}; give files that are pictures.")
    if not skip_broken:
        raise DataError(f"{len(broken)} of {of} pictures cannot be read: {names}; {way_out}.")
    _logger.warning("%d of %d pictures cannot be read and are left out: %s.", len(broken), of, names)


@dataclass(frozen=True)
class Layout:
    """Layout of an image in the model's input.

    Attributes:
        channels: 1 or 3.
        axis: where the channels are in an example: 0, 2, or None for a grey picture without such an axis.
        size: height and width; None where the model leaves them open.
    """

    channels: int
    axis: int | None
    size: tuple[int, int] | None

    @classmethod
    def of(cls, spec: TensorSpec, what: str) -> Layout:
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


def _pixels(pillow: types.ModuleType, picture: Picture, channels: int, size: tuple[int, int] | None) -> Array:
    """A picture as bytes [H, W, C].

    Raises:
        DataError: it has more than 8 bits for each channel, or too many pixels.
    """
    from PIL import ImageOps

    source = picture.open
    if isinstance(source, Path):
        check_regular(source)
    with source.open("rb") if isinstance(source, Path) else source() as file, pillow.open(file) as opened:
        if opened.mode.startswith(("I", "F")):
            raise DataError(
                f"'{picture.name}' has more than 8 bits for each pixel (mode {opened.mode}); save it with 8."
            )
        check_pixel_count(opened, f"'{picture.name}'")
        with _one_large_picture if opened.width * opened.height > _LARGE_PIXELS else contextlib.nullcontext():
            ImageOps.exif_transpose(opened, in_place=True)
            return pixels_of(opened, channels, size)


_one_large_picture: Final = threading.Lock()


def check_pixel_count(image: Any, what: str) -> None:
    """Refuse a picture before it is decoded that would take much memory.

    Raises:
        DataError: it has too many pixels.
    """
    if image.width * image.height > MOST_PIXELS:
        raise DataError(
            f"{what} has {image.width} x {image.height} pixels; pictures are read up to {MOST_PIXELS // 10**6} million "
            "pixels: make it smaller."
        )


def pixels_of(image: Any, channels: int, size: tuple[int, int] | None) -> Array:
    """A picture of Pillow as bytes [H, W, C], stretched to a size."""
    image = image.convert("RGB" if channels == 3 else "L")
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], _pillow().Resampling.BILINEAR)
    return np.asarray(image, np.uint8).reshape(image.height, image.width, channels)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading pictures needs Pillow; install it: pip install 'onnxtrain[images]'.") from None
    return Image


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]}"


@checks_arguments
@dataclass(frozen=True)
class ImageFolder(Reader):
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

    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    skip_broken: bool = False

    @property
    def name(self) -> str:
        """Name of the folder in error messages."""
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
        Layout.of(specs[0], self.name)  # what fits no pictures is said first
        files = self._files(need_target)
        pixels, kept = read_pictures(
            (Picture(str(file), file) for file in files),
            specs[0],
            self.name,
            mean=self.mean,
            std=self.std,
            skip_broken=self.skip_broken,
            way_out="correct or remove them, or leave them out: onnxtrain.data.ImageFolder(path, skip_broken=True)",
        )
        folder = Path(self.path)
        classes = [files[index].relative_to(folder).parts[0] for index in kept] if need_target else None
        return {specs[0].name: pixels}, None if classes is None else np.array(classes)

    def files(self) -> list[Path]:
        """All pictures, in the order of their paths, in which predictions are."""
        return self._files(need_target=False)

    def _files(self, need_target: bool) -> list[Path]:
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


def pictures(paths: Iterable[Path]) -> list[Path]:
    """The pictures among paths, as their names tell, sorted; hidden files are none."""
    return sorted(
        path for path in paths if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def is_image_folder(path: Path) -> bool:
    """Return whether a path is a folder with images, in itself or its subfolders, and without arrays."""
    if not path.is_dir() or next(path.rglob("*.npy"), None) is not None:
        return False
    return any(file.suffix.lower() in SUFFIXES for file in path.rglob("*"))
