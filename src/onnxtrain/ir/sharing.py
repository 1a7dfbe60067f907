"""When two nodes are the same, so that one of them is enough."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)

# A second call of one of these must draw again, or write another body: it may not be shared.
# An Identity is there to give a value a second name.
NEVER_SHARED = RANDOM | {"Dropout", "If", "Loop", "Scan", "Identity"}


def attribute_key(attributes: dict[str, Any]) -> tuple[Any, ...] | None:
    """A key for a node's attributes, or ``None`` when one of them (a graph) cannot be compared."""
    parts: list[Any] = []
    for name, item in sorted(attributes.items()):
        if hasattr(item, "tobytes") and hasattr(item, "dtype"):  # a check against the protocol would cost 0.1 ms
            texts = item.dtype == ir.DataType.STRING
            content = tuple(item.numpy().reshape(-1)) if texts else item.tobytes()
            parts.append((name, str(item.dtype), tuple(item.shape.numpy()), content))
        elif isinstance(item, (list, tuple)) and all(isinstance(i, (int, float, str)) for i in item):
            parts.append((name, *map(repr, item)))
        elif isinstance(item, (int, float, str)):
            parts.append((name, repr(item)))
        else:
            return None
    return tuple(parts)
