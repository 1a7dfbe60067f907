"""How the predictions of a loss are read by metrics: each metric names what it is for, the loss what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.training.data.conversion import Array
from onnxtrain.training.metrics import BUILT_IN, Metric, NamedMetric, PredictionKind, resolve_metric

_DESCRIPTIONS: Final[dict[PredictionKind, str]] = {
    "classes": "scores over classes",
    "binary": "independent yes-or-no logits",
    "numbers": "numbers",
}


@dataclass(frozen=True)
class Reading:
    """How the predictions and targets of a loss are to be read.

    Attributes:
        loss: the loss's name.
        predicts: what predictions are; None where the loss does not say.
        axis: the axis of the classes.
        ignore_index: a label that does not count.
        probabilities: whether predictions are probabilities over classes instead of logits.
    """

    loss: str
    predicts: PredictionKind | None
    axis: int = 1
    ignore_index: int | None = None
    probabilities: bool = False

    def metric(self, metric: str | Metric) -> NamedMetric:
        """A metric told how to read this loss's predictions; a function of a user's own is left as it is.

        Raises:
            OptionError: there is no such metric, or it is for other predictions.
        """
        name = next((name for name, entry in BUILT_IN.items() if metric in (name, entry.function)), None)
        if name is None:
            return resolve_metric(metric)
        terms, options = BUILT_IN[name].terms, self._options(name)
        if not self.probabilities:
            return NamedMetric(name, lambda y_true, y_pred: terms(y_true, y_pred, **options))
        return NamedMetric(name, lambda y_true, y_pred: terms(y_true, _log(y_pred), **options))

    def _options(self, name: str) -> dict[str, Any]:
        """The arguments of a built-in metric.

        Raises:
            OptionError: it is for other predictions.
        """
        if self.predicts is None:
            if name != "accuracy":
                return {}
            raise OptionError(
                f"accuracy needs to know what the predictions are, which the loss {self.loss} does not say; give it "
                "predicts='classes' or predicts='binary', or measure a function of (y_true, y_pred)."
            )
        if self.predicts not in BUILT_IN[name].reads:
            reads = " or ".join(_DESCRIPTIONS[kind] for kind in BUILT_IN[name].reads)
            fitting = ", ".join(other for other, entry in BUILT_IN.items() if self.predicts in entry.reads)
            raise OptionError(
                f"The metric {name} is for {reads}, but with the loss {self.loss} predictions are "
                f"{_DESCRIPTIONS[self.predicts]}; measure {fitting}, or a function of (y_true, y_pred)."
            )
        if self.predicts == "binary":
            return {"binary": True, "threshold": 0.0} if name == "accuracy" else {}
        if self.predicts == "numbers":
            return {}
        options = {"axis": self.axis, "ignore_index": self.ignore_index}
        return options | {"binary": False} if name == "accuracy" else options


def _log(probabilities: Array) -> Array:
    values = probabilities.astype(np.float64)
    return np.log(np.maximum(values, np.finfo(np.float64).tiny))
