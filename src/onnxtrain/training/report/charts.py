"""Charts as SVG: lines, bars, a matrix of counts, points, a training history; and the same figures as PNG.

Legends are above a chart, where they cover nothing. PNG is drawn by matplotlib.
"""

from __future__ import annotations

import colorsys
import dataclasses
import html
import importlib.util
import io
import itertools
import math
import xml.etree.ElementTree as Tree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from onnxtrain.errors.escaping import visible
from onnxtrain.training.report.record import Rows, measured_columns, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 640
_LEFT, _RIGHT, _BOTTOM = 64, 16, 44
_LETTER = 6.6
"""Approximate width of a character of the legend, in pixels."""

_MARKERS_UP_TO = 40
"""Most points of a line that are drawn as dots, too."""

_NUMBERS_UP_TO = 16
"""Most classes of a matrix with its counts written in it."""

_TEXTS = {
    "": 'fill="currentColor"',
    "title": 'fill="currentColor" font-weight="600"',
    "small": 'fill="currentColor" font-size="11"',
    "light": 'fill="#fff" font-size="11"',
}
"""Text styles as attributes: a style sheet in a figure would apply to the whole page around it."""

_GRID = 'stroke="currentColor" stroke-opacity="0.15"'
_AXIS = 'stroke="currentColor" stroke-opacity="0.5"'

LOGARITHMIC_FROM = 30.0
"""Ratio of the largest to the smallest positive value above which an axis is logarithmic."""

_FIRST: Final = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#be123c", "#0891b2", "#a16207", "#475569")
"""Colours that most eyes can tell apart, on white."""

_BRIGHTEST: Final = 0.36
"""The relative luminance of the brightest line; white has 1."""


