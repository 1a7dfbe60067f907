"""Images as arrays: layout and size of the model's input, decoded in threads, kept as bytes; folders by class."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Final

import numpy as np

from onnxtrain.data.conversion import Array, Rescaled, TensorSpec, kind_of
from onnxtrain.data.files import GrowingArray, Reader, check_regular
from onnxtrain.data.image_form import BYTES, Pixels, Resizing
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors._internal import ignored_warnings
from onnxtrain.errors.formatting import listed
from onnxtrain.errors.spelling import checks_arguments

_logger = logging.getLogger(__name__)

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")

MOST_PIXELS: Final = 2**26
"""Images with more pixels are refused: decoding 67 million takes 0.6 GB."""

_LARGE_PIXELS: Final = 2**23
"""Images with more pixels are decoded one at a time."""

_THREADS: Final = min(8, os.cpu_count() or 1)
"""Number of images that are decoded in parallel: decoders release the GIL."""


@dataclass(frozen=True)
class ImageSource:
    """An image to read."""

    name: str
    open: Path | Callable[[], IO[bytes]]


@dataclass(frozen=True)
class ImageReader(Reader):
    """Base of the readers of images, with the options that :class:`ImageFolder` describes."""

    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    skip_broken: bool = False
    orient: bool | None = None
    examples_read: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The examples of the last reading, in its order."""

    def read_images(
        self, found: Iterable[ImageSource], spec: TensorSpec, advice: str
    ) -> tuple[Array | Rescaled, list[int]]:
        """Read images into an array for an input of a model; return it with the indices of the images in it."""
        layout = Layout.of(spec, self.name)
        shift = _channels("mean", self.mean, layout.channels, spec)
        scale = _channels("std", self.std, layout.channels, spec)
        wide = (0.0,) if shift is None else shift.tolist(), (1.0,) if scale is None else scale.tolist()
        given = None if shift is scale is None else Pixels(tuple(wide[0]), tuple(wide[1]))
        used, orient = given or spec.pixels, self.orient
        if orient is None:
            orient = spec.pixels is None or spec.pixels.orient
        if used is not None or not orient:
            used = (used or _UNCHANGED)._replace(orient=orient)
        factor, offset = factors(used, layout)
        if kind_of(spec.dtype) == "float":
            _tell(given, spec.pixels)
        try:
            pixels, kept = _read_pixels(found, replace(layout, orient=orient), self.skip_broken, advice)
        except OSError as error:  # also of the temporary file
            raise DataError(f"{self.name} cannot be read: {error.strerror or error}.") from error
        if kind_of(spec.dtype) != "float":
            return pixels, kept
        return Rescaled(pixels, factor, offset, to_record(used)), kept


def factors(pixels: Pixels | None, layout: Layout) -> tuple[Array, Array]:
    """Return what pixels of 0 to 255 are multiplied by, and what is added then."""
    pixels = pixels or _UNCHANGED
    mean, std = np.array(pixels.mean), np.array(pixels.std)
    if not {mean.size, std.size} <= {1, layout.channels}:
        raise DataError(
            f"the normalization of images has {max(mean.size, std.size)} channels, mean {_numbers(pixels.mean)} and "
            f"std {_numbers(pixels.std)}, but the model's input has {layout.channels}; give mean and std."
        ).about("mean", got=max(mean.size, std.size), wanted=layout.channels)
    return layout.aligned(1 / (255 * std)), layout.aligned(-mean / std)


_UNCHANGED: Final = Pixels((0.0,), (1.0,))


def to_record(pixels: Pixels | None) -> Pixels | None:
    """Return the normalization that a trained model needs beside it; ``None`` where the file says it, or by default."""
    return None if pixels is None or pixels == BYTES else pixels._replace(reason="")


