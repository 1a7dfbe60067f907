"""L-BFGS finds the minima that NumPy and scikit-learn find, and each step is one of the algorithm."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxtrain.lbfgs import minimize
from sklearn.linear_model import LogisticRegression

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.plugins.lbfgs import search as search_module
from onnxtrain.plugins.lbfgs.search import _scaled, _Search

RANDOM = np.random.default_rng(0)


def linear(inputs, outputs, dtype=np.float64):
    """y = x w + b, of zeros."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", kind, ["n", inputs])],
        [helper.make_tensor_value_info("y", kind, ["n", outputs])],
        [
            numpy_helper.from_array(np.zeros((inputs, outputs), dtype), "w"),
            numpy_helper.from_array(np.zeros(outputs, dtype), "b"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 1e-4)])
def test_least_squares(dtype, tolerance):
    x = (RANDOM.normal(size=(40, 5)) * [1, 10, 0.1, 3, 1]).astype(dtype)
    y = RANDOM.normal(size=(40, 2)).astype(dtype)
    trainer = onnxtrain.Trainer(linear(5, 2, dtype), loss="mse")
    found = minimize(trainer, x, y, steps=200, tolerance=tolerance / 10)
    wanted = np.linalg.lstsq(np.column_stack([x, np.ones(40)]), y, rcond=None)[0]
    np.testing.assert_allclose(trainer.parameters["w"], wanted[:-1], rtol=100 * tolerance, atol=tolerance)
    np.testing.assert_allclose(trainer.parameters["b"], wanted[-1], rtol=100 * tolerance, atol=tolerance)
    assert found.loss == pytest.approx(trainer.evaluate(x, y)["loss"], rel=1e-6)
    assert found.steps < 60
    if dtype is np.float64:  # in float32 the last line search finds only what is rounded
        assert found.evaluations < 2 * found.steps + 5


def test_logistic_regression_with_weights_of_examples():
    x = RANDOM.normal(size=(60, 3))
    y = (x @ [1, -2, 0.5] + RANDOM.logistic(size=60) > 0).astype(np.int64)
    weights = RANDOM.uniform(0.5, 2, 60)
    trainer = onnxtrain.Trainer(linear(3, 1), loss="bce")
    found = minimize(trainer, x, y[:, None].astype(np.float64), weights, steps=100, tolerance=1e-9)
    assert found.reason == "no element of the gradient is above the tolerance"
    theirs = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(x, y, sample_weight=weights)
    # The trainer keeps sample weights in float32.
    np.testing.assert_allclose(trainer.parameters["w"][:, 0], theirs.coef_[0], rtol=1e-4)
    np.testing.assert_allclose(trainer.parameters["b"], theirs.intercept_, rtol=1e-3)


@pytest.mark.parametrize("history", [10, None])
def test_rosenbrock(history):
    def function(v):
        x, y = v
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2, np.array(
            [-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)]
        )

    search = _Search(function, np.array([-1.2, 1.0]), history)
    losses = [search.loss]
    while np.abs(search.gradient).max() > 1e-10:
        assert search.step()
        losses.append(search.loss)
    np.testing.assert_allclose(search.x, 1, rtol=1e-9)
    assert len(losses) < 60
    assert all(np.diff(losses) <= 0)


