"""Augmentations of batches of images whose targets move or mix along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from onnxtrain.data import Dataset
from onnxtrain.data.conversion import Array, kind_of
from onnxtrain.data.files import GrowingArray
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.losses.base import ClassLoss

if TYPE_CHECKING:
    from onnxtrain.losses.heads import LossHead
    from onnxtrain.training.trainer import Trainer


def image_axes(images: Any) -> tuple[int, int]:
    """Return the axes of height and width of images [N, C, H, W], [N, H, W, C] or [N, H, W].

    Raises:
        DataError: They are none of these.
    """
    shape = np.shape(images) if isinstance(images, np.ndarray) else ()
    if len(shape) not in (3, 4):
        got = f"{len(images)} inputs" if isinstance(images, dict) else f"an input of shape {shape}"
        raise DataError(f"This is for one input of images, [N, C, H, W] or [N, H, W, C], but the model has {got}.")
    last = len(shape) == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3)
    if not last and len(shape) == 4 and shape[1] not in (1, 3) and shape[3] < min(shape[1:3]):
        raise DataError(
            f"The images have the shape {shape}, whose channels seem to be last; there they need to be 1 or 3, and "
            "more of them come first, [N, C, H, W]."
        ).about("images", got=shape)
    return (1, 2) if last or len(shape) == 3 else (2, 3)


def moves_along(shape: Sequence[int], axes: tuple[int, int], image: Sequence[int]) -> bool:
    """Return whether two axes are the height and width of an image, but for its scale."""
    return abs(shape[axes[0]] * image[1] - shape[axes[1]] * image[0]) <= max(image)


def rows_of_numbers(heads: Sequence[LossHead]) -> str:
    """Return the first output with several numbers per image that are no classes, so that they may be positions."""
    for head in heads:
        shape = head.spec.shape or ()
        numbers = head.declared.predicts in ("numbers", None) and kind_of(head.spec.dtype) == "float"
        if numbers and len(shape) == 2 and shape[1] != 1:
            return head.name
    return ""


@checks_arguments
@dataclass(frozen=True)
class Flip:
    """Mirror images at random, and masks, boxes or keypoints along: ``fit(..., augment=onnxtrain.images.Flip())``.

    Targets are masks where they have the axes of height and width, boxes [N, M, 5] as of ``yolo`` and ``detr``, or, if
    ``keypoints`` is given, x and y in fractions of the image, [N, 2 K] or [N, K, 2]. Classes and single numbers stay as
    they are. Rows of numbers of a regression may be positions, so that they need ``keypoints``.

    Args:
        p: Probability of each flip, from 0 to 1.
        horizontal: Swap left and right.
        vertical: Swap top and bottom.
        keypoints: The keypoint that each one becomes in a mirrored image, such as ``(1, 0, 2)`` for left eye, right
            eye and nose; ``()`` where rows of numbers are no positions, and stay as they are.
    """

    p: float = 0.5
    horizontal: bool = True
    vertical: bool = False
    keypoints: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise OptionError(f"p is {self.p}; Flip needs a probability from 0 to 1.").about("p", got=self.p)
        if self.keypoints is not None and sorted(self.keypoints) != [*range(len(self.keypoints))]:
            raise OptionError(
                f"keypoints is {[*self.keypoints]}; Flip needs each number from 0 to {len(self.keypoints) - 1} once."
            ).about("keypoints", got=self.keypoints)

    def opened(self, trainer: Trainer, data: Dataset) -> Dataset:
        """Return the training data, whose targets can be mirrored.

        Raises:
            OptionError: The targets may be positions that nothing tells how to mirror.
        """
        heads = trainer.objective.heads
        if len(heads) > 1 and (rows_of_numbers(heads) or any(len(head.spec.shape or ()) > 2 for head in heads)):
            raise OptionError(
                f"Flip mirrors the targets of one output along, but this training has {len(heads)}; leave it out."
            )
        if self.keypoints is None and (name := rows_of_numbers(heads)):
            raise OptionError(
                f"The output {name!r} has several numbers per image, which may be positions; give Flip the keypoint "
                "that each one becomes, keypoints=(1, 0, ...), or keypoints=() if they stay as they are."
            ).about("keypoints")
        return data

    def __call__(self, images: Array, targets: Array | None, rng: np.random.Generator) -> tuple[Array, Array | None]:
        """Return images and targets, of which some are mirrored."""
        axes = image_axes(images)
        for axis, wanted in ((1, self.horizontal), (0, self.vertical)):
            if wanted:
                chosen = rng.random(len(images)) < self.p
                images[chosen] = np.flip(images[chosen], axes[axis])
                if targets is not None:
                    targets[chosen] = self._mirrored(targets[chosen], images.shape, axes, 1 - axis)
        return images, targets

    def _mirrored(self, targets: Array, images: tuple[int, ...], axes: tuple[int, int], column: int) -> Array:
        """Return mirrored targets; column 0 is x, and 1 is y."""
        if self.keypoints:
            count = len(self.keypoints)
            if targets.shape[1:] not in ((2 * count,), (count, 2)):
                raise DataError(
                    f"Flip has {count} keypoints, but the targets have the shape {targets.shape}; it needs "
                    f"[N, {2 * count}] or [N, {count}, 2]."
                ).about("targets", got=targets.shape)
            moved = targets.reshape(len(targets), count, 2).copy()
            moved[..., column] = 1 - moved[..., column]
            order = [*self.keypoints] if column == 0 else [*range(count)]
            return moved[:, order].reshape(targets.shape)
        if targets.ndim < 3:
            return targets
        real, size = targets.dtype.kind == "f", (images[axes[0]], images[axes[1]])
        if targets.ndim == 3 and real and targets.shape[-1] == 5:
            boxes = targets.copy()
            boxes[..., 1 + column] = np.where(boxes[..., 0] < 0, boxes[..., 1 + column], 1 - boxes[..., 1 + column])
            return boxes
        height, width = (1, 2) if targets.ndim == 3 else axes
        points = targets.ndim == 3 and real and targets.shape[-1] < 5 and targets.shape[1:] != size
        if points or targets.ndim > 4 or not moves_along(targets.shape, (height, width), size):
            raise DataError(
                f"Flip cannot mirror targets of the shape {targets.shape} along with images of {size[0]} x {size[1]} "
                "pixels; it needs masks, boxes [N, M, 5], or keypoints, with keypoints=."
            ).about("targets", got=targets.shape)
        return np.flip(targets, width if column == 0 else height)


_BLOCK: Final = 2**14
"""Labels that are converted at a time."""


@dataclass(frozen=True)
class _Mixed:
    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha < np.inf:
            raise OptionError(
                f"alpha is {self.alpha}; {type(self).__name__} needs a finite number greater than 0."
            ).about("alpha", got=self.alpha)

    def opened(self, trainer: Trainer, data: Dataset) -> Dataset:
        """Return training data whose labels are distributions over the classes, which can be mixed."""
        name, heads = type(self).__name__, trainer.objective.heads
        head = heads[0] if len(heads) == 1 else None
        mixable = head is not None and isinstance(head.declared, ClassLoss) and "values" in head.declared.target_kinds
        if head is None or not mixable or data.weighted:
            has = "sample_weight" if data.weighted else f"the loss {'' if head is None else head.loss.name}".strip()
            raise OptionError(f"{name} mixes the classes of one output, but this training has {has}; leave it out.")
        if head.form.kind == "values":
            return data
        classes = head.classes
        if classes is None or len(head.spec.shape or ()) != 1:
            raise OptionError(f"{name} needs one label per image, and an output {head.name!r} [N, classes].")
        kinds = np.arange(classes)

        def spread(labels: Array) -> Array:
            wrong = (labels < 0) | (labels >= classes)
            if wrong.any():
                raise DataError(f"{name} needs labels 0 to {classes - 1}, but one is {labels[wrong][0]}.")
            found = GrowingArray((classes,), np.dtype(np.uint8))
            for start in range(0, len(labels), _BLOCK):
                found.append(labels[start : start + _BLOCK, None] == kinds)
            return found.finish()

        return trainer.open_data(data.adapting(spread))


@checks_arguments
@dataclass(frozen=True)
class Mixup(_Mixed):
    """Mix images and their classes in pairs: ``fit(..., augment=onnxtrain.images.Mixup())``.

    x = l x_i + (1 - l) x_j and y = l y_i + (1 - l) y_j, with one l of Beta(alpha, alpha) per batch and j a permutation
    of the batch. Labels become distributions over the classes, as ``softmax_cross_entropy`` reads them.

    Args:
        alpha: Strength of the mixing, above 0.

    Source:
        H. Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018.
    """

    alpha: float = 0.2

    def __call__(self, images: Array, targets: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return mixed images and targets."""
        image_axes(images)
        share, other = rng.beta(self.alpha, self.alpha), rng.permutation(len(images))
        return _weighted(images, images[other], share), _weighted(targets, targets[other], share)


