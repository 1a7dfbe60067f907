"""A table with a column that names its rows: no input of the model, but a column beside the predictions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from onnxtrain.data import CsvFile, ParquetFile
from onnxtrain.data.base import Dataset, DataSource
from onnxtrain.data.conversion import Array, TensorSpec, to_numpy
from onnxtrain.data.naming import Wanted, check_beside
from onnxtrain.data.opening import open_dataset


@dataclass(frozen=True)
class IdentifiedRows(DataSource):
    """A table whose column ``id`` names the rows; a prediction keeps its values in ``examples_read``.

    Values of a CSV file stay the texts that they are, so that ``00123`` keeps its zeros.
    """

    source: CsvFile | ParquetFile
    id: str
    examples_read: dict[str, Array] = field(default_factory=dict, init=False, repr=False, compare=False)

    def dataset(self, wanted: Wanted) -> Dataset:
        """Return the rows without the column; see `DataSource.dataset`."""
        if isinstance(self.source, CsvFile):
            check_beside([self.id], self.source.column_names(), f"{self.source.name} has no column")
        else:
            next(self.source.rows([self.id]), None)  # refuses a file without it
        names = TensorSpec(self.id, np.dtypes.StringDType())
        if not wanted.need_target:
            found, _ = self.source.read([names], need_target=False)
            self.examples_read[self.id] = to_numpy(found[self.id], f"the column '{self.id}'")
        inputs = [spec for spec in wanted.specs if not spec.beside]
        return open_dataset(
            self.source,
            [dataclasses.replace(spec, left_out=(*spec.left_out, self.id)) for spec in inputs],
            target=wanted.target,
            need_target=wanted.need_target,
            validate=False,
            others=[spec.name for spec in wanted.specs if spec.beside],
            columns=wanted.columns,
        )
