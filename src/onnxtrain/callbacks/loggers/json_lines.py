"""The course of a training as JSON lines: one object per epoch."""

from __future__ import annotations

import json
import math

from onnxtrain.callbacks.history import write_text
from onnxtrain.callbacks.loggers.rows_file import RowsFile
from onnxtrain.spelling import checks_arguments


@checks_arguments
class JsonLinesLogger(RowsFile):
    """Keeps a ``.jsonl`` file up to date with one JSON object per epoch, of the names in `History`.

    The file is complete after every epoch. JSON has no NaN and no infinity: they become null. A resumed training goes
    on with the rows that it had.

    Args:
        path: the file; what it held before is replaced.
    """

    def write(self, rows: list[dict[str, float]]) -> None:
        """Write all rows to the file."""
        finite = [{name: value if math.isfinite(value) else None for name, value in row.items()} for row in rows]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in finite))