@checks_arguments
@dataclass(frozen=True)
class CutMix(_Mixed):
    """Paste a part of another image, and mix the classes by area: ``fit(..., augment=onnxtrain.images.CutMix())``.

    The part has sqrt(1 - l) of height and width, with one l of Beta(alpha, alpha) per batch, around a random pixel; it
    is cut at the edges of the image, and l is what remains of its area. Labels become distributions over the classes.

    Args:
        alpha: Strength of the mixing, above 0.

    Source:
        S. Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", ICCV
        2019.
    """

    alpha: float = 1.0

    def __call__(self, images: Array, targets: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return images with parts of others, and mixed targets."""
        axes = image_axes(images)
        share, other = rng.beta(self.alpha, self.alpha), rng.permutation(len(images))
        part: list[slice] = [slice(None)] * images.ndim
        area = 1.0
        for axis in axes:
            size = images.shape[axis]
            half, middle = int(size * np.sqrt(1 - share)) // 2, int(rng.integers(size))
            part[axis] = slice(max(0, middle - half), min(size, middle + half))
            area *= (part[axis].stop - part[axis].start) / size
        mixed = images.copy()
        mixed[tuple(part)] = images[other][tuple(part)]
        return mixed, _weighted(targets, targets[other], 1 - area)


def _weighted(one: Array, other: Array, share: float) -> Array:
    found = one * share + other * (1 - share)
    return found.astype(one.dtype) if one.dtype.kind == "f" else np.rint(found).astype(one.dtype)
