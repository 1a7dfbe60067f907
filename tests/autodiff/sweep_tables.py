"""What the sweep leaves out or changes in ONNX's node tests, each with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

OPSETS = (18, 20, 23, 26)
"""Every case is brought to these opsets, too, where the operator can be."""

NEWEST = 26
"""The newest opset that ONNX Runtime runs: a model that declares a later one is brought to this."""

SKIPPED: dict[str, str] = {}
"""Patterns of test names that are no gradient checks."""

JITTER: dict[str, str] = {}
"""Patterns of test names whose inputs are moved at random, and from what."""

CONFIGURATION: dict[tuple[str, str], str] = {}
"""Floating inputs (operator, name in its schema) that configure it: they have no gradient."""

ORACLES: dict[str, str] = {}
"""Patterns of tests that ONNX's reference evaluator computes wrongly."""

Item = TypeVar("Item")


def matching(table: Mapping[str, Item], name: str) -> Item | None:
    """The entry of the first pattern that the name of a test matches as a whole."""
    return next((item for pattern, item in table.items() if re.fullmatch(pattern, name)), None)