def test_the_whole_inverse_hessian():
    """After each step it turns the change of the gradient into the step, and stays symmetric and positive."""
    hessian = np.diag(np.logspace(-6, 2, 12))
    search = _Search(lambda v: (float(v @ hessian @ v) / 2, hessian @ v), np.ones(12), None)
    for _ in range(25):
        x, gradient = search.x, search.gradient
        assert search.step()
        found = search._inverse._h
        np.testing.assert_allclose(found @ (search.gradient - gradient), search.x - x, rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(found, found.T, rtol=1e-6, atol=1e-9 * np.abs(found).max())
        assert np.linalg.eigvalsh((found + found.T) / 2).min() > 0
    np.testing.assert_allclose(_scaled(1.0, 1.0, 5), (1.0, 1.0))  # where the steps were right: BFGS


def test_least_squares_by_the_whole_inverse_hessian():
    random = np.random.default_rng(1)
    x, y = random.normal(size=(40, 5)) * [1, 10, 0.1, 3, 1], random.normal(size=(40, 2))
    trainer = onnxtrain.Trainer(linear(5, 2), loss="mse")
    found = minimize(trainer, x, y, steps=200, history=None, tolerance=1e-10)
    assert found.reason == "no element of the gradient is above the tolerance"
    wanted = np.linalg.lstsq(np.column_stack([x, np.ones(40)]), y, rcond=None)[0]
    np.testing.assert_allclose(trainer.parameters["w"], wanted[:-1], rtol=1e-7, atol=1e-8)


def test_the_whole_inverse_hessian_takes_fewer_steps():
    hessian = np.diag(np.logspace(-6, 2, 40))

    def steps(history):
        search = _Search(lambda v: (float(v @ hessian @ v) / 2, hessian @ v), np.ones(40), history)
        taken = 0
        while search.loss > 1e-8 and taken < 1000:
            assert search.step()
            taken += 1
        return taken

    assert 3 * steps(None) < steps(5)


def test_after_a_restart_the_gradient_has_the_scale_of_the_last_step():
    search = _Search(lambda v: (50 * float(v @ v), 100 * v), np.ones(3), None)
    assert search.step()
    search._inverse.clear()
    assert not search._inverse
    np.testing.assert_allclose(search._inverse.direction(np.full(3, 1e-9)), -1e-11)


def test_the_whole_inverse_hessian_of_too_many_parameters(monkeypatch):
    monkeypatch.setattr(search_module, "MOST_PARAMETERS", 2)
    with pytest.raises(OptionError, match="has 3 parameters; minimize keeps the whole inverse Hessian of at most 2: "):
        minimize(onnxtrain.Trainer(linear(2, 1), loss="mse"), np.ones((3, 2)), np.zeros((3, 1)), history=None)


def test_a_step_back_from_where_the_loss_is_infinite():
    def function(v):
        with np.errstate(all="ignore"):
            return float(v[0] - np.log(v[0])), 1 - 1 / v  # not defined below 0

    search = _Search(function, np.array([30.0]), 5)
    while search.step() and abs(search.gradient[0]) > 1e-8:
        pass
    assert search.x[0] == pytest.approx(1)


def test_the_whole_line_ends_at_a_flat_place():
    search = _Search(lambda v: (0.0, np.zeros_like(v)), np.ones(3), 5)
    assert not search.step()
    trainer = onnxtrain.Trainer(linear(2, 1), loss="mse")
    found = minimize(trainer, np.ones((3, 2)), np.zeros((3, 1)))
    assert (found.steps, found.loss, found.evaluations) == (0, 0.0, 1)


def test_what_is_frozen_stays_and_the_training_goes_on():
    x = RANDOM.normal(size=(32, 4)).astype(np.float32)
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.mlp((4, 8, 1), activation="tanh"),
        loss="mse",
        optimizer="adam(lr=0.01)",
        freeze="layer1.*",
        clip_norm=0.1,
    )
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in trainer.model().graph.initializer}
    seen = []
    found = minimize(trainer, x, x[:, :1], steps=20, progress=lambda step, loss: seen.append((step, loss)))
    assert seen[-1] == (20, found.loss)
    assert found.reason == "20 steps are done"
    after = {tensor.name: numpy_helper.to_array(tensor) for tensor in trainer.model().graph.initializer}
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == set(trainer.parameters)
    assert trainer.train_step(x, x[:, :1]) == pytest.approx(found.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0; minimize needs a number of at least 1."),
        ({"history": 0}, "history is 0; minimize needs a number of at least 1."),
        ({"tolerance": -1.0}, "tolerance is -1.0; minimize needs a number of at least 0."),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(OptionError, match=message):
        minimize(onnxtrain.Trainer(linear(2, 1), loss="mse"), np.ones((3, 2)), np.zeros((3, 1)), **options)


def test_masks_are_refused():
    trainer = onnxtrain.Trainer(linear(2, 1), loss="mse", masks={"w": np.array([[True], [False]])})
    with pytest.raises(OptionError, match="The trainer has masks, which minimize does not keep"):
        minimize(trainer, np.ones((3, 2)), np.zeros((3, 1)))


def test_the_equation_of_a_model_whose_loss_is_an_output():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (double[n] x) => (double loss) <double[1] w = {3}>
        { y = Mul(x, w)  d = Sub(y, x)  s = Mul(d, d)  loss = ReduceMean<keepdims=0>(s) }""")
    trainer = onnxtrain.Trainer(model, loss="output:loss", train="w")
    assert minimize(trainer, {"x": np.array([1.0, 2.0])}).loss < 1e-20
    assert trainer.parameters["w"][0] == pytest.approx(1)
