"""Colours for the lines of a chart, of which no two are alike."""

from __future__ import annotations

import colorsys
from typing import Final

_FIRST: Final = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#be123c", "#0891b2", "#a16207", "#475569")
"""Tell apart for most eyes, on white."""

_BRIGHTEST: Final = 0.36
"""The relative luminance of the brightest line; white has 1."""


def colours(count: int) -> list[str]:
    """As many colours as lines, each once, as ``#rrggbb``.

    >>> colours(2)
    ['#2563eb', '#ea580c']
    >>> len(set(colours(200)))
    200
    """
    if count <= len(_FIRST):
        return list(_FIRST[:count])
    return [_hex(index / count, (0.3, 0.45, 0.6)[index % 3]) for index in range(count)]


def _hex(hue: float, lightness: float) -> str:
    """A colour that is dark enough for a line on white: yellow and green are brighter than blue of equal lightness."""
    while True:
        parts = colorsys.hls_to_rgb(hue, lightness, 0.85)
        if sum(weight * part**2.2 for weight, part in zip((0.21, 0.72, 0.07), parts, strict=True)) < _BRIGHTEST:
            return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
        lightness *= 0.95
