"""Requirements of a model on the data of its inputs: types, shapes, and whole batches where their size is fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.data.base import Batch, share
from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.image_form import BYTES
from onnxtrain.errors import DataError, OptionError
from onnxtrain.graph.value import COMMON, DOCUMENTS, KV_CACHES, PIXELS, RIGHT_PADDED, TABLE_ROWS, TIME_FIRST, dimensions


def is_common(value: ir.Value) -> bool:
    """Return whether an input has one value for all examples."""
    return bool(value.meta.get(COMMON)) or dimensions(value) == ()


def tensor_spec(value: ir.Value) -> TensorSpec:
    """Return the required type and shape of data for an input."""
    if value.dtype is None or not value.name:
        raise OptionError(f"The input {value.name!r} has no tensor type; only tensors can be fed.")
    return TensorSpec(
        value.name,
        value.dtype.numpy(),
        dimensions(value),
        kv_caches=value.meta.get(KV_CACHES, ()),
        right_padded=bool(value.meta.get(RIGHT_PADDED)),
        table_rows=value.meta.get(TABLE_ROWS),
        documents=value.meta.get(DOCUMENTS) == "numbers",
        pixels=BYTES if value.meta.get(PIXELS) else None,
        common=is_common(value),
        time_of=value.meta.get(TIME_FIRST, (None,))[0],
    )


LARGEST_PADDED = 4 << 30
"""Bytes of the largest padded batch: a file can declare an absurd batch size."""


class FixedBatch(NamedTuple):
    """The fixed batch size of a model."""

    size: int
    input: str
    inputs: frozenset[str]

    @classmethod
    def of(cls, graph: ir.Graph) -> FixedBatch | None:
        """Read the fixed batch size of a graph; ``None`` for a dynamic one, or where inputs begin with other axes."""
        if any(TIME_FIRST in value.meta for value in graph.inputs):
            return None
        sizes = {
            str(value.name): shape[0] for value in graph.inputs if not is_common(value) and (shape := dimensions(value))
        }
        name, size = next(((name, size) for name, size in sizes.items() if isinstance(size, int)), (None, 0))
        if name is None:
            return None
        if size == 0:
            raise DataError(
                f"The model takes batches of 0 examples (input {name!r}), so it cannot be trained; export it with a "
                "dynamic batch axis or another size."
            ).about(name)
        return cls(size, name, frozenset(name for name, other in sizes.items() if other == size))

    def rows(self, arrays: Mapping[str, np.ndarray]) -> int:
        """Return the number of examples in the arrays of a step."""
        return len(arrays[self.input])

    def filled(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Pad inputs to a whole batch by repeating their examples in turn."""
        rows = self.rows(arrays)
        if rows == self.size:
            return dict(arrays)
        needed = sum(array.nbytes for name, array in arrays.items() if name in self.inputs) // rows * self.size
        if needed > LARGEST_PADDED:
            raise DataError(
                f"The model takes batches of {self.size} examples (input {self.input!r}), but one has {rows}: padding "
                f"it takes {needed / 2**30:,.0f} GiB, and the limit is {LARGEST_PADDED >> 30} GiB; give whole batches "
                "or export the model with a dynamic batch axis."
            )
        order = np.arange(self.size) % rows
        return {name: array[order] if name in self.inputs else array for name, array in arrays.items()}

    def pieces(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Split batches that are larger than this size, as an iterable may give them."""
        for batch in batches:
            if batch.size <= self.size:
                yield batch
                continue
            for start in range(0, batch.size, self.size):
                yield share(batch, slice(start, start + self.size))