def _tell(given: Pixels | None, known: Pixels | None) -> None:
    """Log a normalization that is assumed, or that differs from the one that is known."""
    if known is None or (given is not None and given.is_same(known)):
        return
    shown = f"mean {_numbers(known.mean)} and std {_numbers(known.std)}"
    if given is not None:
        reason = known.reason or "as in the training of the model"
        _logger.warning("Without mean and std, images are normalized with %s, %s; here they are given.", shown, reason)
    elif known.reason:
        shown = "pixels of 0 to 255" if known.is_same(BYTES) else f"(pixel / 255 - mean) / std with {shown}"
        _logger.warning("Images are given to the model as %s, %s.", shown, known.reason)


def _numbers(values: Sequence[float]) -> str:
    return ",".join(f"{value:.4g}" for value in values)


def _channels(name: str, given: float | Sequence[float] | None, channels: int, spec: TensorSpec) -> Array | None:
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


def _read_pixels(
    found: Iterable[ImageSource], layout: Layout, skip_broken: bool, advice: str
) -> tuple[Array, list[int]]:
    """Return the readable images as uint8 values in the model's layout, and their indices among all images."""
    array, first = None, None
    kept: list[int] = []
    broken: list[str] = []
    index = -1
    for index, (image, pixels) in enumerate(_decoded(found, layout)):
        if isinstance(pixels, DataError) and not skip_broken:
            raise pixels
        if isinstance(pixels, Exception):
            _logger.debug("'%s' cannot be read: %s", image.name, pixels)
            broken.append(image.name)
            continue
        if array is None or first is None:
            first = image.name, pixels.shape
            if layout.size is None:
                _logger.warning("The model leaves the size of images open: they keep theirs, %s.", _size(pixels.shape))
            array = GrowingArray(layout.arranged(pixels).shape, np.dtype(np.uint8))
        elif pixels.shape != first[1]:
            raise DataError(
                f"'{image.name}' has {_size(pixels.shape)} pixels, but '{first[0]}' has {_size(first[1])}, "
                "and the model's input has no fixed size; give all images one size."
            ).about(image.name, got=pixels.shape, wanted=first[1])
        array.append(layout.arranged(pixels)[None])
        kept.append(index)
    if broken:
        _report(broken, index + 1, skip_broken, advice)
    assert array is not None
    return array.finish(), kept


def _decoded(found: Iterable[ImageSource], layout: Layout) -> Iterator[tuple[ImageSource, Array | Exception]]:
    """Yield each image with its pixels or its error, in order; several are decoded in parallel."""
    pillow = _pillow()
    # Pillow warns of damaged tags; unreadable images raise errors.
    with ignored_warnings(module="PIL"), ThreadPoolExecutor(_THREADS, "onnxtrain-images") as pool:
        pending: deque[tuple[ImageSource, Future[Array | Exception]]] = deque()
        for image in found:
            pending.append((image, pool.submit(_attempt, pillow, image, layout)))
            if len(pending) > 4 * _THREADS:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()


def _attempt(pillow: types.ModuleType, image: ImageSource, layout: Layout) -> Array | Exception:
    try:
        return _pixels(pillow, image, layout)
    except Exception as error:  # Pillow raises undocumented errors for damaged images
        return error


def _report(broken: list[str], of: int, skip_broken: bool, advice: str) -> None:
    names = listed((f"'{name}'" for name in broken), 8, counted=False)
    if skip_broken and len(broken) == of:
        raise DataError(f"none of {of} images can be read: {names}; give files that are images.").about(names, got=of)
    if not skip_broken:
        raise DataError(f"{len(broken)} of {of} images cannot be read: {names}; {advice}.").about(
            names, got=len(broken)
        )
    _logger.warning("%d of %d images cannot be read and are skipped: %s.", len(broken), of, names)


