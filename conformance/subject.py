"""Cases of the suite: a model with training operators, its data sets, and the source of the expected values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir

from conformance.oracle import Arrays
from onnxtrain.lowering.pipeline import lower_graph

KINDS = ("gradient", "second_order", "loss", "optimizer", "step_graph", "training_info")
"""Folders of the suite."""

RTOL = 1e-3
"""Relative tolerance of every case, as in ONNX's own tests."""

ATOL = 1e-4
"""Absolute tolerance, relative to the larger of one and the largest expected value."""


@dataclass
class Made:
    """Result of the oracle for a case.

    Attributes:
        model: The model, with operators of ``ai.onnx.preview.training``.
        steps: Inputs and expected outputs of each data set, by name, in float64.
        source: How the expected outputs were computed.
        feedback: Outputs that are inputs of the next data set, by output.
        expanded: The same in standard operators; ``None`` to lower ``model``.
    """

    model: onnx.ModelProto
    steps: list[tuple[Arrays, Arrays]]
    source: str
    feedback: Mapping[str, str] = field(default_factory=dict)
    expanded: onnx.ModelProto | None = None

    @property
    def atol(self) -> float:
        """The absolute tolerance of the case."""
        floats = [a for _, outputs in self.steps for a in outputs.values() if a.dtype.kind == "f"]
        return ATOL * max([1.0, *(float(np.max(np.abs(array), initial=0.0)) for array in floats)])


@dataclass(frozen=True)
class Subject:
    """A case before its values are computed.

    Attributes:
        kind: One of :data:`KINDS`.
        name: Its name in that folder, without "test_".
        covers: The operators, losses or optimizers that it tests.
        make: Computes it.
        forms: "" for the model as written, "_expanded" for standard operators.
    """

    kind: str
    name: str
    covers: frozenset[str]
    make: Callable[[], Made]
    forms: tuple[str, ...] = ("", "_expanded")


def file_name(text: str) -> str:
    """Turn the name of a test row into the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def expand(model: onnx.ModelProto) -> onnx.ModelProto:
    """Lower a model to ONNX's standard operators."""
    working = ir.from_proto(model)
    lower_graph(working)
    return ir.to_proto(working)
