"""Data that this plugin reads: shards, streams of Hugging Face, and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.data import CsvFile, ParquetFile
from onnxtrain.data.base import Dataset, DataSource
from onnxtrain.data.map_dataset import is_stream
from onnxtrain.data.naming import Wanted, is_frame
from onnxtrain.errors import DataError
from onnxtrain.losses.cross_entropy import NextToken
from onnxtrain.losses.groups import GroupLoss

if TYPE_CHECKING:
    from onnxtrain.plugins.tables.windows import Form, Windows
    from onnxtrain.training.data_adapter import Reading


def read_tables(source: Any, reading: Reading) -> Any:
    """Return shards, streams of columns and windows as data that open themselves; other data as they are."""
    if isinstance(reading.loss, NextToken | GroupLoss):  # rows of texts
        return source
    from onnxtrain.plugins.tables.shards import Shards, are_shards, is_table
    from onnxtrain.plugins.tables.windows import KEPT, Form, Windows

    record = reading.kept.get(KEPT)
    form = None if record is None else Form.of_record(record)
    if isinstance(source, Windows):
        if form is None and reading.config is None:
            raise DataError(
                f"{source.name} gives windows, but nothing says how those of the training were scaled; keep the "
                ".labels.json file that onnxtrain writes beside a model."
            )
        return source if form is None else ScaledWindows(source, form)
    if form is not None:
        if isinstance(source, CsvFile):
            source = Shards(source.path, delimiter=source.delimiter, encoding=source.encoding, decimal=source.decimal)
        elif isinstance(source, ParquetFile):
            source = source.path
        is_whole = isinstance(source, Mapping) and all(np.ndim(source.get(name, 0)) == 1 for name in form.columns)
        if is_whole or isinstance(source, Shards) or are_shards(source) or is_table(source) or is_frame(source):
            return ScaledWindows(Windows(source, form.window, form.horizon), form)
    if are_shards(source):
        return Shards(source)
    if is_stream(source):
        from onnxtrain.plugins.tables.streams import Stream

        return Stream(source)
    return source


@dataclass(frozen=True)
class ScaledWindows(DataSource):
    """Windows that are scaled as those that a model was trained on."""

    windows: Windows
    form: Form

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the windows in batches; see `DataSource.dataset`."""
        return self.windows.opened(wanted, self.form)
