"""The training curve as SVG: read back as XML, with the points where they belong."""

import itertools
import math
import xml.etree.ElementTree as ET

import pytest

from onnxtrain.training.callbacks import History
from onnxtrain.training.callbacks.curves import svg_curves

NAMESPACE = "{http://www.w3.org/2000/svg}"


def rows(**columns):
    count = len(next(iter(columns.values())))
    return [
        {"epoch": i + 1, "step": i, "learning_rate": 0.1, **{name: values[i] for name, values in columns.items()}}
        for i in range(count)
    ]


def read(text):
    """Panels as (texts, lines of points)."""
    root = ET.fromstring(text)
    return [
        (
            [element.text for element in panel.iter(f"{NAMESPACE}text")],
            [
                [tuple(map(float, point.split(","))) for point in line.get("points").split()]
                for line in panel.iter(f"{NAMESPACE}polyline")
            ],
        )
        for panel in root.iter(f"{NAMESPACE}g")
    ]


def test_losses_and_metrics_are_side_by_side():
    (losses, lines), (metrics, more) = read(
        svg_curves(rows(loss=[3.0, 2.0, 1.0], validation_loss=[2.0, 2.0, 2.0], validation_accuracy=[0.1, 0.5, 0.9]))
    )
    assert losses[0] == "loss"
    assert {"training", "validation", "epoch", "1", "2", "3"} <= set(losses)
    assert metrics[0] == "validation accuracy"
    assert "0.9" in metrics
    (training, validation), (accuracy,) = lines, more
    assert [x for x, _ in training] == [x for x, _ in validation] == [x for x, _ in accuracy]
    assert training[1][0] == pytest.approx((training[0][0] + training[2][0]) / 2, abs=0.1)
    assert training[0][1] < training[1][1] < training[2][1]  # down is more
    assert len({y for _, y in validation}) == 1
    assert validation[0][1] == training[1][1]
    assert accuracy[0][1] > accuracy[2][1]


def test_a_loss_that_falls_far_is_on_a_logarithmic_axis():
    ((texts, (line,)),) = read(svg_curves(rows(loss=[100.0, 10.0, 1.0])))
    assert {"100", "10", "1"} <= set(texts)
    assert line[1][1] == pytest.approx((line[0][1] + line[2][1]) / 2, abs=0.2)


@pytest.mark.parametrize(
    ("values", "points"),
    [([1.0], 1), ([1.0, math.nan, 3.0], 2), ([2.0, 2.0], 2), ([math.nan, math.inf], 0), ([0.0, -1.0], 2)],
)
def test_odd_values_are_drawn_as_far_as_they_can_be(values, points):
    ((_, (line,)),) = read(svg_curves(rows(loss=values)))
    assert len(line) == points
    assert all(0 <= x <= 360 and 0 <= y <= 220 for x, y in line)


def test_labels_do_not_cover_one_another():
    columns = {f"validation_m{i}": [0.5, 0.5 + i / 1000] for i in range(4)}
    _, (_, _) = read(svg_curves(rows(loss=[1.0, 0.5], **columns)))
    root = ET.fromstring(svg_curves(rows(loss=[1.0, 0.5], **columns)))
    labels = [t for t in root.iter(f"{NAMESPACE}text") if t.text.startswith("0.50") and t.get("text-anchor") == "start"]
    heights = sorted(float(label.get("y")) for label in labels)
    assert len(heights) == 3
    assert all(b - a >= 10.9 for a, b in itertools.pairwise(heights))


def test_names_are_escaped():
    assert "<b>" not in svg_curves(rows(loss=[1.0], **{"validation_<b>": [1.0]}))


def test_a_history_shows_curves_and_a_table():
    history = History()
    assert "<svg" not in history._repr_html_()
    history.rows = rows(loss=[2.0, 1.0])
    assert history._repr_html_().startswith("<svg")
    assert "<table>" in history._repr_html_()
