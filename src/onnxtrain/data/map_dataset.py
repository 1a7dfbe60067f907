"""Datasets that return one example per index: PyTorch's map-style datasets and those of Hugging Face."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np

from onnxtrain.data.base import Batch, Dataset, DataSource, Facts, epoch_order
from onnxtrain.data.conversion import Array, Rescaled, TensorSpec, kind_of, to_numpy
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.data.images import Layout, check_image, factors, is_image, pixels_of, to_record
from onnxtrain.data.iterable_dataset import IterableDataset
from onnxtrain.data.naming import Wanted, as_input, check_beside, check_caches, in_order
from onnxtrain.data.target_checks import check_weights
from onnxtrain.errors import DataError

_LOOKED_AT: Final = 32
"""Examples that are read before the first epoch to determine the kind of targets."""


_SORTED_BATCHES: Final = 50
"""Batches that are sorted by length at a time."""


class Examples(Facts, ABC):
    """Base of the examples that a `MapDataset` reads.

    Attributes:
        columns: Names of the columns of tables, by input.
        lengths: Length of each example, where a batch is as long as its longest one.
    """

    columns: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    lengths: Array | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> object:
        """Return some examples as one batch, in any form that an iterable of batches may have."""

    def weights_of(self, weights: Array, name: str) -> Array:
        """Return the weights of the examples, given those of the rows of the data."""
        return of_rows(weights, len(self), name)

    def all_targets(self) -> Array | None:
        """Return all targets, if that does not read the examples."""
        return None

    def fingerprint(self) -> str | None:
        """Return an identifier of the content, or None if there is none."""
        return None


class ExampleSource(DataSource):
    """Data that convert themselves to examples for a model; messages have their name."""

    name: str

    @abstractmethod
    def examples(self, specs: Sequence[TensorSpec], *, need_target: bool = True) -> Examples:
        """Return the examples for the inputs of a model, with their targets on request."""

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the examples in batches."""
        return MapDataset(self.examples(wanted.specs, need_target=wanted.need_target), wanted, name=self.name)


