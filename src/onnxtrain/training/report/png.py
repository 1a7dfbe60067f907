"""Draw charts as PNG with matplotlib: the same figure as in SVG."""

from __future__ import annotations

import importlib.util
import io
import re
import xml.etree.ElementTree as Tree
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxtrain.training.report.charts import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP = 16
_INCH = 100
"""Pixels of a chart in an inch of the figure."""

_SVG = "{http://www.w3.org/2000/svg}"


def matplotlib_available() -> bool:
    """Return whether :func:`png` can draw."""
    return importlib.util.find_spec("matplotlib") is not None


def png(charts: Sequence[Chart], *, title: str = "") -> bytes:
    """Return charts side by side as a PNG."""
    from matplotlib.figure import Figure  # not pyplot: it keeps figures, and asks for a display

    drawings = [Tree.fromstring(chart.svg()) for chart in charts]
    sizes = [(float(drawing.attrib["width"]), float(drawing.attrib["height"])) for drawing in drawings]
    top = 32 if title else 8
    width, height = sum(size + _GAP for size, _ in sizes) + _GAP, max(size for _, size in sizes) + top + 8
    figure = Figure(figsize=(width / _INCH, height / _INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    if title:
        axes.text(_GAP, 20, title, fontsize=11, fontweight="bold")
    left = _GAP
    for drawing, (size, _) in zip(drawings, sizes, strict=True):
        _draw(axes, drawing, {}, left, top)
        left += round(size) + _GAP
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150)
    return stream.getvalue()


def _draw(axes: Axes, element: Tree.Element, inherited: Mapping[str, str], left: float, top: float) -> None:
    """Draw an element of SVG and those in it: the few that charts consist of."""
    from matplotlib.patches import Circle, Rectangle

    given = {**inherited, **element.attrib}

    def number(name: str, default: float = 0.0) -> float:
        return float(given.get(name, default))

    def colour(name: str) -> str:
        found = given.get(name, "none")
        return "black" if found == "currentColor" else found

    x, y = left + number("x"), top + number("y")
    kind = element.tag.removeprefix(_SVG)
    stroke: dict[str, Any] = {"color": colour("stroke"), "linewidth": number("stroke-width", 1.0) * 72 / _INCH}
    stroke["alpha"] = number("stroke-opacity", 1.0)
    if kind == "rect":
        axes.add_patch(Rectangle((x, y), number("width"), number("height"), color=colour("fill"), linewidth=0))
    elif kind == "circle":
        centre = left + number("cx"), top + number("cy")
        axes.add_patch(
            Circle(centre, number("r"), color=colour("fill"), alpha=number("fill-opacity", 1.0), linewidth=0)
        )
    elif kind == "line":
        style = "--" if "stroke-dasharray" in given else "-"
        ends = [left + number("x1"), left + number("x2")], [top + number("y1"), top + number("y2")]
        axes.plot(*ends, linestyle=style, **stroke)
    elif kind == "polyline":
        points = [tuple(map(float, pair.split(","))) for pair in given["points"].split()]
        axes.plot([left + at[0] for at in points], [top + at[1] for at in points], **stroke)
    elif kind == "text":
        turned = re.search(r"rotate\((-?[\d.]+)", given.get("transform", ""))
        axes.text(
            x,
            y,
            (element.text or "").replace("$", r"\$"),
            color=colour("fill"),
            fontsize=number("font-size", 12) * 72 / _INCH,
            fontweight="bold" if "font-weight" in given else "normal",
            ha={"middle": "center", "end": "right"}.get(given.get("text-anchor", ""), "left"),
            rotation=0.0 if turned is None else -float(turned[1]),
            rotation_mode="anchor",
        )
    if kind in ("svg", "g"):
        kept = {name: value for name, value in given.items() if name.startswith(("fill", "stroke", "font"))}
        for inner in element:
            _draw(axes, inner, kept, left, top)
