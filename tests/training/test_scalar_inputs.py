"""Model inputs that are a scalar for all examples, or texts."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.errors import DataError, ModelError, OptionError
from onnxtrain.training.trainer import Trainer

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


VOICE = """<ir_version: 8, opset_import: ["": 18]> m (float[3] s, float[N,4] x) => (float[N,1] y)
    <float[4,1] w = {1, 2, -1, 0.5}, int64[1] a = {0}, int64[1] b = {1}> {
    z = MatMul(x, w)  f = Slice(s, a, b, a)  y = Mul(z, f) }"""

NEIGHBOURS = """<ir_version: 8, opset_import: ["": 18]> m (float[N,4,2] x, float[4,4] s) => (float[N,4,1] y)
    <float[2,1] w = {1, -1}> { a = MatMul(s, x)  y = MatMul(a, w) }"""


@pytest.mark.parametrize(("text", "shape"), [(VOICE, (4,)), (NEIGHBOURS, (4, 2))])
@pytest.mark.parametrize("rows", [3, 4, 10])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_input_of_a_fixed_size_beside_a_dynamic_batch_is_the_same_for_every_example(text, shape, rows, accumulate):
    model = onnx.parser.parse_model(text)
    setting = RNG.normal(size=next(_shape(value) for value in model.graph.input if value.name == "s")).astype(
        np.float32
    )
    x = RNG.normal(size=(rows, *shape)).astype(np.float32)
    y = RNG.normal(size=(rows, *shape[:-1], 1)).astype(np.float32)
    constant = onnx.ModelProto()
    constant.CopyFrom(model)
    constant.graph.initializer.append(onnx.numpy_helper.from_array(setting, "s"))
    del constant.graph.input[[value.name for value in model.graph.input].index("s")]
    found = []
    for one, inputs in ((model, {"x": x, "s": setting}), (constant, {"x": x})):
        subject = Trainer(one, loss="mse", optimizer="sgd(lr=0.01)", train="w", accumulate=accumulate)
        subject.fit(inputs, y, epochs=2, batch_size=2, validation=0.25)
        subject.fit([({**inputs, "x": x[p : p + 2]}, y[p : p + 2]) for p in range(0, rows, 2)])
        loss = subject.evaluate(inputs, y, batch_size=2)["loss"]
        found.append(
            [np.array(subject.parameters["w"]), loss, subject.predict(inputs), subject.predict(inputs, batch_size=2)]
        )
        assert subject.train_step(inputs, y) == pytest.approx(loss, rel=1e-5)
    for own, other in zip(*found, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    subject = Trainer(model, loss="mse", train="w")
    with pytest.raises(DataError, match="'s' has shape"):
        subject.fit({"x": x, "s": setting[:2]}, y)


def _shape(value):
    return tuple(dimension.dim_value for dimension in value.type.tensor_type.shape.dim)


def test_features_of_an_input_with_one_value_are_not_cached():
    subject = Trainer(onnx.parser.parse_model(VOICE), loss="mse")
    with pytest.raises(OptionError, match="cache_features keeps a row"):
        subject.fit({"s": np.ones(3), "x": X}, Y, cache_features=True)


def test_an_input_of_a_fixed_batch_is_not_the_same_for_every_example():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[2,4] s, float[N,4] x) => (float[N,1] y)
        <float[4,1] w = {1, 2, -1, 0.5}> { z = Add(x, s)  y = MatMul(z, w) }"""
    )
    both = {"s": X + 1, "x": X}
    np.testing.assert_allclose(onnxtrain.predict(model, both), (2 * X + 1) @ [[1], [2], [-1], [0.5]], rtol=1e-5)


def test_scalars_alone_are_one_example():
    dataset = open_dataset({"s": 1.0}, [TensorSpec("s", np.dtype(np.float32), ())], need_target=False)
    assert [batch.size for batch in dataset.batches(8)] == [1]
    with pytest.raises(DataError, match="the target array is a scalar, but it needs a first axis of examples"):
        Trainer(SCALAR, loss="mse", train="w").fit({"x": 1.0}, 1.0)