class MapDataset(IterableDataset):
    """Batches of a map-style dataset, with batch size and shuffling of the training."""

    size: int

    borrows = False

    def __init__(self, examples: Examples, wanted: Wanted, *, name: str) -> None:
        super().__init__((), wanted)
        self._examples = examples
        self.pixels, self.declared_labels = examples.pixels, examples.declared_labels
        self.hints, self.of_tokens = examples.hints, examples.of_tokens
        self._indices: Array = np.arange(len(examples))
        self._seen: dict[str | None, Array | None] = {}
        self._row_weights: tuple[Array, TensorSpec] | None = None
        self.name = name
        self.size = len(self._indices)
        if not self.size:
            raise DataError(f"{name} is empty; at least one example is needed.").about(name)
        self.check_cut()

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns of tables, as far as they are known."""
        return {**super().columns, **self._examples.columns}

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Self:
        """Return the same data with named columns in the order of a model; see `Dataset.in_order_of`."""
        for spec in specs:
            names = self._examples.columns.get(spec.name)
            if names is not None and in_order(names, spec, self.name) != list(names):
                raise DataError(f"{self.name} was opened for another order of its columns; pass the original dataset.")
        return super().in_order_of(specs)

    def values(self, name: str | None = None) -> Array | None:
        """Return targets of the first examples; of all where they are strings, so that every class is known."""
        if name not in self._beside or (name is None and not (self._wanted.need_target or self._wanted.columns)):
            return None
        if name not in self._seen:
            self._seen[name] = self._look(name)
        found = self._seen[name]
        return None if found is None else self.adapted(found, name, "the target array")

    def _look(self, name: str | None) -> Array | None:
        known = self._examples.all_targets() if name is None else None
        if known is not None:
            return known[self._indices]
        first = self._targets_of(name, self._indices[:_LOOKED_AT])
        if first is None or kind_of(first.dtype) != "string":
            return first
        rest = (self._indices[start : start + _LOOKED_AT] for start in range(_LOOKED_AT, self.size, _LOOKED_AT))
        found = [first, *(targets for rows in rest if (targets := self._targets_of(name, rows)) is not None)]
        return np.concatenate(found)

    def _targets_of(self, name: str | None, rows: Array) -> Array | None:
        inputs, only = self._matched(self._examples.batch(rows.tolist()), f"the examples {rows[0]} to {rows[-1]}")
        targets = only if name is None else inputs.get(name)
        return None if targets is None else to_numpy(targets, "the target array", may_miss=True)

    def with_weights(self, weights: Array | str, spec: TensorSpec) -> Self:
        """Return the same data with one weight per row; see `Dataset.with_weights`."""
        if isinstance(weights, str):
            return super().with_weights(weights, spec)
        result = copy.copy(self)
        own = self._examples.weights_of(check_weights(weights), self.name)
        result._row_weights = (own.astype(spec.dtype), spec)
        result.weighted = True
        return result

    def _read(self, batch_size: int, shuffled: tuple[int, int] | None, start: int) -> Iterator[Batch]:
        """Read all examples once, in batches; shuffled ones of different lengths are sorted a few at a time."""
        order, lengths = self._indices, self._examples.lengths
        if (chosen := epoch_order(self.size, shuffled)) is not None:
            order = order[chosen]
            if lengths is not None:
                order = order[by_length(lengths[order], batch_size)]
        for first in range(start * batch_size, self.size, batch_size):
            rows = order[first : first + batch_size]
            batch = self.batch_of(self._examples.batch(rows.tolist()), f"the batch of the examples {_some(rows)}")
            if self._row_weights is not None:
                weights, spec = self._row_weights
                batch.inputs[spec.name] = weights[rows]
            yield batch

    def batch_count(self, batch_size: int = 1) -> int | None:
        """Return the number of batches per epoch; the last batch may be smaller."""
        return Dataset.batch_count(self, batch_size)

    def take(self, indices: Array) -> Self:
        """Return the examples with these indices as a dataset."""
        subset = copy.copy(self)
        subset._indices, subset.size = self._indices[indices], len(indices)
        subset._seen = {}
        return subset

    def fingerprint(self) -> str | None:
        """Return an identifier of the content, or None if there is none."""
        found = self._examples.fingerprint()
        if found is None:
            return None
        own = f"{found} {self.size} {int(self._indices.sum())}"
        if self._row_weights is None:
            return own
        weights = Fingerprint()
        weights.add_array(self._row_weights[0])
        return f"{own} {weights.digest()}"


def of_rows(weights: Array, count: int, name: str, kept: Sequence[int] | None = None) -> Array:
    """Return the weights of the rows that are examples."""
    if len(weights) != count:
        raise DataError(
            f"sample_weight has {len(weights):,} weights, but {name} has {count:,} rows; give one per row."
        ).about("sample_weight", got=len(weights), wanted=count)
    return weights if kept is None else weights[np.asarray(kept)]


def by_length(lengths: Array, batch_size: int) -> Array:
    """Return an order in which the examples of a batch have similar lengths: some batches at a time are sorted."""
    found = []
    for start in range(0, len(lengths), _SORTED_BATCHES * batch_size):
        own = lengths[start : start + _SORTED_BATCHES * batch_size]
        order = start + np.argsort(-own, kind="stable")
        batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
        rest = batches.pop() if len(batches[-1]) < batch_size else None  # only the last batch of an epoch is smaller
        batches.sort(key=lambda batch: int(batch.min()))
        found += [*batches, *([] if rest is None else [rest])]
    return np.concatenate(found)


class IndexedExamples(Examples):
    """Examples from an object that returns one example for an index: a mapping, ``(input, target)``, or one array."""

    def __init__(self, source: Any, name: str, specs: Sequence[TensorSpec] = ()) -> None:
        self._source, self._name = source, name
        self._inputs = [spec for spec in specs if not spec.beside]

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, rows: Sequence[int]) -> object:
        """Some examples, put together array by array."""
        many: Callable[[Sequence[int]], Sequence[object]] | None = getattr(self._source, "__getitems__", None)
        found: list[Any] = list(many(rows)) if many is not None else [self._source[row] for row in rows]
        first = found[0]
        if isinstance(first, Mapping):
            specs = {spec.name: spec for spec in self._inputs}
            return {
                name: self._stacked([example[name] for example in found], rows, f"'{name}'", specs.get(name))
                for name in first
            }
        if isinstance(first, tuple | list) and not _is_plain(first):
            columns = zip(*found, strict=True)
            by_place = dict(enumerate(self._inputs))
            stacked = [
                self._stacked(list(column), rows, f"part {index}", by_place.get(index))
                for index, column in enumerate(columns)
            ]
            return tuple(stacked)
        return self._stacked(found, rows, "the example", next(iter(self._inputs), None))

    def _stacked(self, values: Sequence[object], rows: Sequence[int], part: str, spec: TensorSpec | None) -> Array:
        if spec is not None and is_image(values[0]):
            return _images(values, spec, self._name)
        arrays = [
            to_numpy(value, f"{part} of example {row} of {self._name}") for value, row in zip(values, rows, strict=True)
        ]
        wrong = next((index for index, array in enumerate(arrays) if array.shape != arrays[0].shape), None)
        if wrong is not None:
            raise DataError(
                f"{part} of example {rows[wrong]} of {self._name} has shape {arrays[wrong].shape}, but that of example "
                f"{rows[0]} has {arrays[0].shape}; bring them to one shape."
            ).about(part, got=arrays[wrong].shape, wanted=arrays[0].shape)
        return np.stack(arrays)


def is_map_style(value: object) -> bool:
    """Return whether a value is indexable but not iterable, so that it is no sequence of batches."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not hasattr(value, "__iter__")


