"""RMS norms as exporters write them become one node of ONNX Runtime's, where nobody looks inside."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.fuse_norms import fuse_norms
from onnxtrain.runtime.options import RuntimeOptions

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


def fused(proto):
    working = infer_shapes(ir.from_proto(proto))
    fuse_norms(working)
    return ir.to_proto(working)


def operators(proto):
    return [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_pattern_becomes_one_node(nodes, kind):
    given = model(nodes, kind)
    found = fused(given)
    assert operators(found) == ["SimplifiedLayerNormalization"]
    x = X.astype(np.float32 if kind == "float" else np.float64)
    before, after = (
        onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0] for proto in (given, found)
    )
    np.testing.assert_allclose(after, before, atol=1e-6)


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
    assert operators(fused(model(nodes))) == operators(model(nodes)), reason


def test_an_output_inside_stays():
    given = model(WAYS["as PyTorch writes it"], more=", float[2, n, 4] n")
    assert operators(fused(given)) == operators(given)


@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_training_is_as_without_kernels(nodes):
    losses = []
    for kernels in (True, False):
        trainer = onnxtrain.Trainer(
            model(nodes.replace("y = ", "z = ") + " y = Add(z, g)"),
            loss="mean_squared_error",
            optimizer=onnxtrain.SGD(0.1),
            train="g",
            options=RuntimeOptions(kernels=kernels),
        )
        x = X.astype(np.float32)
        losses.append([trainer.train_step(x, np.ones_like(x)) for _ in range(4)])
        operators_left = {node.op_type for node in trainer.session._steps[0].step.model.graph}
        assert ("RMSNormalizationGradient" in operators_left) == kernels
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
