"""Streams of the package ``datasets``: columns that are read once per epoch, in order or through a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onnxtrain.data.base import Dataset, DataSource
from onnxtrain.data.naming import Wanted
from onnxtrain.errors import DataError
from onnxtrain.plugins.tables.stream import ROWS, Piece, TableStream


@dataclass(frozen=True)
class Stream(DataSource):
    """A ``datasets.IterableDataset`` of columns."""

    stream: Any

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the rows in batches; see `DataSource.dataset`."""
        first = next(self._blocks(None), None)
        if first is None:
            raise DataError("the stream has no rows; it needs a row per example.")
        feature = (self.stream.features or {}).get(wanted.target) if wanted.need_target else None
        return TableStream(
            [Piece(None, self._blocks)],
            first.schema,
            wanted,
            name="the stream",
            classes=getattr(feature, "names", None) or (),
            begin=self.stream.set_epoch,
        )

    def _blocks(self, columns: Sequence[str] | None) -> Iterator[Any]:
        stream = self.stream if columns is None else self.stream.select_columns(list(columns))
        yield from stream.with_format("arrow").iter(ROWS if columns is not None else 1)
