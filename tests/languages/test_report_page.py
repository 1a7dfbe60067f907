"""The report of a run in a real browser: all figures are drawn, and no text overlaps another."""

from __future__ import annotations

import html
import json
import re
import subprocess

import numpy as np
import pytest
from javascript import BROWSER, needs_browser

import stranger_runs
from onnxtrain.training.report.charts import colours
from onnxtrain.training.report.page import page
from onnxtrain.training.report.record import Confusion, ParameterRow, Residuals, RunRecord

Image = pytest.importorskip("PIL.Image")

pytestmark = [needs_browser, pytest.mark.browser]

MEASURE = """<script>
const found = {outside: [], covered: [], texts: 0, pictures: document.querySelectorAll("svg").length};
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map(text => {
    const turned = text.hasAttribute("transform");
    return {box: text.getBoundingClientRect(), text: text.textContent, turned};
  });
  found.texts += boxes.length;
  for (const {box, text} of boxes)
    if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
        box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      found.outside.push(text);
  const shapes = [...svg.querySelectorAll("polyline,circle")].map(
    shape => ({box: shape.getBoundingClientRect(), text: shape.tagName}));
  boxes.forEach((one, index) => {
    for (const other of [...boxes.slice(index + 1), ...shapes]) {
      const wide = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
      const high = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
      if (!one.turned && !other.turned && wide > 1 && high > 3) found.covered.push([one.text, other.text]);
    }
  });
}
found.wide = document.documentElement.scrollWidth - window.innerWidth;
document.body.innerHTML = "<pre id=found>" + JSON.stringify(found).replaceAll("<", "&lt;") + "</pre>";
</script>"""


def browse(*flags: object) -> str:
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def record(epochs: int) -> RunRecord:
    rng = np.random.default_rng(0)
    names = [f"backbone.blocks.{index}.attention.projection.weight" for index in range(14)]
    rows = [
        {
            "epoch": epoch,
            "step": epoch + 1,
            "learning_rate": 0.01,
            "loss": 3.0 * 0.5**epoch,
            "val_loss": 3.1 * 0.6**epoch,
            "val_accuracy": 1 - 0.8 ** (epoch + 1),
        }
        for epoch in range(epochs)
    ]
    labels = ["a very long name of a class", *"bcdefghij"]
    truth = rng.normal(size=200)
    return RunRecord(
        "model.onnx",
        command="onnxtrain fit " + "x" * 300,
        facts={"model": "model.onnx"},
        rows=rows,
        parameters=[ParameterRow(name, (64, 64), 0.5, 1.0, 0.1, 0.01) for name in names],
        gradient_norms={name: rng.uniform(0.001, 10, epochs).tolist() for name in names},
        outcome=[
            Confusion((rng.uniform(0, 50, (10, 10)).round() + 900 * np.eye(10)).tolist(), labels),
            Residuals(truth.tolist(), (truth + rng.normal(size=200)).tolist()),
        ],
        settings="epochs = 3\n",
    )


@pytest.mark.parametrize("epochs", [1, 2, 30])
def test_no_text_covers_another(tmp_path, epochs):
    text = page(record(epochs))
    text = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", MEASURE + "</body>")
    (tmp_path / "page.html").write_text(text)
    dom = browse("--window-size=1400,1000", "--dump-dom", f"file://{tmp_path}/page.html")
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert found["pictures"] == 8
    assert found["texts"] > 100
    assert found["outside"] == []
    assert found["covered"] == []
    assert found["wide"] <= 0, "the page is wider than its window"


@pytest.mark.parametrize("kind", ["pictures", "flowers"])
def test_the_reports_of_the_documentation_are_seen(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = stranger_runs.run(kind, tmp_path)
    for name, size in (("report.html", "1400,2000"), ("curves.svg", "700,900")):
        path = tmp_path / f"{name}.png"
        browse(f"--window-size={size}", f"--screenshot={path}", f"file://{folder}/{name}")
        pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3).astype(int)
        assert (pixels.mean(0) > 200).all(), "the page is not on white"
        for colour in colours(2):  # of the training loss, and of the validation loss
            own = [int(colour[index : index + 2], 16) for index in (1, 3, 5)]
            drawn = (np.abs(pixels - own).sum(1) < 12).sum()
            assert drawn > 200, f"{name} has {drawn} pixels in {colour}"