@dataclass(frozen=True)
class Chart:
    """A figure."""

    height: int
    title: str
    body: str

    def svg(self, y: int = 0, *, scale: float = 1) -> str:
        """Return the figure as an SVG element, offset by ``y`` inside another; texts have the colour of the page."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self.height}" '
            f'width="{_WIDTH * scale:g}" height="{self.height * scale:g}" y="{y}" role="img" '
            f'font-family="system-ui,sans-serif" font-size="12" aria-label="{html.escape(visible(self.title))}">'
            f"{self.body}</svg>"
        )


def stacked(charts: Sequence[Chart]) -> str:
    """Return charts one below the other on white, as an SVG file."""
    tops = list(itertools.accumulate((chart.height + 16 for chart in charts), initial=8))
    inside = "".join(chart.svg(top) for chart, top in zip(charts, tops, strict=False))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {_WIDTH + 16} {tops[-1]}" width="{_WIDTH + 16}" '
        f'height="{tops[-1]}"><rect x="-8" width="100%" height="100%" fill="#fff"/>{inside}</svg>\n'
    )


def line_chart(series: Mapping[str, Sequence[float]], positions: Sequence[float], *, title: str) -> Chart:
    """Draw lines over epochs."""
    legend, top = _legend(list(series), title)
    height = top + 220 + _BOTTOM
    values = [value for line in series.values() for value in line]
    across = Scale.around(positions, _LEFT, _WIDTH - _RIGHT)
    up = Scale.around(values, height - _BOTTOM, top, logarithmic=spans_orders(values))
    parts = [legend, _grid(up, None), _whole_marks(across, positions, height), _axis_name("epoch", height)]
    for colour, line in zip(colours(len(series)), series.values(), strict=True):
        parts.append(_line(line, positions, across, up, colour))
    return Chart(height, title, "".join(parts))


def curve_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    name: str,
    falling: bool = False,
    logarithmic: tuple[bool, bool] = (False, False),
) -> Chart:
    """Draw lines through points (x, y); a single point is a dot."""

    def drawable(point: tuple[float, float]) -> bool:
        return all(math.isfinite(at) and (at > 0 or not log) for at, log in zip(point, logarithmic, strict=True))

    legend, top = _legend(list(curves), title)
    height = top + 260 + _BOTTOM
    known = [point for line in curves.values() for point in line if drawable(point)]
    across = Scale.around([x for x, _ in known], _LEFT, _WIDTH - _RIGHT, logarithmic=logarithmic[0])
    if falling:
        across = dataclasses.replace(across, start=across.end, end=across.start)
    up = Scale.around([y for _, y in known], height - _BOTTOM, top, logarithmic=logarithmic[1])
    parts = [legend, _grid(up, across), _axis_name(name, height)]
    for colour, line in zip(colours(len(curves)), curves.values(), strict=True):
        ys = [y if drawable((x, y)) else math.nan for x, y in line]
        parts.append(_line(ys, [x for x, _ in line], across, up, colour))
    return Chart(height, title, "".join(parts))


def bar_chart(bars: Mapping[str, float], *, title: str, notes: Mapping[str, str] | None = None) -> Chart:
    """Draw bars from 0 to 1, one below the other, each with its note behind it."""
    row, left = 22, 240
    height = 36 + row * len(bars) + 8
    width = _WIDTH - left - 150
    parts = [_text(0, 16, title, "title")]
    for index, (name, value) in enumerate(bars.items()):
        y = 32 + row * index
        length = max(0.0, min(1.0, value)) * width if math.isfinite(value) else 0.0
        parts.append(_text(left - 8, y + 14, _short(name, 34), "small", anchor="end", full=name))
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{width}" height="14" fill="#e2e8f0"/>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="14" fill="{colours(1)[0]}"/>')
        parts.append(_text(left + width + 8, y + 14, shown(value) if notes is None else notes[name], "small"))
    return Chart(height, title, "".join(parts))


def matrix_chart(counts: Sequence[Sequence[float]], labels: Sequence[str], *, title: str) -> Chart:
    """Draw a confusion matrix: rows are true classes, columns predicted ones; darker is more of the row."""
    size = len(labels)
    names = [_short(label, 14) for label in labels]
    left = 46 + round(max(map(len, names)) * _LETTER)
    cell = max(6, min(44, (_WIDTH - left) // size))
    below = round(max(map(len, names)) * _LETTER * 0.75) + 44
    top = 36
    named = cell >= 12
    height = top + cell * size + (below if named else 36)
    parts = [_text(0, 16, title, "title")]
    for row, name in enumerate(names):
        total = sum(counts[row])
        y = top + row * cell
        if named:
            parts.append(_text(left - 6, y + cell / 2 + 4, name, "small", anchor="end", full=labels[row]))
        for column in range(size):
            count = counts[row][column]
            share = count / total if total else 0.0
            x = left + column * cell
            hint = f"{visible(labels[row])} taken for {visible(labels[column])}: {shown(count)} of {shown(total)}"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill="{_shade(share)}">'
                f"<title>{html.escape(hint)}</title></rect>"
            )
            if size <= _NUMBERS_UP_TO and count:
                ink = "light" if share > 0.5 else "small"
                parts.append(_text(x + cell / 2, y + cell / 2 + 4, shown(count), ink, anchor="middle"))
    if named:
        for column, name in enumerate(names):
            centre, foot = left + column * cell + cell / 2, top + cell * size + 10
            turned = f' transform="rotate(-45 {centre:.1f} {foot})"'
            parts.append(_text(centre, foot + 4, name, "small", anchor="end", more=turned, full=labels[column]))
    parts.append(_text(left + cell * size / 2, height - 6, "predicted", "small", anchor="middle"))
    middle = top + cell * size / 2
    turn = f' transform="rotate(-90 12 {middle:.1f})"'
    parts.append(_text(12, middle, "true", "small", anchor="middle", more=turn))
    return Chart(height, title, "".join(parts))


def point_chart(across: Sequence[float], up: Sequence[float], *, title: str, names: tuple[str, str]) -> Chart:
    """Draw points, with the line on which both coordinates are equal."""
    pairs = [pair for pair in zip(across, up, strict=True) if all(map(math.isfinite, pair))]
    height = 420
    both = [value for pair in pairs for value in pair]
    x = Scale.around(both, _LEFT, _WIDTH - _RIGHT)
    y = Scale.around(both, height - _BOTTOM, 36)
    parts = [
        _text(0, 16, title, "title"),
        _grid(y, x),
        _axis_name(names[0], height),
        _text(_LEFT, 32, names[1], "small"),
    ]
    parts.append(
        f'<line {_AXIS} stroke-dasharray="4 4" x1="{x(x.low):.1f}" y1="{y(x.low):.1f}" '
        f'x2="{x(x.high):.1f}" y2="{y(x.high):.1f}"/>'
    )
    dots = "".join(f'<circle cx="{x(first):.1f}" cy="{y(second):.1f}" r="2.5"/>' for first, second in pairs)
    parts.append(f'<g fill="{colours(1)[0]}" fill-opacity="0.45">{dots}</g>')
    return Chart(height, title, "".join(parts))


def column_chart(counts: Sequence[float], edges: Sequence[float], *, title: str, name: str) -> Chart:
    """Draw a histogram."""
    top, height = 36, 36 + 160 + _BOTTOM
    x = Scale(edges[0], edges[-1], _LEFT, _WIDTH - _RIGHT)
    y = Scale(0.0, max(counts, default=0) * 1.05 or 1.0, height - _BOTTOM, top)
    parts = [_text(0, 16, title, "title"), _grid(y, x), _axis_name(name, height)]
    for count, (first, last) in zip(counts, itertools.pairwise(edges), strict=True):
        width = max(0.5, x(last) - x(first) - 1)
        parts.append(
            f'<rect x="{x(first):.1f}" y="{y(count):.1f}" width="{width:.1f}" '
            f'height="{y(0) - y(count):.1f}" fill="{colours(1)[0]}"/>'
        )
    return Chart(height, title, "".join(parts))


@dataclass(frozen=True)
class Scale:
    """Map from values to positions on an axis."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    @classmethod
    def around(cls, values: Iterable[float], start: float, end: float, *, logarithmic: bool = False) -> Scale:
        """Return a scale that contains all finite values, with a margin on both sides.

        >>> round(Scale.around([2.0], 0, 100)(2.0))
        50
        """
        found = [value for value in values if math.isfinite(value) and (value > 0 or not logarithmic)]
        low, high = (min(found), max(found)) if found else (0.0, 1.0)
        if logarithmic:
            room = 1.1 if high == low else (high / low) ** 0.04
            return cls(low / room, high * room, start, end, True)
        room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def marks(self, most: int = 6) -> list[float]:
        """Return round values within the scale.

        >>> Scale(0.0, 1.04, 0, 100).marks()
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        >>> Scale(0.008, 12.0, 0, 100, logarithmic=True).marks()
        [0.01, 0.1, 1.0, 10.0]
        >>> Scale(0.07, 1.5, 0, 100, logarithmic=True).marks()
        [0.1, 0.2, 0.5, 1.0]
        """
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 2:
                every = -(-(last - first + 1) // most)
                return [float(f"1e{power}") for power in range(first, last + 1, every)]
            found = [float(f"{factor}e{power}") for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
            if sum(self.low <= mark <= self.high for mark in found) > 1:
                return [mark for mark in found if self.low <= mark <= self.high]
        rough = (self.high - self.low) / most
        if not rough > 0 or not math.isfinite(rough):
            return [self.low]
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def spans_orders(values: Iterable[float]) -> bool:
    """Return whether values are easier to read on a logarithmic axis."""
    found = [value for value in values if math.isfinite(value)]
    return bool(found) and min(found) > 0 and max(found) > LOGARITHMIC_FROM * min(found)


def shown(value: float) -> str:
    """Return a value in few characters.

    >>> shown(0.25), shown(1234567.0), shown(3.0), shown(float("nan"))
    ('0.25', '1.235e+06', '3', 'nan')
    """
    return f"{value:.4g}"


def colours(count: int) -> list[str]:
    """Return a different colour for each line, as ``#rrggbb``.

    >>> colours(2)
    ['#2563eb', '#ea580c']
    >>> len(set(colours(200)))
    200
    """
    if count <= len(_FIRST):
        return list(_FIRST[:count])
    return [_hex(index / count, (0.3, 0.45, 0.6)[index % 3]) for index in range(count)]


def _hex(hue: float, lightness: float) -> str:
    """Return a colour dark enough for a line on white: yellow and green are brighter than blue of equal lightness."""
    while True:
        parts = colorsys.hls_to_rgb(hue, lightness, 0.85)
        if sum(weight * part**2.2 for weight, part in zip((0.21, 0.72, 0.07), parts, strict=True)) < _BRIGHTEST:
            return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
        lightness *= 0.95


def _line(line: Sequence[float], positions: Sequence[float], across: Scale, up: Scale, colour: str) -> str:
    """Draw a line with gaps where a value is not finite, and dots where there are few."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for position, value in zip(positions, line, strict=True):
        if math.isfinite(value):
            pieces[-1].append((across(position), up(value)))
        elif pieces[-1]:
            pieces.append([])
    found = []
    for piece in pieces:
        if len(piece) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            found.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if len(piece) == 1 or len(line) <= _MARKERS_UP_TO:
            found += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in piece]
    return "".join(found)


def _legend(names: Sequence[str], title: str) -> tuple[str, int]:
    """Return the title and, for several lines, a legend below it; and the top of the chart below both."""
    parts, x, y = [_text(0, 16, title, "title")], 0.0, 36
    if len(names) < 2:
        return parts[0], 32
    for colour, name in zip(colours(len(names)), names, strict=True):
        text = _short(name, 60)
        width = 26 + _LETTER * len(text)
        if x and x + width > _WIDTH:
            x, y = 0.0, y + 18
        parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="12" height="10" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 17, y, text, "small", full=name))
        x += width
    return "".join(parts), y + 14


def _grid(up: Scale, across: Scale | None) -> str:
    found = []
    for mark in up.marks():
        y = up(mark)
        found.append(f'<line {_GRID} x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        found.append(_text(_LEFT - 6, y + 4, shown(mark), "small", anchor="end"))
    for mark in across.marks() if across is not None else ():
        assert across is not None
        x = across(mark)
        found.append(f'<line {_GRID} x1="{x:.1f}" y1="{up.start}" x2="{x:.1f}" y2="{up.end}"/>')
        found.append(_text(x, up.start + 16, shown(mark), "small", anchor="middle"))
    return "".join(found)


def _whole_marks(across: Scale, positions: Sequence[float], height: int) -> str:
    """Draw marks at integer positions that occur in the data."""
    known = {round(position) for position in positions}
    marks = [mark for mark in across.marks(8) if mark == round(mark) and mark in known] or sorted(known)[:1]
    y = height - _BOTTOM
    line = f'<line {_AXIS} x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>'
    return line + "".join(_text(across(mark), y + 16, str(round(mark)), "small", anchor="middle") for mark in marks)


def _axis_name(name: str, height: int) -> str:
    return _text((_LEFT + _WIDTH - _RIGHT) / 2, height - 8, name, "small", anchor="middle")


def _text(
    x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", more: str = "", full: str | None = None
) -> str:
    hint = "" if full is None or full == text else f"<title>{html.escape(visible(full))}</title>"
    content = html.escape(visible(text))
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" unicode-bidi="isolate"{more}'
    return f"<text {where} {_TEXTS[kind]}>{content}{hint}</text>"


def _shade(share: float) -> str:
    first = [int(colours(1)[0][index : index + 2], 16) for index in (1, 3, 5)]
    mixed = [round(light + (part - light) * share**0.6) for light, part in zip((241, 245, 249), first, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"...{text[-(most - 3) :]}"


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
        turned = given.get("transform", "").partition("rotate(")[2].partition(" ")[0]
        axes.text(
            x,
            y,
            (element.text or "").replace("$", r"\$"),
            color=colour("fill"),
            fontsize=number("font-size", 12) * 72 / _INCH,
            fontweight="bold" if "font-weight" in given else "normal",
            ha={"middle": "center", "end": "right"}.get(given.get("text-anchor", ""), "left"),
            rotation=-float(turned or 0),
            rotation_mode="anchor",
        )
    if kind in ("svg", "g"):
        kept = {name: value for name, value in given.items() if name.startswith(("fill", "stroke", "font"))}
        for inner in element:
            _draw(axes, inner, kept, left, top)


_TRAINING, _VALIDATION = "training", "validation"


def losses_and_metrics(rows: Rows) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Group the measurements of all epochs by their display names: losses, and all others.

    >>> losses_and_metrics([{"epoch": 1, "loss": 2.0, "val_loss": 3.0, "val_top_5": 0.5}])
    ({'training': [2.0], 'validation': [3.0]}, {'validation top 5': [0.5]})
    """
    short = {"loss": _TRAINING, "val_loss": _VALIDATION}
    losses: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for name in measured_columns(rows):
        found = losses if name.endswith("loss") else metrics
        found[short.get(name, words(name))] = [row.get(name, math.nan) for row in rows]
    return losses, metrics


def measured(rows: Rows) -> list[Chart]:
    """Return a chart of the losses, and one for each metric."""
    losses, metrics = losses_and_metrics(rows)
    epochs = [row["epoch"] for row in rows]
    found = [line_chart(losses, epochs, title="loss")] if losses else []
    return found + [line_chart({name: column}, epochs, title=name) for name, column in metrics.items()]


def curves(rows: Rows) -> list[Chart]:
    """Return the charts of all measurements and of the learning rate."""
    if not rows:
        return []
    rates = [row.get("learning_rate", math.nan) for row in rows]
    rate = line_chart({"learning rate": rates}, [row["epoch"] for row in rows], title="learning rate")
    return [*measured(rows), rate]


def side_by_side(charts: list[Chart]) -> str:
    """Return charts as HTML for a notebook, as many in a row as fit; "" without charts."""
    inside = "".join(chart.svg(scale=0.75) for chart in charts)
    return f'<div style="display:flex;flex-wrap:wrap;gap:16px">{inside}</div>' if inside else ""
