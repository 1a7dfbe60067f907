"""Options of gradients and matrix multiplications, and the metadata entries that hold them in a model file."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from typing import Literal, NamedTuple, get_args

from onnxtrain.errors import GradientError

STRAIGHT_THROUGH_KEY = "onnxtrain.straight_through"
"""Metadata key: ``true`` where a model's Gradient nodes pass gradients straight through rounding."""

RECOMPUTE_KEY = "onnxtrain.recompute"
"""Metadata key: a JSON list of the patterns of the nodes that a model's gradients recompute."""

COMPUTE_KEY = "onnxtrain.compute"
"""Metadata key: ``bfloat16`` where the operands of linear layers are rounded to it."""

Compute = Literal["float32", "bfloat16"]
"""The precision of matrix multiplications with weights."""


def read_texts(entry: str) -> list[str] | None:
    """Return the texts of a metadata entry that holds them as a JSON list; None where it is no such list."""
    try:
        found = json.loads(entry)
    except (ValueError, RecursionError):  # the file may be malformed
        return None
    return found if isinstance(found, list) and all(isinstance(text, str) for text in found) else None


class GradientOptions(NamedTuple):
    """Options of the gradients and matrix multiplications of a model."""

    straight_through: bool = False
    recompute: tuple[str, ...] = ()
    compute: Compute = "float32"

    @classmethod
    def of(cls, straight_through: bool, recompute: str | Sequence[str]) -> GradientOptions:
        """The options as users give them."""
        return cls(straight_through, (recompute,) if isinstance(recompute, str) else tuple(recompute))

    @classmethod
    def read(cls, metadata: MutableMapping[str, str]) -> GradientOptions:
        """Read the options from a model's metadata."""
        word = metadata.get(STRAIGHT_THROUGH_KEY, "false")
        if word not in ("true", "false"):
            raise GradientError(f"The model's metadata entry {STRAIGHT_THROUGH_KEY} is {word!r}; it is true or false.")
        text = metadata.get(RECOMPUTE_KEY, "[]")
        patterns = read_texts(text)
        if patterns is None:
            raise GradientError(
                f"The model's metadata entry {RECOMPUTE_KEY} is {text[:80]!r}; it is a JSON list of patterns of node "
                "names."
            )
        compute = metadata.get(COMPUTE_KEY, "float32")
        for known in get_args(Compute):
            if compute == known:
                return cls(word == "true", tuple(patterns), known)
        raise GradientError(f"The model's metadata entry {COMPUTE_KEY} is {compute!r}; it is float32 or bfloat16.")

    def entries(self) -> dict[str, str]:
        """The metadata entries for these options; none for the defaults."""
        entries = {}
        if self.straight_through:
            entries[STRAIGHT_THROUGH_KEY] = "true"
        if self.recompute:
            entries[RECOMPUTE_KEY] = json.dumps(list(self.recompute))
        if self.compute != "float32":
            entries[COMPUTE_KEY] = self.compute
        return entries

    @staticmethod
    def remove(metadata: MutableMapping[str, str]) -> None:
        """Remove the entries, in place: a lowered model has no Gradient nodes that they could apply to."""
        for key in (STRAIGHT_THROUGH_KEY, RECOMPUTE_KEY, COMPUTE_KEY):
            metadata.pop(key, None)
