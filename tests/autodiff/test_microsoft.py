"""ONNX Runtime's own operators: their bodies give what its kernels give, and gradients that fit the kernels."""

import numpy as np
import onnxruntime
import pytest
from case import normal
from onnx import TensorProto, helper

import onnxtrain
from onnxtrain.autodiff import registry
from onnxtrain.errors import GradientError
from onnxtrain.testing import projected_gradient

X = normal(2, 3, 4)
GAMMA, BETA = normal(4, seed=1, shift=1.0), normal(4, seed=2)
IDS = np.array([[1, 4, 0], [2, 2, 3]], dtype=np.int32)
SEGMENTS = np.array([[0, 0, 1], [1, 0, 1]], dtype=np.int32)
MASK = np.array([[1, 1, 0], [1, 0, 1]], dtype=np.int32)
TABLES = normal(5, 4, seed=3), normal(6, 4, seed=4), normal(2, 4, seed=5)
WEIGHTS, BIAS = normal(4, 12, seed=3, scale=0.5), normal(12, seed=4, scale=0.5)
QUERY, KEY, VALUE = normal(2, 3, 4), normal(2, 5, 4, seed=1), normal(2, 5, 4, seed=2)
HEADS = {"num_heads": 2}
WIDE = normal(2, 2, 5, 2, seed=1), normal(2, 2, 5, 2, seed=2)
LENGTHS = np.array([3, 5], dtype=np.int32)
KEYS = np.array([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]], dtype=np.int32)


def row(operator, *inputs, outputs=("y",), domain="com.microsoft", label="plain", **attributes):
    return pytest.param(operator, inputs, outputs, domain, attributes, id=f"{operator}-{label}-{domain or 'ai.onnx'}")


ROWS = [
    row("FusedMatMul", normal(2, 3, 4), normal(4, 5, seed=1), alpha=0.5),
    row("FusedMatMul", normal(4, 3), normal(5, 4, seed=1), transA=1, transB=1, label="transposed"),
    row("Gelu", X),
    row("BiasGelu", X, BETA),
    row("FastGelu", X, BETA),
    row("FastGelu", X, label="no-bias"),
    row("QuickGelu", X),
    row("QuickGelu", X, alpha=0.7, label="alpha"),
    row("SkipLayerNormalization", X, normal(2, 3, 4, seed=7), GAMMA, BETA, BETA, epsilon=1e-3),
    row("SkipLayerNormalization", X, X[::-1], GAMMA, outputs=("y", "", "", "sum"), label="sum"),
    row("SimplifiedLayerNormalization", X, GAMMA, domain=""),
    row("SkipSimplifiedLayerNormalization", X, X[::-1], GAMMA, epsilon=1e-3),
    row("SkipSimplifiedLayerNormalization", X, X[::-1], GAMMA, BETA, outputs=("y", "", "", "sum"), label="sum"),
    row("EmbedLayerNormalization", IDS, SEGMENTS, *TABLES, GAMMA, BETA, MASK, outputs=("y", "mask")),
    row("EmbedLayerNormalization", IDS, None, *TABLES[:2], None, GAMMA, BETA, outputs=("y", "mask"), label="bare"),
    row(
        *("EmbedLayerNormalization", IDS, SEGMENTS, *TABLES, GAMMA, BETA, None, IDS),
        outputs=("y", "mask", "sum"),
        label="positions",
    ),
    row("Attention", X, WEIGHTS, BIAS, **HEADS),
    row("Attention", X, WEIGHTS, BIAS, MASK, **HEADS, label="mask"),
    row("Attention", X, WEIGHTS, BIAS, np.array([2, 3], np.int32), **HEADS, label="lengths"),
    row("Attention", X, WEIGHTS, BIAS, None, None, normal(2, 2, 3, 3, seed=9), **HEADS, label="bias"),
    row("Attention", X, WEIGHTS, BIAS, unidirectional=1, scale=0.3, **HEADS, label="causal"),
    row("Attention", X, normal(4, 10, seed=3), normal(10), qkv_hidden_sizes=[4, 4, 2], **HEADS, label="sizes"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, **HEADS),
    row("MultiHeadAttention", QUERY, KEY, VALUE, BIAS, **HEADS, label="bias"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, None, KEYS, **HEADS, label="mask"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, None, LENGTHS, **HEADS, label="lengths"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, None, None, normal(1, 2, 3, 5), **HEADS, label="attention-bias"),
    row("MultiHeadAttention", QUERY, *WIDE, **HEADS, label="split-heads"),
    row("MultiHeadAttention", QUERY, KEY[:, :3], VALUE[:, :3], unidirectional=1, **HEADS, label="causal"),
]


