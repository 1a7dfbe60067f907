"""Diversity measures: formulas, domains, and the conditions for custom measures."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxtrain import SSGD, Trainer, operators
from onnxtrain.errors import OperatorError
from onnxtrain.graph import Builder
from onnxtrain.operators import measures
from onnxtrain.operators.arithmetic import wide
from onnxtrain.operators.measures import BUILT_IN, measure, register_measure, unregister_measure
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.training.examples import mlp, points
from sentences import raises_sentence

pytestmark = pytest.mark.sampled(1)  # each case is cheap

# The square must be a normal number: a measure of a weight is one of its square.
WEIGHTS = st.floats(-2, 2).filter(lambda u: u == 0 or abs(u) > 1e-150)
EVERY = [(name, reweighting) for name in BUILT_IN for reweighting in ("l1", "l2")]

# w² (l2) and w (l1), as the table of the framework has them.
TABLE = {
    ("log-sum", "l2"): lambda a, e, p: a**2 + e,
    ("log-sum", "l1"): lambda a, e, p: a + e,
    ("p-norm", "l2"): lambda a, e, p: 2 / p * a ** (2 - p),
    ("p-norm", "l1"): lambda a, e, p: 1 / p * a ** (1 - p),
    ("arctan", "l2"): lambda a, e, p: (a**4 + e**2) / e,
    ("arctan", "l1"): lambda a, e, p: (a**2 + e**2) / e,
    ("geman-mcclure", "l2"): lambda a, e, p: (a**2 + e) ** 2 / e,
    ("geman-mcclure", "l1"): lambda a, e, p: (a + e) ** 2 / e,
    ("exponential", "l2"): lambda a, e, p: e * np.exp(a**2 / e),
    ("exponential", "l1"): lambda a, e, p: e * np.exp(a / e),
    ("tanh", "l2"): lambda a, e, p: e * np.cosh(a**2 / e) ** 2,
    ("tanh", "l1"): lambda a, e, p: e * np.cosh(a / e) ** 2,
}


@pytest.fixture
def registered():
    """Registers measures under their name for one test."""
    names = []

    def register(name, function, **options):
        register_measure(name, function, **options)
        names.append(name)

    yield register
    for name in names:
        unregister_measure(name)


@pytest.mark.parametrize(("name", "reweighting"), EVERY)
@settings(max_examples=30, deadline=None)
@given(u=WEIGHTS, epsilon=st.floats(0.2, 3), p=st.floats(0.1, 0.95))
def test_squared_weights_are_those_of_the_table(name, reweighting, u, epsilon, p):
    want = TABLE[name, reweighting](abs(u), epsilon, p)
    want = want if reweighting == "l2" else want**2
    got = measure(name, reweighting=reweighting, epsilon=epsilon, p=p).squared_weight(u)
    assert math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-300)


@pytest.mark.parametrize(("name", "reweighting"), EVERY)
def test_the_derivative_is_that_of_the_value(name, reweighting):
    found = measure(name, reweighting=reweighting, epsilon=0.6, p=0.7)
    z = np.linspace(0.05, 3, 50)
    step = 1e-6
    differences = (found.value(z + step) - found.value(z - step)) / (2 * step)
    np.testing.assert_allclose(found.derivative(z), differences, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("name", "reweighting"), EVERY)
def test_the_inverse_derivative_is_one(name, reweighting):
    found = measure(name, reweighting=reweighting, epsilon=0.6, p=0.7)
    z = np.linspace(0.05, 3, 50)
    h, factor = found.inverse_derivative(z)
    np.testing.assert_allclose(h * factor, 1 / found.derivative(z), rtol=1e-12)


@pytest.mark.parametrize(("name", "reweighting"), EVERY)
def test_built_in_measures_meet_the_conditions(name, reweighting):
    found = measure(name, reweighting=reweighting, epsilon=0.6, p=0.7)
    measures.check_conditions(name, found.derivative, found.value, largest=5.0)
    u = np.linspace(-2, 2, 41)
    np.testing.assert_array_equal(found.of(u), found.of(-u))
    assert np.isfinite(found.of(u)).all()
    assert np.all(np.diff(found.of(np.linspace(0, 2, 41))) > 0)


@pytest.mark.parametrize("measure_class", BUILT_IN.values())
def test_documentation(measure_class):
    assert "Source:" in measure_class.__doc__
    assert measure_class.domain
    assert "f(z) = " in measure_class.__doc__.splitlines()[0]


@pytest.mark.parametrize("name", [n for n in BUILT_IN if n != "p-norm"])
@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_epsilon_outside_its_domain(name, epsilon):
    with raises_sentence("measure_epsilon", what=name):
        measure(name, epsilon=epsilon)


@pytest.mark.parametrize(
    ("reweighting", "p", "message"),
    [
        ("l2", 0.0, "'l2' needs one above 0 and at most 2"),
        ("l2", 2.1, "at most 2"),
        ("l1", 1.1, "'l1' needs one above 0 and at most 1"),
        ("l1", -0.5, "has p -0.5"),
        ("l1", math.nan, "has p nan"),
    ],
)
def test_p_outside_its_domain(reweighting, p, message):
    with pytest.raises(OperatorError, match=message):
        measure("p-norm", reweighting=reweighting, p=p)


def test_unknown_reweighting():
    with raises_sentence("reweighting", what="reweighting", got="l3"):
        measure("log-sum", reweighting="l3")


def test_unknown_name():
    with raises_sentence("unknown_measure", what="l0", known="'log-sum'"):
        measure("l0")


@pytest.mark.parametrize("name", ["mcp", "scad", "capped-l1"])
def test_invalid_penalties_are_refused_by_name(name):
    with raises_sentence(
        "no_measure",
        name=repr(name),
        refused="it is not strictly concave: f' is 0 past its knee, where w would be infinite",
    ):
        measure(name)
    with pytest.raises(OperatorError, match=f"There is a measure '{name}' already"):
        register_measure(name, lambda z: 1 / (1 + z))


def mcp(z):
    """The minimax concave penalty with lambda 1 and gamma 3."""
    return np.maximum(1 - z / 3, 0.0)


def scad(z):
    """Smoothly clipped absolute deviation with lambda 1 and a 3.7."""
    return np.where(z <= 1, 1.0, np.maximum(3.7 - z, 0.0) / 2.7)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (mcp, r"it is not increasing: f'\(3\) is 0, so that w would be infinite"),
        (scad, r"it is not increasing: f'\(3.7\) is 0"),
        (lambda z: np.where(z < 1, 1.0, 0.0), r"it is not increasing: f'\(1\) is 0"),  # capped l1
        (lambda z: 1 / z, "it is not finite: f.z. has no limit as z goes to 0"),  # log-sum with epsilon 0
        (lambda z: 1 / z**2, "it is not finite: f.z. has no limit"),
        (lambda z: 1.0, "it is not strictly concave: f' does not fall between 0.05 and 0.1"),
        (lambda z: 1 + z, "it is not strictly concave"),
        (lambda z: -1 / (1 + z), "it is not increasing"),
        (lambda z: np.log(z - 5), "it is not finite: f'.0.05. is nan"),
        (lambda z: 1 / (z - 5), "it is not finite: f'.5. is inf"),
    ],
)
def test_functions_that_fail_a_condition(function, message):
    with pytest.raises(OperatorError, match=f"'mine' cannot be a measure: {message}"):
        register_measure("mine", function)
    with pytest.raises(OperatorError, match="no measure 'mine'"):
        measure("mine")


def test_an_object_whose_value_is_not_finite():
    class LogSumAtZero:
        def value(self, z):
            return np.log(z)

        def derivative(self, z):
            return 1 / (z + 1e-300)

    with raises_sentence("measure_not_finite", what="'mine' cannot be a measure"):
        register_measure("mine", LogSumAtZero())


def test_underflow_is_distinguished_from_a_knee_by_the_range(registered):
    steep = lambda z: np.exp(-z / 0.01) / 0.01  # noqa: E731 (a measure is a function of z)
    with pytest.raises(OperatorError, match="check a smaller range with largest="):
        register_measure("steep", steep)
    registered("steep", steep, largest=5.0)


def test_a_measure_of_ones_own_is_used_by_the_operator_and_its_body(registered):
    """A square root of log-sum's kind, by f' alone: arrays and graph come from the same function."""

    def derivative(z):
        return 1 / (np.sqrt(z) + 0.25)

    registered("root", derivative)
    x, g = np.linspace(-1, 1, 6), np.ones(6)
    w2 = np.sqrt(x * x) + 0.25
    want = x - 0.1 * w2 / w2.mean() * g
    np.testing.assert_allclose(operators.ssgd(0.1, 0, x, g, measure="root")[0], want, rtol=1e-12)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18})
    op = Builder(graph, 18)
    R, T, X = op.constant(0.1, np.float64), op.constant(0, np.int64), op.constant(x)
    operators.emit(op, operators.OPTIMIZERS["SSGD"].schema, R, T, [(X, X)], {"measure": "root"})
    assert "Sqrt" in [node.op_type for node in graph]
    with pytest.raises(OperatorError, match="'root' was registered by f' alone"):
        measure("root").of(x)


def test_a_registered_object_has_its_value(registered):
    class Cauchy:
        """f(z) = log(1 + z)."""

        def value(self, z):
            return np.log(1 + z)

        def derivative(self, z):
            return 1 / (1 + z)

    registered("cauchy", Cauchy())
    assert math.isclose(measure("cauchy").of(3.0), math.log(10))
    with raises_sentence("measure_twice", what="cauchy"):
        register_measure("cauchy", Cauchy())


def test_functions_without_an_onnx_operator_are_named():
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18})
    z = wide(Builder(graph, 18).constant(1.0, np.float64))
    with raises_sentence("no_operator_of_numpy", function="log1p", known="numpy.add"):
        np.log1p(z)


@pytest.mark.parametrize("block", [(1, 1), (4, 1)])
def test_a_registered_measure_trains_where_native_kernels_lack_it(registered, block):
    registered("own", lambda z: 1 / (0.01 + z))  # that of log-sum

    def trained(measure, **options):
        optimizer = SSGD(0.05, alpha=0.9, measure=measure, block=block)
        trainer = Trainer(mlp((4, 16, 3)), loss="softmax_cross_entropy", optimizer=optimizer, **options)
        trainer.fit(points(), epochs=1, batch_size=50)
        return dict(trainer.parameters)

    want = trained("log-sum")
    for options in ({}, {"clip_norm": 1e6}, {"runtime": RuntimeOptions(kernels=False)}):
        for name, values in trained("own", **options).items():
            np.testing.assert_allclose(values, want[name], rtol=2e-4, atol=2e-5)
