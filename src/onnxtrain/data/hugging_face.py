"""Datasets of Hugging Face's package ``datasets``: columns to inputs, memory-mapped as that package maps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxtrain.data.conversion import Array, TensorSpec
from onnxtrain.data.frames import as_input, check_width, choose_columns
from onnxtrain.data.images import Layout, check_pixel_count, pixels_of
from onnxtrain.data.naming import check_beside, check_pasts
from onnxtrain.errors import DataError


class HuggingFaceExamples:
    """A ``datasets.Dataset`` as examples of a `MapDataset`.

    Columns named like the model's inputs are these. A model with one input takes the only other column, whatever its
    name, such as one of pictures, or else all numbers side by side. Labels of type ``ClassLabel`` are their names.

    Args:
        dataset: the dataset, with its own format or transform.
        specs: what the model needs of its inputs.
        target: the column of targets.
        need_target: whether there have to be targets.

    Raises:
        DataError: columns do not make the inputs.
    """

    def __init__(
        self, dataset: Any, specs: Sequence[TensorSpec], *, target: str | None = None, need_target: bool = True
    ) -> None:
        self._dataset, self._specs = dataset, list(specs)
        caches = specs[0].pasts if specs else ()
        self._caches = [name for name in dataset.column_names if name in caches]
        names = [name for name in dataset.column_names if name not in caches]
        beside = [spec.name for spec in specs if spec.beside]
        check_beside(beside, names, "the dataset has no column")
        others = [name for name in names if name != target and name not in beside]
        self._features: list[str] | None = None
        self.columns: dict[str, tuple[str, ...]] = {}
        known = target in names if need_target else target is None
        if known and len(specs) - len(beside) == len(others) == 1 and not _is_table(dataset, others[0], specs[0]):
            self._columns = {specs[0].name: others[0], **{name: name for name in beside}}
        else:
            chosen = choose_columns(names, specs, "the dataset", target=target, need_target=need_target)
            self._features = chosen.features
            if chosen.features is not None:
                check_width(chosen, specs[0], "the dataset")
                self.columns = {specs[0].name: tuple(chosen.features)}
            self._columns = {spec.name: spec.name for spec in specs}
        self._target = target if need_target else None
        self._names = _class_names(dataset, self._target)
        self.declared_labels = tuple(self._names or ())
        self._dataset = dataset.select_columns(
            [
                *(self._features or self._columns.values()),
                *(beside if self._features else []),
                *([target] if self._target else []),
                *self._caches,
            ]
        )

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, rows: Sequence[int]) -> object:
        """Some examples as inputs by name and targets."""
        found = self._dataset[list(rows)]
        check_pasts({name: found[name] for name in self._caches}, self._specs, "the dataset")
        if self._features is not None:
            inputs = {self._specs[0].name: np.stack([_numbers(found[name], name) for name in self._features], axis=1)}
            alone = [spec for spec in self._specs if spec.beside]
        else:
            inputs, alone = {}, self._specs
        inputs |= {spec.name: self._input(found[self._columns[spec.name]], spec) for spec in alone}
        if self._target is None:
            return inputs if len(inputs) > 1 else next(iter(inputs.values()))
        return inputs, self._labels(found[self._target])

    def _input(self, column: Sequence[Any], spec: TensorSpec) -> Array:
        if len(column) and hasattr(column[0], "convert"):  # pictures of Pillow
            return _pictures(column, spec)
        return as_input(_numbers(column, spec.name), spec)

    def _labels(self, column: Sequence[Any]) -> Array:
        values: Array = np.asarray(column)
        if self._names is None or values.dtype.kind not in "iu":
            return values
        unknown = values[(values < 0) | (values >= len(self._names))]
        if len(unknown):
            raise DataError(
                f"the column '{self._target}' holds {unknown[0]}, which is none of its {len(self._names)} class names; "
                "leave such examples out with dataset.filter."
            )
        return np.array(self._names)[values]

    def all_targets(self) -> Array | None:
        """The whole column of targets."""
        if self._target is None:
            return None
        return self._labels(list(self._dataset.with_format(None).select_columns([self._target])[self._target]))

    def fingerprint(self) -> str | None:
        """Return the fingerprint that ``datasets`` computes."""
        return getattr(self._dataset, "_fingerprint", None)


def is_hugging_face(value: object) -> bool:
    """Return whether a value is a dataset of the package ``datasets``."""
    return type(value).__module__.partition(".")[0] == "datasets" and hasattr(value, "column_names")


def refuse_other_kinds(value: Any) -> None:
    """Refuse what is no table of examples.

    Raises:
        DataError: it is several datasets, or a stream.
    """
    if isinstance(value, dict):
        raise DataError(f"the data is a dictionary of datasets ({', '.join(value)}); give one, such as data['train'].")
    if not hasattr(value, "select_columns") or not hasattr(value, "__len__"):
        raise DataError(
            "the data is a stream of examples; give its batches: data=lambda: dataset.with_format('numpy').iter(32)."
        )


def _class_names(dataset: Any, target: str | None) -> list[str] | None:
    feature = None if target is None else (dataset.features or {}).get(target)
    names = getattr(feature, "names", None)
    return None if names is None else list(names)


def _is_table(dataset: Any, name: str, spec: TensorSpec) -> bool:
    """Return whether a column of one number for each example is all columns of a table."""
    if spec.shape is None or len(spec.shape) != 2:
        return False
    kind = getattr((dataset.features or {}).get(name), "dtype", "")
    return str(kind).startswith(("int", "uint", "float", "bool"))


def _numbers(column: Sequence[Any], name: str) -> Array:
    """A column as an array.

    Raises:
        DataError: it holds texts where numbers are needed, nothing, or lists of several lengths.
    """
    try:
        values = np.asarray(column)
    except ValueError:
        values = np.empty(0, object)
    if values.dtype == object:
        kind = "a missing value" if any(value is None for value in column) else "lists of several lengths or objects"
        raise DataError(f"the column '{name}' holds {kind}; fill it in, or make arrays of it with dataset.map.")
    return values


def _pictures(column: Sequence[Any], spec: TensorSpec) -> Array:
    layout = Layout.of(spec, "the dataset")
    for image in column:
        check_pixel_count(image, "a picture of the dataset")
    found = [layout.arranged(pixels_of(image, layout.channels, layout.size)) for image in column]
    if any(pixels.shape != found[0].shape for pixels in found):
        raise DataError(
            "the dataset holds pictures of several sizes, and the model's input leaves the size open; resize them."
        )
    stacked = np.stack(found)
    return stacked.astype(np.float32) / np.float32(255) if spec.dtype.kind not in "iu" else stacked
