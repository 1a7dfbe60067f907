"""Losses on several outputs of one model, which add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxtrain.losses.base import Loss, TargetForm

Forms = TargetForm | tuple[TargetForm, ...]
"""Forms of targets: of the only loss, or of each loss."""


@dataclass(frozen=True)
class JointLoss:
    """The sum of losses, each on an output of its own: sum of weight times loss.

    Attributes:
        parts: The outputs, each with its loss.
    """

    parts: tuple[tuple[str, Loss], ...]

    @property
    def name(self) -> str:
        """The name in messages."""
        return " + ".join(f"{loss.name}({output})" for output, loss in self)

    def __iter__(self) -> Iterator[tuple[str, Loss]]:
        return iter(self.parts)
