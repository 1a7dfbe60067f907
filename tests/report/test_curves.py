"""A training history as charts: read back as XML, with the points at their positions."""

import math
import re
import xml.etree.ElementTree as Tree

import pytest

from onnxtrain.training.callbacks import History
from onnxtrain.training.report.charts import curves, measured, side_by_side, stacked

SVG = "{http://www.w3.org/2000/svg}"


def rows(**columns):
    count = len(next(iter(columns.values())))
    return [
        {"epoch": i + 1, "step": i, "learning_rate": 0.1, **{name: values[i] for name, values in columns.items()}}
        for i in range(count)
    ]


def read(chart):
    """Return the texts of a chart, and its lines as points."""
    root = Tree.fromstring(chart.svg())
    points = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter(f"{SVG}polyline")
    ]
    return [element.text for element in root.iter(f"{SVG}text")], points


def test_losses_have_one_chart_and_each_metric_its_own():
    found = rows(
        loss=[3.0, 2.0, 1.0],
        val_loss=[2.0, 2.0, 2.0],
        val_accuracy=[0.1, 0.5, 0.9],
        val_hinge_loss=[4.0, 3.0, 2.0],
    )
    losses, accuracy = map(read, measured(found))
    assert losses[0][0] == "loss"
    assert {"training", "validation", "validation hinge loss", "epoch", "1", "2", "3"} <= set(losses[0])
    assert accuracy[0][0] == "validation accuracy"
    (training, validation, hinge), (line,) = losses[1], accuracy[1]
    assert [x for x, _ in training] == [x for x, _ in validation] == [x for x, _ in line]
    assert training[0][1] < training[1][1] < training[2][1]  # y grows downwards
    assert len({y for _, y in validation}) == 1
    assert validation[0][1] == training[1][1] == hinge[2][1]
    assert line[0][1] > line[2][1]
    assert [chart.title for chart in curves(found)] == ["loss", "validation accuracy", "learning rate"]


def test_a_loss_that_falls_far_is_on_a_logarithmic_axis():
    ((texts, (line,)),) = map(read, measured(rows(loss=[100.0, 10.0, 1.0])))
    assert {"100", "10", "1"} <= set(texts)
    assert line[1][1] == pytest.approx((line[0][1] + line[2][1]) / 2, abs=0.2)


@pytest.mark.parametrize(
    ("values", "points"),
    [([1.0], 1), ([1.0, math.nan, 3.0], 2), ([2.0, 2.0], 2), ([math.nan, math.inf], 0), ([0.0, -1.0], 2)],
)
def test_odd_values_are_drawn_as_far_as_they_can_be(values, points):
    (chart,) = measured(rows(loss=values))
    root = Tree.fromstring(chart.svg())
    found = [(float(point.get("cx")), float(point.get("cy"))) for point in root.iter(f"{SVG}circle")]
    assert len(found) == points
    assert all(0 <= x <= 640 and 0 <= y <= chart.height for x, y in found)


def test_names_are_escaped():
    (_, chart) = measured(rows(loss=[1.0], **{"val_<b>": [1.0]}))
    assert "<b>" not in chart.svg()
    Tree.fromstring(chart.svg())


def test_a_history_shows_curves_and_a_table():
    history = History()
    assert "<svg" not in history._repr_html_()
    history.rows = rows(loss=[2.0, 1.0], val_f1=[0.1, 0.2])
    shown = history._repr_html_()
    assert shown.count("<svg") == 2
    assert "<table>" in shown


def test_a_notebook_keeps_its_own_style():
    """Check that figures add no style sheet to the surrounding page, and use its text colour."""
    shown = side_by_side(curves(rows(loss=[2.0, 1.0], val_loss=[3.0, 2.0])))
    assert "<style" not in shown
    assert "class=" not in shown
    colours = re.findall(r'<text [^>]*fill="([^"]*)"', shown)
    assert set(colours) == {"currentColor"}
    assert "<svg" in stacked(curves(rows(loss=[2.0])))
    assert side_by_side([]) == ""
