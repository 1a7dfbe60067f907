"""String outputs are written as text, never as Python objects."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

MODEL = """<ir_version: 8, opset_import: ["": 18]>
f (float[N, 4] input) => (string[N] word) <string[1] t = {"a b"}> {
    n = Shape <end = 1> (input)
    word = Expand(t, n)
}"""


@pytest.mark.parametrize("name", ["p.npz", "p.npy"])
def test_text_is_written_as_text(name, files, success):
    onnx.save(parser.parse_model(MODEL), files / "model.onnx")
    success("predict", "model.onnx", "--data", "test.npz", "--output", name)
    found = np.load(files / name, allow_pickle=False)
    array = found if name == "p.npy" else found["word"]
    assert array.dtype.kind == "U"
    assert array.tolist() == ["a b"] * 30
