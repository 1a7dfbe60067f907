"""Charts: every value is drawn at its position, colours differ, legends cover nothing."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as Tree

import pytest

from onnxtrain.training.report.charts import (
    Scale,
    bar_chart,
    colours,
    column_chart,
    curve_chart,
    line_chart,
    matrix_chart,
    png,
    point_chart,
    spans_orders,
    stacked,
)
from onnxtrain.training.report.page import page
from onnxtrain.training.report.record import Confusion, ParameterRow, Residuals, RunRecord, best_epoch

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    {"epoch": e, "step": e + 1, "learning_rate": 0.1, "loss": 2.0 / (e + 1), "val_loss": 2.5 / (e + 1)}
    for e in range(6)
]


def elements(chart, tag):
    return list(Tree.fromstring(chart.svg()).iter(SVG + tag))


def texts(chart):
    return [element.text for element in elements(chart, "text")]


@pytest.mark.parametrize("count", [1, 8, 9, 20, 100])
def test_colours_do_not_repeat(count):
    found = colours(count)
    assert len(set(found)) == count
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in found)
    for colour in found:  # dark enough for a line on white
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        assert 0.21 * red**2.2 + 0.72 * green**2.2 + 0.07 * blue**2.2 < 0.4


def test_lines_have_all_values_and_colours_of_their_own():
    series = {f"line {index}": [index + 1.0, index + 2.0, index + 1.5] for index in range(12)}
    chart = line_chart(series, [1, 2, 3], title="many")
    lines = elements(chart, "polyline")
    assert len(lines) == len({line.get("stroke") for line in lines}) == 12
    assert {text for text in texts(chart) if text in series} == set(series)
    places = [[tuple(map(float, pair.split(","))) for pair in line.get("points").split()] for line in lines]
    assert all(a[0] < b[0] < c[0] and a[1] > c[1] > b[1] for a, b, c in places)
    legend = max(float(element.get("y")) for element in elements(chart, "text") if element.text in series)
    assert min(y for line in places for _, y in line) > legend, "the legend covers a line"
    assert max(float(element.get("x")) for element in elements(chart, "text")) < 640


def test_gaps_and_single_points():
    chart = line_chart({"loss": [1.0, math.nan, 3.0, 2.0, math.inf]}, [1, 2, 3, 4, 5], title="loss")
    assert len(elements(chart, "polyline")) == 1
    assert len(elements(chart, "circle")) == 3
    assert not elements(line_chart({"loss": [math.nan]}, [1], title="loss"), "circle")


def test_one_epoch_looks_like_one():
    chart = line_chart({"training": [0.5], "validation": [0.7]}, [1], title="loss")
    assert len(elements(chart, "circle")) == 2
    assert not elements(chart, "polyline")
    whole = [element for element in elements(chart, "text") if element.text == "1"]
    assert len(whole) == 1
    assert float(whole[0].get("x")) == float(elements(chart, "circle")[0].get("cx"))
    assert "2" not in texts(chart)


def test_logarithmic_where_values_span_orders():
    assert spans_orders([1.0, 0.01])
    assert not spans_orders([1.0, 0.5])
    assert not spans_orders([1.0, 0.0])
    chart = line_chart({"loss": [100.0, 1.0, 0.01]}, [1, 2, 3], title="loss")
    (line,) = elements(chart, "polyline")
    heights = [float(pair.split(",")[1]) for pair in line.get("points").split()]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
    assert {"1", "100"} <= set(texts(chart))


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-9, 1e-9], [1e30, 2e30], [math.nan], []])
def test_scales_of_any_values(values):
    scale = Scale.around(values, 0, 100)
    assert all(0 <= scale(value) <= 100 for value in values if math.isfinite(value))
    assert all(scale.low <= mark <= scale.high for mark in scale.marks())


def test_matrix_counts_and_names():
    chart = matrix_chart([[5, 1], [0, 7]], ["a<b", "x" * 40], title="confusion matrix")
    found = texts(chart)
    assert {"5", "1", "7", "a<b", "true", "predicted"} <= set(found)
    assert "0" not in found
    hints = [element.text for element in elements(chart, "title")]
    assert "a<b taken for " + "x" * 40 + ": 1 of 6" in hints
    fills = [cell.get("fill") for cell in elements(chart, "rect")]
    assert len(set(fills)) == 4  # 0, 1/6, 5/6 and all of a row
    big = matrix_chart([[1.0] * 100] * 100, [str(i) for i in range(100)], title="large")
    assert len(elements(big, "rect")) == 10_000


def test_bars_columns_and_points():
    chart = bar_chart({"a": 0.5, "b": 1.0, "c": math.nan}, title="zeros")
    lengths = [float(bar.get("width")) for bar in elements(chart, "rect")]
    assert lengths[1] == lengths[0] / 2
    assert lengths[3] == lengths[2]
    assert lengths[5] == 0
    columns = elements(column_chart([1, 4], [0.0, 1.0, 2.0], title="residuals", name="x"), "rect")
    assert float(columns[1].get("height")) == pytest.approx(4 * float(columns[0].get("height")), abs=0.3)
    points = elements(point_chart([0.0, 1.0, math.nan], [0.0, 1.0, 2.0], title="p", names=("a", "b")), "circle")
    assert len(points) == 2


def test_stacked_charts_do_not_overlap():
    charts = [line_chart({"loss": [1.0, 2.0]}, [1, 2], title=str(index)) for index in range(3)]
    found = list(Tree.fromstring(stacked(charts)).findall(SVG + "svg"))
    ends = [float(each.get("y")) + float(each.get("height")) for each in found]
    assert all(end <= float(after.get("y")) for end, after in zip(ends, found[1:], strict=False))


def test_the_page_shows_everything_and_obeys_nothing():
    evil = '<script>alert(1)</script>"\x1b]0;\u202e'
    record = RunRecord(
        title=evil,
        command=f"onnxtrain fit {evil}",
        facts={"model": evil},
        rows=[{**row, evil: 1.0} for row in ROWS],
        parameters=[ParameterRow(evil, (3, 4), 0.25, 1.5, 0.5, 0.1)],
        gradient_norms={evil: [0.1] * 6, "b": [1.0] * 6},
        outcome=[Confusion([[3, 1], [0, 2]], [evil, "b"]), Residuals([1.0, 2.0], [1.5, 2.5])],
        settings=f"# {evil}",
    )
    text = page(record)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert not re.search(r"(src|href)\s*=|url\(|@import", text), "something outside is loaded"
    for words in ("Curves", "confusion matrix", "residuals", "norm of the gradient", "3 of 12 trained weights", "12"):
        assert words in text, words
    assert "5 of 6 right." in text
    assert "mean 0.5, standard deviation 0." in text


def test_a_page_of_nothing_is_a_page():
    assert "<h1>empty</h1>" in page(RunRecord("empty"))


@pytest.mark.parametrize(
    ("values", "name", "best"),
    [([1.0, 3.0, 2.0], "val_accuracy", 1), ([2.0, 1.0, 3.0], "loss", 1), ([math.nan], "loss", None)],
)
def test_best_epoch(values, name, best):
    assert best_epoch(values, name) == best


def test_curves_over_numbers():
    curves = {"line": [(100.0, 1.0), (10.0, 2.0), (1.0, 3.0)], "dot": [(10.0, 2.0)], "gap": [(0.0, 1.0)]}
    chart = curve_chart(curves, title="t", name="n", falling=True, logarithmic=(True, False))
    (line,) = elements(chart, "polyline")
    (a, b, c) = (tuple(map(float, pair.split(","))) for pair in line.get("points").split())
    assert a[0] < b[0] < c[0]
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.2)
    dots = elements(chart, "circle")
    assert len(dots) == 4
    assert (float(dots[3].get("cx")), float(dots[3].get("cy"))) == b


def test_a_png_has_every_element_of_the_chart(monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn = []
    for name in ("add_patch", "plot", "text"):
        method = getattr(Axes, name)

        def counting(axes, *given, _method=method, _name=name, **more):
            drawn.append(_name)
            return _method(axes, *given, **more)

        monkeypatch.setattr(Axes, name, counting)
    charts = [
        line_chart({"a $1": [1.0, 2.0], "b": [3.0, 1.0]}, [1, 2], title="lines"),
        point_chart([0.0, 1.0], [0.0, 1.0], title="p", names=("a", "b")),
        matrix_chart([[5, 1], [0, 7]], ["a", "b"], title="m"),
    ]
    assert png(charts, title="all").startswith(b"\x89PNG")
    tags = [element.tag.removeprefix(SVG) for chart in charts for element in Tree.fromstring(chart.svg()).iter()]
    assert drawn.count("text") == 1 + tags.count("text")
    assert drawn.count("plot") == tags.count("line") + tags.count("polyline")
    assert drawn.count("add_patch") == tags.count("rect") + tags.count("circle")
