"""RMS norms as exporters write them become one node of ONNX Runtime's, unless a value inside is needed."""

import numpy as np
import pytest
from onnx import parser
from ways import assert_same_results, operators, operators_of_step, passed, trained_both_ways

from onnxtrain.lowering.rules.activations import fuse_norms

WAYS = {
    "as PyTorch writes it": "q = Pow(x, two) m = ReduceMean(q, last) a = Add(m, eps) s = Sqrt(a) r = Reciprocal(s) "
    "n = Mul(x, r) y = Mul(g, n)",
    "a product and a quotient": "q = Mul(x, x) m = ReduceMean(q, place) a = Add(eps, m) s = Sqrt(a) n = Div(x, s) "
    "y = Mul(n, g)",
    "one over the root": "q = Mul(x, x) m = ReduceMean(q, last) a = Add(m, eps) s = Sqrt(a) r = Div(one, s) "
    "n = Mul(r, x) y = Mul(n, g)",
}
CONSTANTS = (
    "float two = {2}, float one = {1}, float eps = {0.01}, int64[1] last = {-1}, int64[1] place = {2}, "
    "int64[1] middle = {1}, float[4] g = {1, -2, 0.5, 3}, float half = {0.5}"
)
X = np.random.default_rng(0).normal(0, 2, (2, 3, 4))


def model(nodes, kind="float", more=""):
    constants = CONSTANTS.replace("float", kind)
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> f ({kind}[2, n, 4] x) => ({kind}[2, n, 4] y{more}) <{constants}> '
        f"{{ {nodes} }}"
    )


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_pattern_becomes_one_node(nodes, kind):
    given = model(nodes, kind)
    found = passed(given, fuse_norms)
    assert operators(found) == ["SimplifiedLayerNormalization"]
    assert_same_results(given, found, {"x": X.astype(np.float32 if kind == "float" else np.float64)})


FIRST = "q = Mul(x, x) m = ReduceMean(q, last) a = Add(m, eps) s = Sqrt(a) "


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (FIRST.replace("last", "middle") + "n = Div(x, s) y = Mul(n, g)", "over another axis"),
        (FIRST.replace("Mul(x, x)", "Pow(x, half)") + "n = Div(x, s) y = Mul(n, g)", "of roots"),
        (FIRST.replace("Mul(x, x)", "Mul(x, g)") + "n = Div(x, s) y = Mul(n, g)", "of no squares"),
        (FIRST + "n = Div(s, x) y = Mul(n, g)", "turned"),
        (FIRST + "n = Div(x, s) y = Mul(n, half)", "times a number"),
        (FIRST + "n = Div(x, s) y = Add(n, g)", "no scale"),
        (FIRST + "n = Div(x, s) z = Mul(n, g) y = Add(z, n)", "read outside"),
        (FIRST + "n = Div(g, s) y = Mul(n, x)", "another value is divided"),
    ],
)
def test_others_stay(nodes, reason):
    assert operators(passed(model(nodes), fuse_norms)) == operators(model(nodes)), reason


def test_an_output_inside_stays():
    given = model(WAYS["as PyTorch writes it"], more=", float[2, n, 4] n")
    assert operators(passed(given, fuse_norms)) == operators(given)


@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_training_is_as_without_kernels(nodes):
    x = X.astype(np.float32)
    proto = model(nodes.replace("y = ", "z = ") + " y = Add(z, g)")
    (plain_losses, plain), (losses, trainer) = trained_both_ways(proto, "g", x, np.ones_like(x))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert "RMSNormalizationGradient" in operators_of_step(trainer)
    assert "RMSNormalizationGradient" not in operators_of_step(plain)
