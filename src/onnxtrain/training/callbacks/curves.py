"""The course of a training as SVG, for notebooks: no package draws it, and it takes the colours of the page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from onnxtrain.training.callbacks.report import Panel, Rows, panels

_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 62, 26, 34
"""Pixels of one panel, and of its margins."""


def svg_curves(rows: Rows) -> str:
    """Losses and metrics over the epochs, side by side; an empty text where there is no epoch.

    Args:
        rows: The rows of a :class:`~onnxtrain.training.callbacks.History`.
    """
    if not rows:
        return ""
    found = panels(rows)
    epochs = [row["epoch"] for row in rows]
    drawn = "".join(
        f'<g transform="translate({index * _WIDTH}, 0)">{_panel(panel, epochs)}</g>'
        for index, panel in enumerate(found)
    )
    width = _WIDTH * len(found)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}" '
        f'role="img" font-family="sans-serif" font-size="10" fill="currentColor">{drawn}</svg>'
    )


def _panel(panel: Panel, epochs: Sequence[float]) -> str:
    scale = math.log10 if panel.logarithmic else float
    finite = [scale(v) for column in panel.columns.values() for v in column if math.isfinite(v)]
    low, high = _range(finite)
    top = _TOP + 11 * (len(panel.columns) - 1)  # a line for each name
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - top - _BOTTOM

    def x(epoch: float) -> float:
        first, last = epochs[0], epochs[-1]
        return _LEFT + across * (0.5 if last == first else (epoch - first) / (last - first))

    def y(value: float) -> float:
        return top + up * (high - scale(value)) / (high - low)

    parts = [f'<text x="{_LEFT}" y="14" font-size="11" font-weight="bold">{html.escape(panel.title)}</text>']
    for tick in _ticks(low, high, logarithmic=panel.logarithmic):
        parts.append(_line(_LEFT, y(tick), _WIDTH - _RIGHT, y(tick), opacity=0.15))
        parts.append(_text(_LEFT - 6, y(tick) + 3, f"{tick:.4g}", "end"))
    below = _HEIGHT - _BOTTOM + 14
    parts += [_text(x(epoch), below, f"{epoch:g}", "middle") for epoch in _epoch_ticks(epochs[0], epochs[-1])]
    parts.append(_text(_LEFT + across / 2, _HEIGHT - 6, "epoch", "middle"))
    parts.append(_line(_LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, opacity=0.6))
    ends = _spread([y(c[-1]) if math.isfinite(c[-1]) else math.nan for c in panel.columns.values()])
    for index, (name, column) in enumerate(panel.columns.items()):
        colour = panel.colours[index]
        points = [(x(e), y(v)) for e, v in zip(epochs, column, strict=True) if math.isfinite(v)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2" fill="{colour}"/>' for a, b in points]
        if math.isfinite(ends[index]):
            parts.append(_text(_WIDTH - _RIGHT + 6, ends[index] + 3, f"{column[-1]:.4g}", "start", colour))
        if len(panel.columns) > 1:
            parts.append(_text(_WIDTH - _RIGHT, 14 + 11 * index, name, "end", colour))
    return "".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value, never the same."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, *, logarithmic: bool) -> list[float]:
    """Round values between two, about four; powers of ten where the scale is logarithmic."""
    if logarithmic:
        powers = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
        return powers or [10.0**low, 10.0**high]
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _epoch_ticks(first: float, last: float) -> list[float]:
    if last == first:
        return [first]
    inner = [tick for tick in _ticks(first, last, logarithmic=False) if tick == round(tick)]
    gap = (last - first) / 10
    return [first, *(tick for tick in inner if first + gap <= tick <= last - gap), last]


def _spread(heights: Sequence[float], gap: float = 11.0) -> list[float]:
    """Heights of labels, moved down where they would cover one another; NaN stays."""
    found = list(heights)
    below = -math.inf
    for index in sorted((i for i, height in enumerate(heights) if math.isfinite(height)), key=lambda i: heights[i]):
        found[index] = below = max(found[index], below + gap)
    return found


def _text(x: float, y: float, text: str, anchor: str, colour: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, *, opacity: float) -> str:
    where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="currentColor" stroke-opacity="{opacity}"/>'
