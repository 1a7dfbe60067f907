"""A reader: it returns what it reads, and leaves other data as they are."""

from pathlib import Path
from typing import Any

import numpy as np


def read(path: Path) -> np.ndarray:
    """Return the numbers of a file, a row for each line."""
    return np.loadtxt(path, np.float32, ndmin=2)


def read_points(source: Any, reading: Any) -> Any:
    """Return the inputs and targets of a ``.points`` file."""
    if not isinstance(source, str | Path) or Path(source).suffix != ".points":
        return source
    rows = read(Path(source))
    return rows[:, :-1], rows[:, -1:]
