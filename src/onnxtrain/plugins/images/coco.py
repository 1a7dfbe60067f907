"""COCO files: images with boxes, regions of pixels or keypoints, in the form that the loss reads."""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from onnxtrain.data.array_dataset import ArrayDataset
from onnxtrain.data.base import Dataset, DataSource
from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.files import GrowingArray
from onnxtrain.data.images import ImageSource, Layout
from onnxtrain.data.naming import Wanted
from onnxtrain.errors import DataError
from onnxtrain.errors.formatting import plural
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.value import dimensions
from onnxtrain.model_file.small_files import RefusedFileError, read_json
from onnxtrain.plugins.images.labelled import (
    IGNORED,
    LabelledImages,
    PixelTargets,
    checked_file,
    default_folder,
    part_of,
)
from onnxtrain.plugins.images.mask_folder import nearest
from onnxtrain.plugins.images.regions import region

_logger = logging.getLogger(__name__)

_LIMIT: Final = 2**30
"""Maximum bytes of a file; that of 118,000 images of COCO has 450 MB."""


@checks_arguments
@dataclass(frozen=True)
class CocoFile(LabelledImages):
    """A JSON file in COCO's format, with its images: boxes, segmentation or keypoints, whichever the loss reads.

    Classes are the categories in the order of their ids, which need not be 0 to n - 1 (:attr:`categories`). A model
    keeps those of its training: a later file in which one has another number is refused. The loss decides what is read:

    - ``yolo`` and ``detr``: boxes [N, M, 5] as (class, x, y, width, height), the centre in fractions of the image,
      padded with rows of class -1. Images without objects are kept. Crowds are left out.
    - A loss on an output with a value per pixel: the class of each pixel, from polygons and run lengths. Class 0 is the
      background, and categories follow from 1; a model with exactly as many classes as there are categories has no
      background, and pixels without an object are ignored. Smaller objects lie on larger ones. Crowds count.
    - A loss on an output [N, 2 K] or [N, K, 2]: K keypoints as (x, y) in fractions of the image. Each object is an
      example: its box, cut out of the image, or the whole image where it has no box. Objects with a keypoint that
      nobody labelled are left out.

    Images are read as by :class:`onnxtrain.data.ImageFolder`: resized to the model's input without keeping the aspect
    ratio, not letterboxed, or as ``preprocessor_config.json`` says; boxes, regions and keypoints move along.

    Args:
        path: The JSON file.
        mean: Number, or one per channel, that is subtracted from the images.
        std: Divisor of the images, or one per channel.
        skip_broken: Skip images that cannot be read and log their number, instead of raising an error.
        orient: Rotate images by their EXIF tag; by default as in the model's training, else yes.
        images: Folder of the images; by default that of the file, or ``images`` there.
    """

    images: str | os.PathLike[str] | None = None
    known: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    @classmethod
    def reads(cls, path: str | os.PathLike[str]) -> bool:
        """Return whether a path is a JSON file of an object with images and annotations."""
        file = Path(path)
        if file.suffix.lower() != ".json" or not file.is_file():
            return False
        with file.open("rb") as opened:
            if not opened.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
                return False
        try:
            found = read_json(file, _LIMIT)
        except (OSError, RefusedFileError):
            return False
        return isinstance(found, dict) and {"images", "annotations"} <= found.keys()

    @property
    def categories(self) -> tuple[str, ...]:
        """Names of the categories in the order of their classes."""
        return _Document.of(self).names

    def for_model(self, known: Sequence[str]) -> Self:
        """Return the same file, whose classes are compared with those that a model was trained on."""
        found = copy.copy(self)
        object.__setattr__(found, "known", tuple(map(str, known)))
        return found

    def read(
        self, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> tuple[dict[str, object], object | None]:
        """Return the images by the name of the model's input, and what the loss reads where targets are needed.

        Raises:
            DataError: The file has another form, an image is missing or has another size, or the model has no output
                for what the file holds.
        """
        return self.read_document(_Document.of(self), specs, target=target, need_target=need_target)

    def read_document(
        self, document: _Document, specs: Sequence[TensorSpec], *, target: str | None, need_target: bool
    ) -> tuple[dict[str, object], object | None]:
        """Return images and targets as :meth:`read`, of the content of the file."""
        if target is not None:
            raise DataError(f"{self.name} holds images, whose targets the loss decides; leave out target=.")
        layout, turned = self.layout(specs), self.turns(specs[0])
        if not need_target or self.head is None:
            return self.read_sources(document.sources(turned=turned), specs)[0], None
        shape = dimensions(self.head.prediction) or ()
        if "map" in self.head.loss.own_metrics:
            make: Callable[..., tuple[dict[str, object], object]] = self._boxes
        elif len(self.head.spec.shape or ()) >= 3 and not (len(shape) == 3 and shape[-1] == 2):
            make = self._regions
        else:
            make = self._keypoints
        if make != self._keypoints:
            self._check_known(document)
        return make(document, specs, layout, turned)

    def _check_known(self, document: _Document) -> None:
        names = document.names
        for label, name in enumerate(self.known):
            if name in names and names[label : label + 1] != (name,):
                raise DataError(
                    f"{self.name} has the category {name!r} as class {names.index(name)}, but the model was trained on "
                    f"it as class {label}; write the same categories with the same ids into all files, or start from a "
                    "model without its .labels.json file."
                ).about(name, got=names.index(name), wanted=label)

    def _boxes(
        self, document: _Document, specs: Sequence[TensorSpec], layout: Layout, turned: bool
    ) -> tuple[dict[str, object], object]:
        inputs, kept = self.read_sources(document.sources(turned=turned), specs)
        rows, outside = [], 0
        for index in kept:
            image = document.images[index]
            own = []
            for each in document.objects(image):
                if each.get("iscrowd"):
                    continue
                x, y, width, height = document.box(each)
                frame = Frame.of(layout, image["width"], image["height"])
                low, high = (np.clip(frame.fractions([point]), 0, 1)[0] for point in ((x, y), (x + width, y + height)))
                if (high - low > 0).all():
                    own.append([document.labels[each["category_id"]], *(low + high) / 2, *(high - low)])
                else:
                    outside += 1
            rows.append(own)
        if outside:
            _logger.warning("%s: %s without area inside of its image, left out.", self.name, plural(outside, "object"))
        found = np.full((len(rows), max(map(len, rows)) or 1, 5), -1, np.float32)
        for boxes, own in zip(found, rows, strict=True):
            if own:
                boxes[: len(own)] = own
        return inputs, found

    def _regions(
        self, document: _Document, specs: Sequence[TensorSpec], layout: Layout, turned: bool
    ) -> tuple[dict[str, object], object]:
        assert self.head is not None
        form = PixelTargets.of(self.head, layout, f"{self.name} holds regions")
        count = len(document.categories)
        bare = form.channels == count > 1  # a class for each category, none for the background
        if 1 < form.channels < count or count >= IGNORED - 1:
            raise DataError(
                f"{self.name} has {count} categories, but the output {self.head.name!r} has {form.channels} classes; "
                f"it needs {count + 1}, of which 0 is the background, or {count} without one; at most {IGNORED - 2}."
            ).about(self.head.name, got=form.channels, wanted=count + 1)
        inputs, kept = self.read_sources(document.sources(turned=turned), specs)
        found: GrowingArray | None = None
        for index in kept:
            image = document.images[index]
            height, width = image["height"], image["width"]
            labels = np.full((height, width), IGNORED if bare else 0, np.uint8)
            parts = []
            for each in document.objects(image):
                try:
                    pixels = region(each.get("segmentation"), height, width)
                except (ValueError, TypeError, OverflowError) as error:
                    raise DataError(
                        f"{self.name} has the annotation {each.get('id')} with a segmentation of another form "
                        f"({error}); it needs polygons or run lengths of {height} x {width} pixels."
                    ).about(each.get("id")) from error
                parts.append((np.count_nonzero(pixels), document.labels[each["category_id"]], pixels))
            for _, label, pixels in sorted(parts, key=lambda part: -part[0]):
                labels[pixels] = 1 if form.channels == 1 else label + (not bare)
            resized = nearest(labels, layout, form.size)
            found = found or GrowingArray(resized.shape, np.dtype(np.uint8))
            found.append(resized[None])
        assert found is not None
        names = [str(document.images[index]["file_name"]) for index in kept]
        return inputs, form.of_labels(found.finish(), names.__getitem__)

    def _keypoints(
        self, document: _Document, specs: Sequence[TensorSpec], layout: Layout, turned: bool
    ) -> tuple[dict[str, object], object]:
        assert self.head is not None
        names = [each.get("keypoints") for each in document.categories]
        counts = {len(own) for own in names if isinstance(own, list) and own}
        shape = tuple(self.head.spec.shape or ())[1:]
        if len(counts) != 1 or shape not in ((2 * (count := min(counts)),), (count, 2)):
            has = "no keypoints" if not counts else f"categories of {' and '.join(map(str, sorted(counts)))} keypoints"
            wanted = "keypoints" if not counts else f"(batch, {2 * min(counts)}) or (batch, {min(counts)}, 2)"
            raise DataError(
                f"{self.name} has {has}, but the output {self.head.name!r} of the loss {self.head.loss.name} has the "
                f"shape {self.head.spec.describe_shape()}; it needs {wanted}."
            ).about(self.head.name, got=shape)
        sources, rows, left_out = [], [], 0
        for image in document.images:
            for each in document.objects(image):
                points = document.points(each, count)
                if each.get("iscrowd") or not points[:, 2].all():
                    left_out += 1
                    continue
                edges = 0, 0, image["width"], image["height"]
                if "bbox" in each:
                    x, y, width, height = document.box(each)
                    edges = (
                        max(0, int(np.floor(x))),
                        max(0, int(np.floor(y))),
                        min(image["width"], int(np.ceil(x + width))),
                        min(image["height"], int(np.ceil(y + height))),
                    )
                size = edges[2] - edges[0], edges[3] - edges[1]
                if min(size) < 1:
                    left_out += 1
                    continue
                rows.append(Frame.of(layout, *size).fractions(points[:, :2] - edges[:2]))
                path = document.path(image)
                sources.append(ImageSource(str(path), part_of(path, edges, document.check(image), turned=turned)))
        if not sources:
            raise DataError(f"{self.name} has no object with all its keypoints labelled.")
        if left_out:
            _logger.warning(
                "%s: %s without a label for each keypoint, left out.", self.name, plural(left_out, "object")
            )
        inputs, kept = self.read_sources(sources, specs)
        return inputs, np.array(rows, np.float32)[kept].reshape(len(kept), *shape)


KEPT: Final = "coco"
"""Name of the categories among what a model keeps of its training data."""


@dataclass(frozen=True)
class CocoData(DataSource):
    """A file of which a model keeps the categories."""

    file: CocoFile

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the images and targets."""
        file, document = self.file, _Document.of(self.file)
        inputs = [spec for spec in wanted.specs if not spec.beside]
        found = file.read_document(document, wanted.specs, target=wanted.target, need_target=wanted.need_target)
        dataset = ArrayDataset(*wanted.joined(found, file.name), specs=inputs, name=file.name)
        dataset.kept = {KEPT: list(document.names)}
        return dataset


class Frame(NamedTuple):
    """Place of an image's pixels in what the model reads: scaled, then cut."""

    scale: tuple[float, float]
    offset: tuple[float, float]
    size: tuple[float, float]

    @classmethod
    def of(cls, layout: Layout, width: int, height: int) -> Frame:
        """Return the frame of an image of this size, read in a layout."""
        resizing = layout.resizing
        if resizing is None:
            return cls((1 / width, 1 / height), (0, 0), (1, 1))
        edges = resizing.edges
        if len(edges) == 1:
            edges = tuple(int(edges[0] * side / min(width, height)) for side in (height, width))
        high, wide = edges if edges else (height, width)
        cut = resizing.crop or (high, wide)
        return cls((wide / width, high / height), ((wide - cut[1]) // 2, (high - cut[0]) // 2), (cut[1], cut[0]))

    def fractions(self, points: Any) -> Array:
        """Return points [K, 2] in pixels of the image as fractions of what the model reads."""
        found: Array = (np.asarray(points, np.float64) * self.scale - self.offset) / self.size
        return found


class _Document(NamedTuple):
    """The content of a file, checked."""

    name: str
    folder: Path
    images: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    labels: Mapping[Any, int]
    by_image: Mapping[Any, list[dict[str, Any]]]

    @classmethod
    def of(cls, file: CocoFile) -> _Document:
        """Read a file.

        Raises:
            DataError: It cannot be read, or has another form.
        """
        name = file.name
        try:
            content = read_json(file.path, _LIMIT)
        except FileNotFoundError as error:
            raise DataError(f"{name} does not exist; give a JSON file in COCO's format.") from error
        except (OSError, RefusedFileError) as error:
            raise DataError(f"{name} cannot be read as JSON: {str(error).rstrip('.')}.") from error
        lists = {key: _records(content, key, name) for key in ("images", "annotations", "categories")}
        images, annotations = lists["images"], lists["annotations"]
        categories = sorted(lists["categories"], key=lambda each: int(_field(each, "id", int, f"{name}: a category")))
        for image in images:
            for key, kind in (("id", int | str), ("file_name", str), ("width", int), ("height", int)):
                _field(image, key, kind, f"{name}: an image")
            if min(image["width"], image["height"]) < 1:
                raise DataError(f"{name}: the image {image['file_name']!r} has no size.")
        if not images:
            raise DataError(f"{name} has no images.")
        for key, records in (("images", images), ("categories", categories)):
            counts = Counter(each["id"] for each in records)
            if twice := [known for known, count in counts.items() if count > 1]:
                raise DataError(f"{name} has several {key} of the id {twice[0]!r}; give each its own.").about(twice[0])
        labels = {each["id"]: label for label, each in enumerate(categories)}
        by_image: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in images}
        for each in annotations:
            for whose, known in (("image", by_image), ("category", labels)):
                given = each.get(f"{whose}_id")
                if not isinstance(given, int | str) or given not in known:
                    raise DataError(
                        f"{name} has the annotation {each.get('id')} of the {whose} {given!r}, which is not in the "
                        "file; write it again with all of its images and categories."
                    ).about(each.get("id"), got=given)
            by_image[each["image_id"]].append(each)
        folder = default_folder(file.path, images[0]["file_name"]) if file.images is None else Path(file.images)
        found = cls(name, folder, images, categories, labels, by_image)
        missing = [path for image in images if not (path := found.path(image)).is_file()]
        if missing and not (file.skip_broken and len(missing) < len(images)):
            raise DataError(
                f"{name} has {plural(len(images), 'image')}, of which {len(missing)} are missing, such as "
                f"'{missing[0]}'; name their folder by images= or --images."
            ).about(str(missing[0]), got=len(missing))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the categories in the order of their classes."""
        return tuple(str(each.get("name", each["id"])) for each in self.categories)

    def path(self, image: Mapping[str, Any]) -> Path:
        """Return the path of an image."""
        return self.folder / str(image["file_name"])

    def sources(self, *, turned: bool) -> list[ImageSource]:
        """Return the images to read, whose sizes are checked."""
        pairs = [(self.path(image), self.check(image)) for image in self.images]
        return [ImageSource(str(path), checked_file(path, check, turned=turned)) for path, check in pairs]

    def check(self, image: Mapping[str, Any]) -> Callable[[Path, tuple[int, int]], None]:
        """Return the check of the width and height of an image against those of the file."""
        wanted = image["width"], image["height"]

        def check(path: Path, size: tuple[int, int]) -> None:
            if size != wanted:
                turn = "; its EXIF tag rotates it, give orient=False" if size == wanted[::-1] else ""
                raise DataError(
                    f"'{path}' has {size[0]} x {size[1]} pixels, but {self.name} says {wanted[0]} x {wanted[1]}, to "
                    f"which its objects belong{turn}."
                ).about(str(path), got=size, wanted=wanted)

        return check

    def objects(self, image: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the annotations of an image."""
        return self.by_image[image["id"]]

    def points(self, each: Mapping[str, Any], count: int) -> Array:
        """Return the keypoints [K, 3] of an object as x and y in pixels and 0 where nobody labelled them."""
        given = each.get("keypoints") or [0] * (3 * count)
        if not isinstance(given, list) or len(given) != 3 * count or not all(_is_number(value) for value in given):
            raise DataError(
                f"{self.name} has the annotation {each.get('id')} without {count} keypoints (x, y, v)."
            ).about(each.get("id"))
        return np.array(given, np.float64).reshape(count, 3)

    def box(self, each: Mapping[str, Any]) -> tuple[float, float, float, float]:
        """Return left, top, width and height of an object in pixels."""
        box = each.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(_is_number(side) for side in box):
            raise DataError(
                f"{self.name} has the annotation {each.get('id')} with the bbox {box}; it needs four numbers, left, "
                "top, width and height in pixels."
            ).about(each.get("id"), got=box)
        return tuple(map(float, box))  # type: ignore[return-value]


def _records(content: Any, key: str, name: str) -> list[dict[str, Any]]:
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise DataError(
            f"{name} has no list of {key}; COCO's format is an object of images, annotations and categories."
        )
    return found


def _field(record: Mapping[str, Any], key: str, kind: Any, whose: str) -> Any:
    value = record.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DataError(f"{whose} has {key} {value!r}; it needs {_NEEDS[key]}.").about(key, got=value)
    return value


_NEEDS: Final = {
    "id": "a number",
    "file_name": "the name of the file",
    "width": "the width in pixels",
    "height": "the height in pixels",
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
