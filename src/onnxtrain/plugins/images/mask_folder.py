"""Folders of images with a mask for each: segmentation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.files import GrowingArray, check_regular
from onnxtrain.data.image_form import Resizing
from onnxtrain.data.images import MOST_PIXELS, SUFFIXES, ImageSource, Layout, image_files, pixels_of
from onnxtrain.errors import DataError
from onnxtrain.errors.formatting import plural
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.plugins.images.labelled import IGNORED, LabelledImages, PixelTargets, checked_file, shown_size

_IMAGES: Final = "images"
_MASKS: Final = "masks"
_LOSSY: Final = (".jpg", ".jpeg", ".webp")


@checks_arguments
@dataclass(frozen=True)
class MaskFolder(LabelledImages):
    """Images in ``images/`` and a mask of the same name for each in ``masks/``, for segmentation.

    A mask is a file such as a PNG whose pixels are classes: numbers (``L``), or numbers of a palette (``P``). Masks of
    one bit, or of 0 and 255 alone for a model of two classes, have the classes 0 and 1; in others 255 is ignored (the
    ``ignore_index`` of the loss). The loss decides the form: labels [N, H, W] for ``cross_entropy``, ``focal`` and
    ``dice``, 0 and 1 in the shape of the output for ``bce`` or an output of one channel.

    Images are read as by :class:`onnxtrain.data.ImageFolder`; masks are resized and cut along, to the size of the
    output, by the nearest pixel. For a prediction, masks are not read.

    Args:
        path: The folder that holds ``images`` and ``masks``.
        mean: Number, or one per channel, that is subtracted from the images.
        std: Divisor of the images, or one per channel.
        skip_broken: Skip images that cannot be read and log their number, instead of raising an error.
        orient: Rotate images and masks by their EXIF tag; by default as in the model's training, else yes.
    """

    called: ClassVar[str] = "the folder "

    @classmethod
    def reads(cls, path: str | os.PathLike[str]) -> bool:
        """Return whether a path is a folder with the folders ``images`` and ``masks``."""
        folder = Path(path)
        return (folder / _IMAGES).is_dir() and (folder / _MASKS).is_dir()

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return the images by the name of the model's input, and the masks where targets are needed.

        Raises:
            DataError: An image has no mask, or a mask no image or another size; a file cannot be read; the model has
                no value per pixel.
        """
        if target is not None:
            raise DataError(f"{self.name} holds images, whose targets are their masks; leave out target=.")
        layout, turned = self.layout(specs), self.turns(specs[0])
        images = _by_stem(Path(self.path) / _IMAGES)
        if not need_target or self.head is None:
            sources = [ImageSource(str(path), path) for path in images.values()]
            return self.read_sources(sources, specs)[0], None
        form = PixelTargets.of(self.head, layout, f"{self.name} holds masks")
        masks = _by_stem(Path(self.path) / _MASKS)
        self._check_pairs(images, masks)
        sizes: dict[Path, tuple[int, int]] = {}
        sources = [
            ImageSource(str(path), checked_file(path, sizes.__setitem__, turned=turned)) for path in images.values()
        ]
        inputs, kept = self.read_sources(sources, specs)
        pairs = [(images[stem], masks[stem]) for stem in images]
        pairs = [pairs[index] for index in kept]
        labels = _read_masks([(mask, sizes[image]) for image, mask in pairs], form, layout, turned=turned)
        return inputs, form.of_labels(labels, lambda index: str(pairs[index][1]))

    def _check_pairs(self, images: dict[str, Path], masks: dict[str, Path]) -> None:
        bare = [path for stem, path in images.items() if stem not in masks]
        loose = [path for stem, path in masks.items() if stem not in images]
        found = []
        if bare:
            found.append(f"{plural(len(bare), 'image')} without a mask, such as '{bare[0].name}'")
        if loose:
            found.append(f"{plural(len(loose), 'mask')} without an image, such as '{loose[0].name}'")
        if found:
            raise DataError(
                f"{self.name} has {' and '.join(found)}; an image and its mask need the same name, "
                "images/one.jpg and masks/one.png."
            ).about(str(self.path), got=len(bare) + len(loose))


def _by_stem(folder: Path) -> dict[str, Path]:
    """Return the images in a folder and its subfolders by their paths in it, without suffix."""
    found: dict[str, Path] = {}
    for path in image_files(folder.rglob("*"), folder):
        stem = path.relative_to(folder).with_suffix("").as_posix()
        if stem in found:
            raise DataError(f"'{folder}' has '{found[stem].name}' and '{path.name}' of one name; remove one of them.")
        found[stem] = path
    if not found:
        raise DataError(f"the folder '{folder}' holds no images ({', '.join(SUFFIXES)}).")
    return found