def _is_plain(value: Sequence[object]) -> bool:
    return all(isinstance(item, int | float) for item in value)


def _some(rows: Array) -> str:
    return ", ".join(map(str, rows[:3])) + (" ..." if len(rows) > 3 else "")


class HuggingFaceExamples(Examples):
    """A ``datasets.Dataset`` as examples: columns by names of inputs, the only other one, or numbers stacked."""

    def __init__(self, dataset: Any, wanted: Wanted) -> None:
        self._specs, target = list(wanted.specs), wanted.target
        first, caches = self._specs[0], self._specs[0].kv_caches
        self._caches = [name for name in dataset.column_names if name in caches]
        names = [name for name in dataset.column_names if name not in caches]
        beside = [spec.name for spec in self._specs if spec.beside]
        check_beside(beside, names, "the dataset has no column")
        others = [name for name in names if name != target and name not in beside]
        known = target in names if wanted.need_target else target is None
        if known and len(self._specs) - len(beside) == len(others) == 1 and not _is_table(dataset, others[0], first):
            self._columns = {first.name: others, **{name: [name] for name in beside}}
        else:
            chosen = wanted.of_columns(names, "the dataset")
            chosen.check_width(first, "the dataset")
            self._columns = {spec.name: chosen.of(spec) for spec in self._specs}
            if chosen.features is not None:
                self.columns = {first.name: tuple(chosen.features)}
        self._target = target if wanted.need_target else None
        images = any(type(feature).__name__ == "Image" for feature in (dataset.features or {}).values())
        self.pixels = to_record(first.pixels) if images else None
        self._names = _class_names(dataset, self._target)
        self.declared_labels = tuple(self._names or ())
        read = itertools.chain(*self._columns.values(), [] if self._target is None else [self._target], self._caches)
        self._dataset = dataset.select_columns(list(read))

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, rows: Sequence[int]) -> object:
        """Return some examples as inputs by name and targets."""
        found = self._dataset[list(rows)]
        check_caches({name: found[name] for name in self._caches}, self._specs, "the dataset")
        inputs = {spec.name: self._input(found, spec) for spec in self._specs}
        if self._target is None:
            return inputs if len(inputs) > 1 else next(iter(inputs.values()))
        return inputs, self._labels(found[self._target])

    def _input(self, found: Mapping[str, Sequence[Any]], spec: TensorSpec) -> Array:
        names = self._columns[spec.name]
        if spec.name in self.columns:
            return np.stack([_numbers(found[name], name) for name in names], axis=1)
        column = found[names[0]]
        if len(column) and is_image(column[0]):
            return _images(column, spec, "the dataset")
        if spec.beside:
            return to_numpy(column, f"the column '{spec.name}'", may_miss=True)
        return as_input(_numbers(column, spec.name), spec)

    def _labels(self, column: Sequence[Any]) -> Array:
        values = to_numpy(column, f"the column '{self._target}'", may_miss=True)
        if self._names is None or values.dtype.kind not in "iu":
            return values
        unknown = values[(values < 0) | (values >= len(self._names))]
        if len(unknown):
            raise DataError(
                f"the column '{self._target}' holds {unknown[0]}, but it has {len(self._names)} class names; remove "
                "such examples with dataset.filter."
            ).about(self._target, got=unknown[0], wanted=len(self._names))
        return np.array(self._names)[values]

    def all_targets(self) -> Array | None:
        """Return the whole column of targets."""
        if self._target is None:
            return None
        return self._labels(list(self._dataset.with_format(None).select_columns([self._target])[self._target]))

    def fingerprint(self) -> str | None:
        """Return the fingerprint that ``datasets`` computes."""
        return getattr(self._dataset, "_fingerprint", None)


