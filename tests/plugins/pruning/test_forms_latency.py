"""benchmarks/sparse_forms_latency.py on a few synthetic digits: the models that --keep kept, and the front."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from onnxtrain.runtime import native
from zoo.mnist_files import write_digits

pytestmark = pytest.mark.thorough

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(SCRIPTS))

import sparse_forms as forms  # noqa: E402
import sparse_forms_latency as latency  # noqa: E402


@pytest.mark.skipif(native.custom_ops_library() is None, reason="needs the native kernels")
def test_kept_models_are_timed_beside_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forms, "HELD_OUT", 200)
    write_digits(tmp_path, 500, 300)
    kept, results = tmp_path / "kept", tmp_path / "rows.csv"
    kept.mkdir()
    for seed in (0, 1):
        forms.train_dense(tmp_path, ("final", "mlp", seed), tmp_path, None, kept)
        for form in ("4x1", "channels"):
            run = forms.Run("final", "mlp", form, "magnitude", "uniform", 0.05, seed)
            forms.append(results, forms.prune(tmp_path, run, tmp_path, None, kept))
    assert len(list(kept.iterdir())) == 1 + 2 * 3  # of seed 0
    arguments = ["--data", str(tmp_path), "--csv", str(results), "--models", str(kept), "--rounds", "1"]
    assert latency.main([*arguments, "--batches", "4", "--output", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "resnet.onnx" in capsys.readouterr().err  # not kept, so not timed
    names = re.findall(r"^\| ([^|]+) \| \d+\.\d\d \| \**\d+\.\d\d\** \|$", page, re.MULTILINE)
    pruned = {f"{form}, magnitude, {zeros}" for form in ("4x1", "channels") for zeros in ("80%", "90%", "95%")}
    assert set(names) == {"dense float32", "dense int8", *pruned}
    assert page.count("**") >= 2


def test_a_front_has_no_variant_that_another_one_beats() -> None:
    errors, speeds = [10, 10, 12, 9, 12], [1.0, 2.0, 2.0, 1.0, 3.0]
    assert list(latency.on_front(errors, speeds)) == [False, True, False, True, True]
    assert list(latency.on_front([5, 5], [1, 1])) == [True, True]