@dataclass(frozen=True)
class Layout:
    """Layout of an image in the model's input."""

    channels: int
    axis: int | None
    size: tuple[int, int] | None
    resizing: Resizing | None = None
    orient: bool = True

    @classmethod
    def of(cls, spec: TensorSpec, subject: str) -> Layout:
        """Return the layout of an input."""
        shape = spec.shape or ()
        axis: int | None = None
        if len(shape) == 4 and (shape[1] in (1, 3) or shape[3] in (1, 3)):
            axis = 0 if shape[1] in (1, 3) else 2
        elif len(shape) != 3 or kind_of(spec.dtype) not in ("float", "integer"):
            raise DataError(
                f"{subject} holds images, but the input '{spec.name}' is {spec.dtype} {spec.describe_shape()}; it "
                "needs (batch, channels, height, width), (batch, height, width, channels) with 1 or 3 channels, or "
                "(batch, height, width)."
            )
        sides = list(shape[1:])
        channels = 1 if axis is None else sides.pop(axis)
        height, width = sides
        assert isinstance(channels, int)
        size = (height, width) if isinstance(height, int) and isinstance(width, int) else None
        resizing = spec.resizing
        if resizing is not None and size is None:
            size = resizing.size
        return cls(channels, axis, size, resizing if resizing is not None and resizing.size == size else None)

    def arranged(self, pixels: Array) -> Array:
        """Convert an image [H, W, C] to this layout."""
        if self.axis is None:
            return pixels[..., 0]
        return pixels.transpose(2, 0, 1) if self.axis == 0 else pixels

    def aligned(self, values: Array) -> Array:
        """Reshape one value per channel so that it broadcasts with images."""
        return values.reshape(-1, 1, 1) if self.axis == 0 else values


def _pixels(pillow: types.ModuleType, image: ImageSource, layout: Layout) -> Array:
    from PIL import ImageOps

    source = image.open
    if isinstance(source, Path):
        check_regular(source)
    with source.open("rb") if isinstance(source, Path) else source() as file, pillow.open(file) as opened:
        check_image(opened, f"'{image.name}'")
        with _one_large_image if opened.width * opened.height > _LARGE_PIXELS else contextlib.nullcontext():
            if layout.orient:
                ImageOps.exif_transpose(opened, in_place=True)
            return pixels_of(opened, layout)


_one_large_image: Final = threading.Lock()


def is_image(value: object) -> bool:
    """Return whether a value is an image of Pillow."""
    return hasattr(value, "convert") and hasattr(value, "getexif")


def check_image(image: Any, subject: str) -> None:
    """Refuse an image before it is decoded that is too large, or would lose bits."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{subject} has more than 8 bits per channel (mode {image.mode}); save it with 8.").about(
            subject, got=image.mode
        )
    if image.width * image.height > MOST_PIXELS:
        raise DataError(
            f"{subject} has {image.width} x {image.height} pixels; images are read up to {MOST_PIXELS // 10**6} "
            "million pixels: make it smaller."
        )


def pixels_of(image: Any, layout: Layout) -> Array:
    """Convert a Pillow image to bytes [H, W, C] of the layout's size."""
    image = image.convert("RGB" if layout.channels == 3 else "L")
    resizing = layout.resizing or Resizing(layout.size or ())
    edges = resizing.edges
    if len(edges) == 1:  # of the shorter one
        shorter = min(image.size)
        edges = tuple(int(edges[0] * side / shorter) for side in (image.height, image.width))
        if edges[0] * edges[1] > MOST_PIXELS:
            raise DataError(
                f"an image of {image.width} x {image.height} pixels is {edges[1]} x {edges[0]} with a shorter edge of "
                f"{resizing.edges[0]}, which is too large; cut it."
            ).about((image.width, image.height))
    if edges and image.size != edges[::-1]:
        image = image.resize(edges[::-1], _pillow().Resampling[resizing.resample.upper()])
    if resizing.crop is not None:  # beyond the image it is black
        height, width = resizing.crop
        top, left = (image.height - height) // 2, (image.width - width) // 2
        image = image.crop((left, top, left + width, top + height))
    return np.asarray(image, np.uint8).reshape(image.height, image.width, layout.channels)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading images needs Pillow; install it: pip install pillow.") from None
    return Image


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]}"


