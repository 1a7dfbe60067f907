"""How gradients are built and products computed, and how these choices travel in a model file."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from typing import Literal, NamedTuple, get_args

from onnxtrain.errors import GradientError

STRAIGHT_THROUGH_KEY = "onnxtrain.straight_through"
"""Key of a model's metadata that says ``true`` where its Gradient nodes pass gradients straight through steps."""

RECOMPUTE_KEY = "onnxtrain.recompute"
"""Key of a model's metadata that holds, as a JSON list, the patterns of the nodes that its gradients recompute."""

COMPUTE_KEY = "onnxtrain.compute"
"""Key of a model's metadata that says ``bfloat16`` where products with weights round their factors to it."""

Compute = Literal["float32", "bfloat16"]
"""In what products with weights are computed."""


def read_texts(entry: str) -> list[str] | None:
    """Return the texts of a metadata entry that holds them as a JSON list; None where it is no such list."""
    try:
        found = json.loads(entry)
    except (ValueError, RecursionError):  # a model may come from anybody
        return None
    return found if isinstance(found, list) and all(isinstance(text, str) for text in found) else None


class GradientOptions(NamedTuple):
    """How the gradients of a model are built, and its products computed.

    The Gradient operator has no attributes for this, so in a file it is said by two entries of the model's
    ``metadata_props``, which whoever lowers the model's Gradient nodes reads.

    Attributes:
        straight_through: Whether operators that round or quantize pass gradients on as if they did not.
        recompute: Glob patterns of the names of the nodes whose results are computed again in the backward pass.
        compute: In what products with weights, and their gradients, are computed.
    """

    straight_through: bool = False
    recompute: tuple[str, ...] = ()
    compute: Compute = "float32"

    @classmethod
    def of(cls, straight_through: bool, recompute: str | Sequence[str]) -> GradientOptions:
        """The options as users give them."""
        return cls(straight_through, (recompute,) if isinstance(recompute, str) else tuple(recompute))

    @classmethod
    def read(cls, metadata: MutableMapping[str, str]) -> GradientOptions:
        """The options that a model's metadata states.

        Raises:
            GradientError: An entry has a value that it cannot have.
        """
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
        """The metadata entries that state these options; none for the defaults."""
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
        """Take the entries away: a lowered model has nothing left that they could speak of."""
        for key in (STRAIGHT_THROUGH_KEY, RECOMPUTE_KEY, COMPUTE_KEY):
            metadata.pop(key, None)
