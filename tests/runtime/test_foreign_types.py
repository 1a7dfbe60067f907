"""Inputs and outputs of ml_dtypes extension types: fed, fetched, trained on."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

import onnxtrain

TYPES = {"bfloat16": 16, "float16": 10, "float8e4m3fn": 17}
X = np.array([[1.0, -2.0], [0.5, 4.0], [0.0, 1.5]], np.float32)


def model(kind, *, inward):
    """Multiply x by w, with x or the result in another type."""
    first, last = (kind, "float") if inward else ("float", kind)
    cast = ("y = Cast<to = 1>(x)  z = MatMul(y, w)") if inward else f"y = MatMul(x, w)  z = Cast<to = {TYPES[kind]}>(y)"
    return parser.parse_model(f"""<ir_version: 9, opset_import: ["": 19]>
        g ({first}[N,2] x) => ({last}[N,2] z) <float[2,2] w = {{1.0, 2.0, 3.0, 4.0}}> {{ {cast} }}""")


def dtype(kind):
    return ir.DataType(TYPES[kind]).numpy()


@pytest.mark.parametrize("given", ["of the type", "of float32"])
@pytest.mark.parametrize("kind", TYPES)
def test_inputs(kind, given):
    if kind == "float16" and given == "of float32":
        pytest.skip("NumPy's own")
    x = X.astype(dtype(kind)) if given == "of the type" else X
    expected = X @ np.array([[1, 2], [3, 4]], np.float32)
    np.testing.assert_array_equal(onnxtrain.predict(model(kind, inward=True), x), expected)
    trainer = onnxtrain.Trainer(model(kind, inward=True), loss="mse", optimizer="sgd(lr=0.01)")
    losses = [trainer.train_step(x, np.zeros((3, 2), np.float32)) for _ in range(4)]
    assert losses[0] == pytest.approx(np.mean(expected**2), rel=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("kind", TYPES)
def test_outputs(kind, rows):
    found = onnxtrain.predict(model(kind, inward=False), X[:rows])
    assert found.dtype == dtype(kind)
    expected = (X[:rows] @ np.array([[1, 2], [3, 4]], np.float32)).astype(dtype(kind))
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