def test_inputs_of_texts_are_refused_before_the_training():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]> m (string[N] s) => (float[N, 2] y)
        <float[2, 3] table = {1, 2, 3, 4, 5, 6}, float[3, 2] w = {1, 2, 3, 4, 5, 6}>
        { i = ai.onnx.ml.LabelEncoder<keys_strings = ["a", "b"], values_int64s = [0, 1]>(s)
          e = Gather(table, i)  y = MatMul(e, w) }"""
    )
    with pytest.raises(ModelError, match=r"cannot read texts \('s'\).*start=\['i'\]"):
        Trainer(model, loss="mse")
    assert onnxtrain.predict(model, {"s": np.array(["a", "b"])}).shape == (2, 2)


SCALAR = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 18]> m (float x) => (float y) <float w = {2}> {
    z = Mul(x, w)  y = Tanh(z) }"""
)
MEAN = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 18]> m (float[N,4] x) => (float y)
    <float[4,1] w = {1, 2, -1, 0.5}> { z = MatMul(x, w)  y = ReduceMean <keepdims=0> (z) }"""
)


@pytest.mark.parametrize("kind", [float, np.float32, np.array])
def test_python_numbers_are_scalars(kind):
    """Steps, batches and predictions are those of arrays in a mapping."""
    one, other = (Trainer(SCALED, loss="mse", optimizer="sgd(lr=0.1)") for _ in range(2))
    half = kind(0.5)
    assert one.train_step((half, X), Y) == other.train_step({"s": np.float32(0.5), "x": X}, Y)
    np.testing.assert_array_equal(one.predict((half, X)), other.predict({"s": np.float32(0.5), "x": X}))
    np.testing.assert_array_equal(onnxtrain.predict(SCALED, (half, X)), onnxtrain.predict(SCALED, {"s": 0.5, "x": X}))
    assert one.evaluate((half, X), Y) == other.evaluate({"s": np.float32(0.5), "x": X}, Y)


@pytest.mark.parametrize("kind", [float, np.float32, np.array])
def test_a_model_of_one_number(kind):
    trainer = Trainer(SCALAR, loss="mse", optimizer="sgd(lr=0.1)", train="w")
    value = float(np.tanh(1.0))
    assert trainer.predict(kind(0.5)) == pytest.approx(value)
    assert onnxtrain.predict(SCALAR, kind(0.5)) == pytest.approx(value)
    loss = trainer.train_step(kind(0.5), kind(0.25))
    assert loss == pytest.approx((value - 0.25) ** 2)
    expected = 2 - 0.1 * 2 * (value - 0.25) * (1 - value**2) * 0.5
    assert float(trainer.parameters["w"]) == pytest.approx(expected)
    again = Trainer(SCALAR, loss="mse", optimizer="sgd(lr=0.1)", train="w")
    history = again.fit([(kind(0.5), kind(0.25))], progress=False)
    assert history.rows[0]["loss"] == pytest.approx(loss)
    assert again.parameters["w"] == trainer.parameters["w"]
    assert again.evaluate([(kind(0.5), kind(0.25))])["loss"] < loss


@pytest.mark.parametrize("kind", [float, np.float32])
def test_a_scalar_target_of_a_batch(kind):
    one, other = (Trainer(MEAN, loss="mse", optimizer="sgd(lr=0.1)") for _ in range(2))
    loss = one.train_step(X, kind(0.5))
    assert loss == pytest.approx(float(((X @ [1, 2, -1, 0.5]).mean() - 0.5) ** 2), rel=1e-5)
    assert other.fit([(X, kind(0.5))], progress=False).rows[0]["loss"] == pytest.approx(loss)
    np.testing.assert_array_equal(one.parameters["w"], other.parameters["w"])
