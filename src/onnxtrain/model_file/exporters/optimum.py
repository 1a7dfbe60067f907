"""Hugging Face's optimum, whose decoders have KV caches as inputs; onnxruntime-genai's builder names these alike.

A decoder reads ``past_key_values.0.key`` and writes ``present.0.key``. One of an encoder and decoder has the keys and
values of the encoder as well, and a merged one has two branches.
"""

from __future__ import annotations

import re
from typing import Final

from onnxtrain.model_file.exporters.exporter import Exporter

EXPORTER: Final = Exporter("optimum")

BRANCH: Final = "use_cache_branch"
"""The input of a merged decoder that chooses the branch with a cache."""

_PAST: Final = "past_key_values."


def is_cache(name: str) -> bool:
    """Return whether an input has the name of a KV cache."""
    return re.search("past|cache", name) is not None


def is_of_encoder(name: str) -> bool:
    """Return whether an input has the name of an encoder's output, or of keys and values of it."""
    return re.search("encoder|cross", name.lower()) is not None


def continuation(name: str) -> str:
    """Return the output that continues a KV cache, "" for other inputs.

    Example:
        >>> continuation("past_key_values.0.key"), continuation("past_0")
        ('present.0.key', '')
    """
    return f"present.{name.removeprefix(_PAST)}" if name.startswith(_PAST) else ""
