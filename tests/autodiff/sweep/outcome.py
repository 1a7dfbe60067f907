"""The result of one check of the sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Variant = Literal["static", "dynamic", "unknown", "constant", "second order", "PyTorch"]


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        test: Name of ONNX's test.
        operator: Its operator.
        opset: Opset of the check.
        variant: Known shapes and integer inputs, or the kind of check.
        worst: The largest relative error; NaN where nothing was compared.
        runtime: True if ONNX Runtime has kernels for the operator and was compared.
        excuse: What the rule needs and did not get: a key of ``EXCUSES``.
        failure: What went wrong.
    """

    test: str
    operator: str
    opset: int
    variant: Variant
    worst: float = float("nan")
    runtime: bool = False
    excuse: str = ""
    failure: str = ""
