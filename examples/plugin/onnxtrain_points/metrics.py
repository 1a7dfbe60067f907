"""A metric: a function of all targets and all predictions."""

import numpy as np


def largest_error(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    """Return the largest absolute error."""
    return float(np.abs(y_true - y_pred).max())