@checks_arguments
@dataclass(frozen=True)
class ImageFolder(ImageReader):
    """Images in one folder per class; the folder's name is the label.

    The model's input determines size, channels and layout: [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, or
    [N, H, W] for grey. Images are resized (bilinear, without keeping the aspect ratio), or resized and cut as
    ``preprocessor_config.json`` beside the model says. They are rotated by their EXIF tag, which torchvision's
    ``ImageFolder`` does not do, and converted to grey or RGB; a GIF or TIFF contributes its first frame. If the model
    accepts any size, all images must have the same size.
    A float input gets (pixel / 255 - mean) / std, an integer input gets pixels from 0 to 255. Without mean and std
    they are those of the model's training, else those of ``preprocessor_config.json``, else 0 and 1; a model that
    scales images of 0 to 255 itself gets these.

    All images are read once and kept as bytes: in memory, or from 64 MiB on in a temporary file. Examples are sorted by
    path.

    Args:
        path: The folder.
        mean: Number, or one per channel, that is subtracted.
        std: Divisor, or one per channel.
        skip_broken: Skip images that cannot be read and log their number, instead of raising an error.
        orient: Rotate images by their EXIF tag; by default as in the model's training, else yes.
    """

    called: ClassVar[str] = "the folder "

    @classmethod
    def reads(cls, path: str | os.PathLike[str]) -> bool:
        """Return whether a path is a folder with images, in itself or its subfolders, and without arrays."""
        folder = Path(path)
        if not folder.is_dir() or next(folder.rglob("*.npy"), None) is not None:
            return False
        return any(file.suffix.lower() in SUFFIXES for file in folder.rglob("*"))

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return the images by the name of the model's input, and the labels or None.

        Where no targets are needed, images may lie in the folder itself.

        Raises:
            DataError: The folder has no images, an image cannot be read, or the model's input is not for images.
        """
        if target is not None:
            raise DataError(
                f"{self.name} holds images, whose targets are the names of their folders; leave out target=."
            )
        if len(specs) != 1:
            raise DataError(f"{self.name} holds images, but the model has {len(specs)} inputs; it needs one.")
        Layout.of(specs[0], self.name)  # this error comes before those about files
        files = self._files(need_target)
        advice = "correct or remove them, or skip them: onnxtrain.data.ImageFolder(path, skip_broken=True)"
        pixels, kept = self.read_images((ImageSource(str(file), file) for file in files), specs[0], advice)
        self.examples_read[:] = [str(files[index]) for index in kept]
        folder = Path(self.path)
        classes = [files[index].relative_to(folder).parts[0] for index in kept] if need_target else None
        return {specs[0].name: pixels}, None if classes is None else np.array(classes)

    def _files(self, need_target: bool) -> list[Path]:
        folder = Path(self.path)
        if not folder.is_dir():
            raise DataError(f"'{folder}' is not a folder; images lie in one folder per class.")
        loose = image_files(folder.iterdir(), folder)
        if not need_target:
            found = image_files(folder.rglob("*"), folder)
            if not found:
                raise DataError(f"{self.name} holds no images ({', '.join(SUFFIXES)}).")
            return found
        if loose:
            raise DataError(
                f"{self.name} holds images itself, such as '{loose[0].name}'; for training they must lie in one "
                "folder per class."
            )
        found = []
        for each in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            inside = image_files(each.rglob("*"), each)
            if not inside:
                raise DataError(
                    f"the folder '{each}' holds no images ({', '.join(SUFFIXES)}); add images, or remove it if it is "
                    "no class."
                )
            found += inside
        if not found:
            raise DataError(f"{self.name} is empty; it needs one folder of images per class.")
        return found


def image_files(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Return the paths with the suffix of an image, sorted, without files that are hidden or in hidden folders."""
    return sorted(
        path
        for path in paths
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