def is_hugging_face(value: object) -> bool:
    """Return whether a value is a dataset of the package ``datasets``."""
    return type(value).__module__.partition(".")[0] == "datasets" and hasattr(value, "column_names")


def is_stream(value: object) -> bool:
    """Return whether a value is a dataset of the package ``datasets`` that is read once, in order."""
    return is_hugging_face(value) and not isinstance(value, dict) and not hasattr(value, "__len__")


def refuse_other_kinds(value: Any) -> None:
    """Refuse a dictionary of datasets, and a stream."""
    if isinstance(value, dict):
        raise DataError(
            f"the data is a dictionary of datasets ({', '.join(value)}); give one, such as data['train']."
        ).about("data", got=[*value])
    if not hasattr(value, "select_columns") or not hasattr(value, "__len__"):
        raise DataError(
            "the data is a stream of examples; give its batches: data=lambda: dataset.with_format('numpy').iter(32)."
        )


def _class_names(dataset: Any, target: str | None) -> list[str] | None:
    feature = None if target is None else (dataset.features or {}).get(target)
    names = getattr(feature, "names", None)
    return None if names is None else list(names)


def _is_table(dataset: Any, name: str, spec: TensorSpec) -> bool:
    """Return whether a column holds one number per example, so that it is a column of a table, not an array."""
    if spec.shape is None or len(spec.shape) != 2:
        return False
    kind = getattr((dataset.features or {}).get(name), "dtype", "")
    return str(kind).startswith(("int", "uint", "float", "bool"))


def _numbers(column: Sequence[Any], name: str) -> Array:
    try:
        values = np.asarray(column)
    except ValueError:
        values = np.empty(0, object)
    if values.dtype == object:
        kind = "a missing value" if any(value is None for value in column) else "lists of different lengths or objects"
        raise DataError(f"the column '{name}' holds {kind}; fill it in, or convert it to arrays with dataset.map.")
    return values


def _images(column: Sequence[Any], spec: TensorSpec, subject: str) -> Array:
    layout = Layout.of(spec, subject)
    for image in column:
        check_image(image, f"an image of {subject}")
    found = [layout.arranged(pixels_of(image, layout)) for image in column]
    if any(pixels.shape != found[0].shape for pixels in found):
        raise DataError(
            f"{subject} holds images of different sizes, and the model's input has no fixed size; resize them."
        )
    stacked = np.stack(found)
    if kind_of(spec.dtype) != "float":
        return stacked
    return Rescaled(stacked, *factors(spec.pixels, layout))[:]
