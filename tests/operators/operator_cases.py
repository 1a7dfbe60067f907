"""Attributes and inputs to try every optimizer with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.operators import OPTIMIZERS
from onnxtrain.operators.registry import Entry
from onnxtrain.operators.schema import OptimizerSchema

MEASURES = ("log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh")

_CHOSEN: dict[str, list[dict[str, Any]]] = {
    "Adagrad": [
        {},
        {"decay_factor": 0.1, "epsilon": 1e-2, "norm_coefficient": 0.01},
    ],
    "Adam": [
        {},
        {"alpha": 0.95, "beta": 0.1, "norm_coefficient": 0.001, "epsilon": 1e-7},
        {"alpha": 0.0, "beta": 0.5, "epsilon": 1e-2, "norm_coefficient": 0.1, "norm_coefficient_post": 0.25},
    ],
    "AdamW": [
        {},
        {"alpha": 0.95, "beta": 0.1, "epsilon": 1e-2, "weight_decay": 0.3},
    ],
    "LAMB": [
        {},
        {"alpha": 0.95, "beta": 0.1, "epsilon": 1e-2, "weight_decay": 0.3},
        {"weight_decay": 0.0},
    ],
    "Lion": [
        {},
        {"alpha": 0.5, "beta": 0.1, "weight_decay": 0.3},
    ],
    "Momentum": [
        {"alpha": 0.95, "beta": 0.1, "mode": "standard", "norm_coefficient": 0.001},
        {"alpha": 0.9, "beta": 1.0, "mode": "nesterov", "norm_coefficient": 0.0},
        {"alpha": 0.0, "beta": 0.3, "mode": "nesterov", "norm_coefficient": 0.5},
    ],
    "RMSprop": [
        {},
        {"alpha": 0.5, "epsilon": 1e-2, "weight_decay": 0.1, "momentum": 0.75},
    ],
    "SGD": [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.75, "dampening": 0.25, "weight_decay": 0.1},
        {"momentum": 0.9, "mode": "nesterov"},
    ],
    "SSGD": [
        {},
        *(
            {"measure": measure, "reweighting": reweighting, "epsilon": 0.7, "p": 0.6, **more}
            for measure in MEASURES
            for reweighting in ("l1", "l2")
            for more in (
                {},
                {"alpha": 0.9, "regularization": 0.05, "norm_coefficient": 0.01, "max_scale": 1.5},
            )
        ),
    ],
}


def _drawn(entry: Entry) -> list[dict[str, Any]]:
    """The attributes of the settings' defaults, and others in their ranges."""
    others: dict[str, Any] = {}
    for place, attribute in enumerate(entry.schema.attributes):
        if attribute.kind is float:
            others[attribute.name] = 0.5 / (1 + place)
        elif attribute.choices:
            others[attribute.name] = attribute.choices[-1]
    return [entry.settings().node_attributes(), others]


ATTRIBUTES = {name: _CHOSEN.get(name) or _drawn(entry) for name, entry in OPTIMIZERS.items()}
"""Attribute values by optimizer: chosen ones, or ones that follow from the schema."""

CASES = [(name, attributes) for name, rows in ATTRIBUTES.items() for attributes in rows]
IDS = [
    "-".join([name, *(str(item) for item in attributes.values())][:5]) + f"-{index}"
    for index, (name, attributes) in enumerate(CASES)
]
TYPES = (np.float32, np.float64)


@dataclass
class Problem:
    """Inputs of one operator call.

    Attributes:
        schema: The operator.
        attributes: As given.
        tensors: All X, all G, all of each state.
        shapes: Of the variables.
    """

    schema: OptimizerSchema
    attributes: dict[str, Any]
    tensors: list[np.ndarray]
    shapes: list[tuple[int, ...]]

    @property
    def variables(self) -> int:
        return len(self.shapes)

    @property
    def roles(self) -> int:
        return len(self.tensors) // self.variables

    @property
    def old(self) -> list[np.ndarray]:
        """Inputs whose new values are the outputs."""
        return self.tensors[: self.variables] + self.tensors[2 * self.variables :]

    def run(self, R: Any, T: Any) -> tuple[np.ndarray, ...]:
        return OPTIMIZERS[self.schema.name].reference(R, T, *self.tensors, **self.attributes)


def problem(
    name: str,
    attributes: dict[str, Any],
    variables: list[tuple[tuple[int, ...], Any]],
    seed: int = 0,
) -> Problem:
    """Random inputs: normal X, G and V, and an H that is a square, as a real one is."""
    rng = np.random.default_rng(seed)
    schema = OPTIMIZERS[name].schema
    states = schema.used_states(schema.complete(attributes))
    tensors = []
    for role in ("X", "G", *(state.name for state in states)):
        for shape, dtype in variables:
            drawn = np.asarray(rng.standard_normal(shape))
            tensors.append((drawn * drawn if role == "H" else drawn).astype(dtype))
    return Problem(schema, attributes, tensors, [shape for shape, _ in variables])
