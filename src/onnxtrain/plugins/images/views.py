"""Predictions averaged over views of an image (test-time augmentation)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import onnx

from onnxtrain.data import Dataset, TensorSpec
from onnxtrain.data.conversion import Array
from onnxtrain.data.data_names import read_names
from onnxtrain.data.images import Layout
from onnxtrain.data.opening import open_dataset
from onnxtrain.editing.working_copy.inputs import mark_image_inputs
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.file import ModelFile
from onnxtrain.plugins.images.augmentation import image_axes, moves_along, rows_of_numbers
from onnxtrain.training.data_adapter import Reading
from onnxtrain.training.inference.forward import predict
from onnxtrain.training.objective import of_model
from onnxtrain.training.trainer import Trainer

_FLIPS: Final = ("horizontal", "vertical")


@checks_arguments
def predict_views(
    model: Trainer | str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    flips: Sequence[Literal["horizontal", "vertical"]] = ("horizontal",),
    margin: int = 0,
    batch_size: int = 256,
) -> Array | dict[str, Array]:
    """Predict several views of each image, and return the mean of the outputs (test-time augmentation).

    Views are the image and its mirror images; with a margin, also five parts of it: the corners and the middle. Outputs
    with a value per pixel are mirrored back before the mean is taken. Outputs per image are averaged as they are: this
    is for classes and amounts, not for positions.

    Args:
        model: A trainer, the path of a model, or a loaded one, with one input of images.
        data: Images in any form that ``predict`` takes.
        flips: Mirror images to add: of ``"horizontal"``, ``"vertical"``; both together give four views.
        margin: Pixels by which images are read larger than the model's input, so that parts can be cut: images in
            files are resized to that size, arrays need it.
        batch_size: Images per batch.

    Returns:
        What ``predict`` returns, averaged: an array, or one by name for several outputs.

    Raises:
        DataError: The model has other inputs than one of images, or an output whose positions do not move with the
            pixels, such as boxes.
        OptionError: An unknown flip, a negative margin, or a margin where the model leaves the size open or has an
            output per pixel; a trainer of a regression with several numbers per image, which may be positions.

    Example:
        >>> import onnxtrain
        >>> onnxtrain.images.predict_views(onnxtrain.examples.digits_cnn(), np.zeros((2, 1, 8, 8))).shape
        (2, 10)
    """
    names: list[str] = [flips] if isinstance(flips, str) else [*dict.fromkeys(flips)]
    if unknown := [name for name in names if name not in _FLIPS]:
        raise OptionError(f"flips has {unknown[0]!r}; it takes 'horizontal' and 'vertical'.").about("flips")
    if margin < 0:
        raise OptionError(f"margin is {margin}; it needs pixels, 0 or more.").about("margin", got=margin)
    dataset, layout, output = _opened(model, data, margin)
    total: dict[str, Array] = {}
    starts = [(0, 0), (0, margin), (margin, 0), (margin, margin), (margin // 2, margin // 2)] if margin else [(0, 0)]
    mirrored = [tuple(name for name in names if chosen >> names.index(name) & 1) for chosen in range(2 ** len(names))]
    views = [(start, own) for start in starts for own in mirrored]
    sizes: list[tuple[int, int]] = []
    for start, own in views:
        batches = _batches(dataset, batch_size, start, layout.size, own, sizes)
        for name, array in _predicted(model, batches, batch_size).items():
            found = _restored(name or output, array, own, layout, margin, sizes) / len(views)
            total[name] = total[name] + found if name in total else found
    return next(iter(total.values())) if len(total) == 1 else total


def _opened(model: Any, data: Any, margin: int) -> tuple[Dataset, Layout, str]:
    """Open images that are larger by a margin; return them, the layout of the model's input, and its first output."""
    if isinstance(model, Trainer):
        objective, folder, names = model.objective, model.data_adapter.folder, model.data_adapter.names
        if name := rows_of_numbers(objective.heads):
            raise OptionError(
                f"The output {name!r} has several numbers per image, which may be positions that move with the views; "
                "if they do not, give predict_views the model alone, trainer.model()."
            ).about(name)
    else:
        file = ModelFile.load(model)
        working = file.training_model()
        mark_image_inputs(working)
        objective, folder, names = of_model(working), file.folder, read_names(file, None)
    specs = names.specs(objective.inputs)
    if len(specs) != 1:
        raise DataError(f"predict_views is for one input of images, but the model has {len(specs)} inputs.")
    layout = Layout.of(specs[0], "the data")
    if margin and layout.size is None:
        raise OptionError("margin is for a model of a fixed image size; this one leaves it open.").about("margin")
    spec = specs[0] if not margin else _larger(specs[0], layout, margin)
    source = Reading.of(objective, folder).read(data)
    return open_dataset(source, [spec], need_target=False), layout, str(objective.model.graph.outputs[0].name)


def _larger(spec: TensorSpec, layout: Layout, margin: int) -> TensorSpec:
    shape = [*(spec.shape or ())]
    axes = (1, 2) if layout.axis in (None, 2) else (2, 3)
    for axis in axes:
        size = shape[axis]
        assert isinstance(size, int)
        shape[axis] = size + margin
    resizing = spec.resizing
    if resizing is not None and resizing.crop is not None:
        resizing = resizing._replace(crop=(resizing.crop[0] + margin, resizing.crop[1] + margin))
    return dataclasses.replace(spec, shape=tuple(shape), resizing=resizing)


def _batches(
    dataset: Dataset,
    batch_size: int,
    start: tuple[int, int],
    size: tuple[int, int] | None,
    flips: Sequence[str],
    sizes: list[tuple[int, int]],
) -> Callable[[], Iterator[dict[str, Array]]]:
    def batches() -> Iterator[dict[str, Array]]:
        for batch in dataset.batches(batch_size):
            ((name, images),) = batch.inputs.items()
            axes = image_axes(images)
            part = [slice(None)] * images.ndim
            for axis, first, length in zip(axes, start, size or (), strict=size is not None):
                part[axis] = slice(first, first + length)
            sizes[:] = [(images.shape[axes[0]], images.shape[axes[1]])]
            yield {name: np.ascontiguousarray(_flipped(images[tuple(part)], flips, axes))}

    return batches


def _predicted(model: Any, batches: Any, batch_size: int) -> dict[str, Array]:
    found = model.predict(batches) if isinstance(model, Trainer) else predict(model, batches, batch_size=batch_size)
    return found if isinstance(found, dict) else {"": found}


def _restored(
    name: str, array: Array, flips: Sequence[str], layout: Layout, margin: int, sizes: Sequence[tuple[int, int]]
) -> Array:
    """Return an output of a view as one of the image."""
    if array.ndim < 3:
        return array
    axes = (1, 2) if array.ndim == 3 or layout.axis == 2 else (2, 3)
    per_pixel = array.shape[1:] == layout.size or (
        array.ndim == 4 and all(moves_along(array.shape, axes, size) for size in sizes)
    )
    if not per_pixel:
        raise DataError(
            f"The output {name!r} has the shape {array.shape}; predict_views averages an output per image, or per "
            "pixel, [N, C, H, W]."
        ).about(name, got=array.shape)
    if margin:
        raise OptionError(
            f"margin is {margin}, but the output {name!r} has a value per pixel, which parts of an image do not share; "
            "leave it out."
        ).about("margin", got=margin)
    return _flipped(array, flips, axes)


def _flipped(array: Array, flips: Sequence[str], axes: tuple[int, int]) -> Array:
    return np.flip(array, tuple(axes[1 - _FLIPS.index(flip)] for flip in flips))
