"""Model inputs that are a scalar for all examples, or texts."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.errors import DataError, ModelError
from onnxtrain.trainer import Trainer

RNG = np.random.default_rng(3)
X = RNG.normal(size=(12, 4)).astype(np.float32)
SCALED = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 18]> m (float s, float[N,4] x) => (float[N,1] y)
    <float[4,1] w = {1, 2, -1, 0.5}> { z = MatMul(x, w)  y = Mul(z, s) }"""
)
Y = X[:, :1]


def test_a_scalar_input_is_the_same_for_every_example():
    half = np.float32(0.5)
    sources = [{"s": half, "x": X, "y": Y}, ((0.5, X), Y), [((half, X[p : p + 5]), Y[p : p + 5]) for p in (0, 5, 10)]]
    results = []
    for source, accumulate in itertools.product(sources, (1, 2)):
        subject = Trainer(SCALED, loss="mean_squared_error", accumulate=accumulate)
        subject.fit(source, batch_size=5, shuffle=False, epochs=2)
        results.append(np.array(subject.parameters["w"]))
        assert subject.evaluate(source)["loss"] == pytest.approx(
            np.mean((X @ results[-1] / 2 - Y) ** 2, dtype=np.float64), rel=1e-5
        )
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)
    assert Trainer(SCALED, loss="mean_squared_error").predict({"s": 1, "x": X}).shape == (12, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "input 's' holds nan at example 0"),
        (np.ones(12), r"input 's' has rank 1 \(shape \(12,\)\), but the model needs rank 0: \(\)"),
    ],
)
def test_a_scalar_input_that_does_not_fit(value, message):
    with pytest.raises(DataError, match=message):
        Trainer(SCALED, loss="mean_squared_error").fit({"s": value, "x": X, "y": Y})


def test_scalars_alone_are_not_examples():
    with pytest.raises(DataError, match="the data has no examples: all of its arrays are scalars"):
        open_dataset({"s": 1.0}, [TensorSpec("s", np.dtype(np.float32), ())], need_target=False)


def test_inputs_of_texts_are_refused_before_the_training():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]> m (string[N] s) => (float[N, 2] y)
        <float[2, 3] table = {1, 2, 3, 4, 5, 6}, float[3, 2] w = {1, 2, 3, 4, 5, 6}>
        { i = ai.onnx.ml.LabelEncoder<keys_strings = ["a", "b"], values_int64s = [0, 1]>(s)
          e = Gather(table, i)  y = MatMul(e, w) }"""
    )
    with pytest.raises(ModelError, match="The input 's' takes texts"):
        Trainer(model, loss="mse")
    assert onnxtrain.predict(model, {"s": np.array(["a", "b"])}).shape == (2, 2)