def model(operator, inputs, outputs, domain, attributes, opset=18):
    feeds = {f"x{i}": np.asarray(a) for i, a in enumerate(inputs) if a is not None}
    names = ["" if array is None else f"x{i}" for i, array in enumerate(inputs)]
    node = helper.make_node(operator, names, list(outputs), domain=domain, **attributes)
    infos = [
        helper.make_tensor_value_info(n, TensorProto.INT32 if a.dtype.kind == "i" else TensorProto.FLOAT, a.shape)
        for n, a in feeds.items()
    ]
    given = [
        helper.make_tensor_value_info(name, TensorProto.INT32 if name == "mask" else TensorProto.FLOAT, None)
        for name in outputs
        if name
    ]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "fused", infos, given)
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def run(built, feeds):
    single = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, single), strict=True))


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize(("operator", "inputs", "outputs", "domain", "attributes"), ROWS)
def test_body_equals_kernel(operator, inputs, outputs, domain, attributes, opset):
    given, feeds = model(operator, inputs, outputs, domain, attributes, opset)
    rng = np.random.default_rng(3)
    kernel = run(given, feeds)
    projections = {n: rng.normal(size=y.shape).astype(np.float32) for n, y in kernel.items() if y.dtype.kind == "f"}
    wrt = [name for name, array in feeds.items() if array.dtype.kind == "f"]
    built = projected_gradient(given, wrt, projections)
    assert all(node.op_type != operator or operator == "Gelu" for node in built.graph.node)
    assert all(not node.domain for node in built.graph.node)
    found = run(built, feeds)
    for name, y in kernel.items():
        np.testing.assert_allclose(found[name], y, atol=2e-5)

    def objective(moved):
        outcome = run(given, {**feeds, **moved})
        return sum(float(np.sum(outcome[n].astype(np.float64) * p)) for n, p in projections.items())

    for name in wrt:
        direction = rng.normal(size=feeds[name].shape)
        h = 1e-2
        measured = (objective({name: feeds[name] + h * direction}) - objective({name: feeds[name] - h * direction})) / 2
        gradient = found[f"{name}_grad"]
        assert gradient.shape == feeds[name].shape
        scale = max(1.0, float(np.linalg.norm(gradient)))
        assert abs(np.sum(gradient * direction) - measured / h) < 2e-2 * scale, name


def test_every_body_has_a_row():
    covered = {(values[3], values[0]) for values in (parameters.values for parameters in ROWS)}
    assert not {
        (domain, operator)
        for domain, operator in registry.registered_bodies()
        if (domain, operator) not in covered and domain in ("", "com.microsoft")
    } - {("com.microsoft", "SimplifiedLayerNormalization")}  # ONNX Runtime has it in ONNX's domain


def test_past_is_refused():
    past = normal(2, 2, 2, 1, 2)
    given, _ = model("Attention", (X, WEIGHTS, BIAS, None, past), ("y", "present"), "com.microsoft", HEADS)
    with pytest.raises(GradientError, match=r"Attention node .* it has a past, which its body .* does not cover"):
        onnxtrain.gradient(given, "y", ["x1"])


def test_transposed_batch_axes_are_refused():
    given, _ = model("FusedMatMul", (X, X), ("y",), "com.microsoft", {"transBatchA": 1})
    with pytest.raises(GradientError, match="transBatchA=1 is not covered"):
        onnxtrain.gradient(given, "y", ["x0"])
