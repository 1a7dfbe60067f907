from __future__ import annotations

import math

import pytest

from onnxtrain.errors import ModelError, OptionError
from onnxtrain.training.callbacks import report
from onnxtrain.training.report.charts import measured
from sentences import raises_sentence

ROWS = [{"epoch": e, "step": 10 * e, "learning_rate": 0.1, "loss": 2.0 / e, "val_loss": 2.5 / e} for e in range(1, 7)]
MEASURED = [row | {"val_accuracy": 0.1 * (row["epoch"] - 1)} for row in ROWS]


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib")


def test_writes_a_png(tmp_path):
    report.save_curve(MEASURED, tmp_path / "curve.png", title="digits")
    content = (tmp_path / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.rstrip().endswith(b"IEND\xaeB`\x82")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_a_curve_as_svg_needs_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "matplotlib_available", lambda: False)
    report.save_curve(MEASURED, tmp_path / "c.svg")
    assert (tmp_path / "c.svg").read_text().startswith("<svg ")
    with pytest.raises(OptionError, match=r"saved as \.png or \.svg"):
        report.save_curve(MEASURED, tmp_path / "c.jpg")


def test_the_curve_has_the_charts_of_the_history(tmp_path, monkeypatch):
    """Tests of the figures are in tests/report."""
    drawn = []
    monkeypatch.setattr(report, "png", lambda charts, title: drawn.append((charts, title)) or b"")
    report.save_curve(MEASURED, tmp_path / "curve.png", title="digits")
    assert drawn == [(measured(MEASURED), "digits")]
    assert [chart.title for chart in drawn[0][0]] == ["loss", "validation accuracy"]
    assert len(measured(ROWS)) == 1


def test_survives_one_epoch_and_nan(tmp_path):
    report.save_curve([{"epoch": 1, "loss": 1.0}], tmp_path / "one.png")
    report.save_curve([{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": math.nan}], tmp_path / "nan.png")
    assert "nan" not in report.text_curve([{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": math.nan}])
    assert report.text_curve([{"epoch": 1, "loss": math.nan}])


def test_text_curve_goes_from_the_first_to_the_last_value():
    lines = report.text_curve(ROWS, width=21, height=5).splitlines()
    assert lines[0].split() == ["2.5", "|o"]
    assert lines[4].endswith("o")  # it overwrites the * in the same cell
    assert lines[4].split()[0] == f"{2 / 6:.4g}"
    assert lines[-1].split()[:2] == ["1", "6"]


def test_no_epoch(tmp_path):
    for draw in (report.text_curve, lambda rows: report.save_curve(rows, tmp_path / "curve.png")):
        with pytest.raises(OptionError, match="needs at least one epoch"):
            draw([])


def test_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(ModelError, match="there is no folder"):
        report.save_curve(ROWS, tmp_path / "missing" / "curve.png")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "matplotlib_available", lambda: False)
    with raises_sentence("matplotlib_missing"):
        report.save_curve(ROWS, tmp_path / "curve.png")