def _read_masks(
    masks: Sequence[tuple[Path, tuple[int, int]]], form: PixelTargets, layout: Layout, *, turned: bool
) -> Array:
    """Return the classes [N, H, W] of all pixels, as bytes, of masks with the sizes of their images."""
    found: GrowingArray | None = None
    first = ""
    present = np.zeros(256, bool)
    for path, size in masks:
        labels = _labels_in(path, size, turned=turned)
        present |= np.bincount(labels.reshape(-1), minlength=256) > 0
        resized = nearest(labels, layout, form.size)
        if found is None:
            found, first = GrowingArray(resized.shape, np.dtype(np.uint8)), path.name
            shape = resized.shape
        if resized.shape != shape:
            raise DataError(f"'{path}' has another size than '{first}', and the model's input has no fixed size.")
        found.append(resized[None])
    assert found is not None
    array = found.finish()
    if present[IGNORED] and not present[1:IGNORED].any():  # of two classes, as image editors write them
        if form.channels > 2:
            raise DataError(
                f"all masks, such as '{masks[0][0]}', have 0 and 255 alone, the classes 0 and 1 of two, but the output "
                f"{form.head.name!r} has {form.channels} classes; save class 1 as 1, since 255 is then ignored."
            ).about(str(masks[0][0]), got=IGNORED)
        return GrowingArray.of(array, np.dtype(np.uint8), lambda block: block == IGNORED).finish()
    return array


def _labels_in(path: Path, size: tuple[int, int], *, turned: bool) -> Array:
    """Return the classes [H, W] of a mask."""
    from PIL import Image, ImageOps

    if path.suffix.lower() in _LOSSY:
        raise DataError(f"the mask '{path}' is {path.suffix}, which blurs classes; save it as .png.").about(str(path))
    try:
        check_regular(path)
        with Image.open(path) as image:
            own = shown_size(image, turned=turned)
            if own != size:
                turn = "; if an EXIF tag rotates one of them, give orient=False" if own == size[::-1] else ""
                raise DataError(
                    f"the mask '{path}' has {own[0]} x {own[1]} pixels, but its image has {size[0]} x {size[1]}; "
                    f"they need one size{turn}."
                ).about(str(path), got=own, wanted=size)
            if image.width * image.height > MOST_PIXELS:
                raise DataError(f"the mask '{path}' has {image.width} x {image.height} pixels; make it smaller.")
            if turned:
                ImageOps.exif_transpose(image, in_place=True)
            mode, values = image.mode, np.asarray(image)
    except DataError:
        raise
    except Exception as error:  # Pillow raises undocumented errors for damaged images
        raise DataError(f"the mask '{path}' cannot be read ({error}); save it again.").about(str(path)) from error
    if values.ndim == 3:
        colors = values[..., :3] if mode in ("RGB", "RGBA") else values[..., :1]
        if mode not in ("RGB", "RGBA", "LA") or (colors != colors[..., :1]).any():
            raise DataError(
                f"the mask '{path}' has colours (mode {mode}), which do not say their classes; save the numbers of the "
                "classes, or a palette image."
            ).about(str(path), got=mode)
        values = colors[..., 0]
    if values.dtype.kind not in "biu" or (values.size and not 0 <= values.min() <= values.max() <= IGNORED):
        raise DataError(f"the mask '{path}' (mode {mode}) needs classes 0 to 254, and 255 for pixels to ignore.").about(
            str(path), got=mode
        )
    return values.astype(np.uint8)


def nearest(labels: Array, layout: Layout, size: tuple[int, int] | None) -> Array:
    """Resize and cut classes [H, W] as images are, by the nearest pixel, then to the size of the output."""
    from PIL import Image

    resizing = layout.resizing or Resizing(layout.size or ())
    if layout.resizing is None and size is not None:
        resizing = Resizing(size)  # at once
    own = replace(layout, channels=1, axis=None, resizing=resizing._replace(resample="nearest"))
    found = pixels_of(Image.fromarray(labels), own)[..., 0]
    if size is not None and found.shape != size:
        found = np.asarray(Image.fromarray(found).resize(size[::-1], Image.Resampling.NEAREST))
    return found
