"""The course of a training as a ``.csv`` file."""

from __future__ import annotations

from onnxtrain.callbacks.history import write_csv
from onnxtrain.callbacks.loggers.rows_file import RowsFile
from onnxtrain.spelling import checks_arguments


@checks_arguments
class CsvLogger(RowsFile):
    """Keeps a ``.csv`` file up to date with one row per epoch, in the columns of `History`.

    The file is complete after every epoch. A column that appears later is added to all rows. A resumed
    training goes on with the rows that it had.

    Args:
        path: the file; what it held before is replaced.
    """

    def write(self, rows: list[dict[str, float]]) -> None:
        """Write all rows to the file."""
        write_csv(self.path, rows)
