"""ONNX Runtime's own operators: their bodies give what its kernels give, and gradients that fit the kernels."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import test_quantized
from onnx import TensorProto, helper, numpy_helper, parser

import onnxtrain
from autodiff.case import normal
from onnxtrain.autodiff import registry
from onnxtrain.autodiff.learn_types import learn_types
from onnxtrain.autodiff.missing import GPU_ONLY
from onnxtrain.errors import GradientError
from onnxtrain.runtime.native import custom_ops_library, kernels_available
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
PADDED_LEFT = np.array([[0, 0, 1], [1, 0, 1]], dtype=np.int32)
ENDS = np.array([3, 2, 1, 0], dtype=np.int32)
SUMS = np.array([2, 3, 0, 2, 5, 0, 3, 6], dtype=np.int32)
PAST = normal(2, 2, 2, 4, 2, seed=9)
PAST_KEYS = normal(2, 2, 4, 2, seed=5), normal(2, 2, 4, 2, seed=6)
PRESENT = {"outputs": ("y", "present")}
PRESENT_KEYS = {"outputs": ("y", "keys", "values")}
IMAGE, KERNEL = normal(2, 2, 5, 5), normal(3, 2, 3, 3, seed=1, scale=0.3)
ROTATIONS = np.cos(normal(10, 2)), np.sin(normal(10, 2))
POSITIONS = np.array([[0, 3, 1], [4, 5, 2]])
INTEGERS = np.random.default_rng(5).integers(0, 256, (5, 3, 8), np.uint8)
ZEROS = np.random.default_rng(6).integers(0, 256, (5, 2), np.uint8)
NUMBERS, SCALES = normal(2, 3, 40), 0.1 * np.abs(normal(5, 3, seed=7)) + 0.05
TABLE = np.random.default_rng(7).integers(0, 256, (5, 16), np.uint8)
FOUR_BITS = {"K": 40, "N": 5, "bits": 4, "block_size": 16}
RULES = {"MatMulNBits"}
"""These have rules, and stay as they are."""


def row(operator, *inputs, outputs=("y",), domain="com.microsoft", label="plain", **attributes):
    return pytest.param(operator, inputs, outputs, domain, attributes, id=f"{operator}-{label}-{domain or 'ai.onnx'}")


ROWS = [
    row("FusedMatMul", normal(2, 3, 4), normal(4, 5, seed=1), alpha=0.5),
    row("FusedMatMul", normal(4, 3), normal(5, 4, seed=1), transA=1, transB=1, label="transposed"),
    row("FusedMatMul", normal(2, 3, 4), normal(3, 4, 5, seed=1), transBatchA=1, label="rows-first"),
    row("FusedMatMul", normal(3, 2, 4), normal(2, 3, 5, seed=1), transBatchB=1, transA=1, label="rows-first-of-B"),
    row(
        *("FusedMatMul", normal(2, 5, 3, 4), normal(6, 5, 3, 2, seed=1)),
        **{"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1, "alpha": 0.5},
        label="all-transposed",
    ),
    row("FusedGemm", normal(3, 4), normal(4, 5, seed=1), normal(5), activation="Relu", alpha=0.5, beta=2.0),
    row("FusedGemm", normal(4, 3), normal(5, 4), transA=1, transB=1, activation="Tanh", label="transposed"),
    row("FusedGemm", normal(3, 4), normal(4, 5), activation="LeakyRelu", activation_alpha=0.2, label="slope"),
    row(
        *("FusedGemm", normal(3, 4), normal(4, 5)),
        **{"activation": "HardSigmoid", "activation_alpha": 0.1, "activation_beta": 0.4},
        label="two-numbers",
    ),
    row(
        *("FusedGemm", 0.4 * abs(normal(3, 4)), 0.4 * abs(normal(4, 5))),
        **{"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.0},
        label="no-shift",
    ),
    row("FusedGemm", normal(3, 4), normal(4, 5), activation="LeakyRelu", activation_alpha=0.0, label="no-slope"),
    row("FusedConv", IMAGE, KERNEL, normal(3), activation="Sigmoid"),
    row("FusedConv", IMAGE, KERNEL, normal(3), normal(2, 3, 3, 3), activation="Tanh", label="sum"),
    row(
        *("FusedConv", 0.1 * IMAGE, KERNEL, np.array([-3.0, 0.0, 3.0])),
        **{"activation": "Clip", "activation_params": [-1.5, 1.5]},
        label="clip",
    ),
    row("FusedConv", IMAGE, KERNEL, pads=[1, 0, 1, 1], strides=[2, 1], dilations=[1, 2], label="padded"),
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
    row("Attention", X, WEIGHTS, BIAS, PADDED_LEFT, unidirectional=1, **HEADS, label="causal-mask"),
    row("Attention", X, WEIGHTS, BIAS, ENDS, **HEADS, label="begins-and-ends"),
    row("Attention", X, WEIGHTS, BIAS, ENDS, unidirectional=1, **HEADS, label="causal-begins-and-ends"),
    row("Attention", X, WEIGHTS, BIAS, SUMS, **HEADS, label="sums-of-lengths"),
    row("Attention", X, WEIGHTS, BIAS, MASK[:, None] * np.ones((2, 3, 1), np.int32), **HEADS, label="mask-per-query"),
    row("Attention", X, WEIGHTS, BIAS, **PRESENT, **HEADS, label="present"),
    row("Attention", X, WEIGHTS, BIAS, None, PAST, **PRESENT, **HEADS, label="past"),
    row("Attention", X, WEIGHTS, BIAS, None, PAST, unidirectional=1, **PRESENT, **HEADS, label="causal-past"),
    row("Attention", X, WEIGHTS, BIAS, np.ones((2, 7), np.int32), PAST, **PRESENT, **HEADS, label="past-mask"),
    row("Attention", X, WEIGHTS, BIAS, np.array([6, 7, 1, 0], np.int32), PAST, **PRESENT, **HEADS, label="past-ends"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, **HEADS),
    row("MultiHeadAttention", QUERY, KEY, VALUE, BIAS, **HEADS, label="bias"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, None, KEYS, **HEADS, label="mask"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, None, LENGTHS, **HEADS, label="lengths"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, None, None, normal(1, 2, 3, 5), **HEADS, label="attention-bias"),
    row("MultiHeadAttention", QUERY, *WIDE, **HEADS, label="split-heads"),
    row("MultiHeadAttention", QUERY, KEY[:, :3], VALUE[:, :3], unidirectional=1, **HEADS, label="causal"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, unidirectional=1, **HEADS, label="causal-more-keys"),
    row("MultiHeadAttention", QUERY, *WIDE, BIAS, **HEADS, label="split-heads-bias"),
    row("MultiHeadAttention", QUERY, KEY, VALUE, None, KEYS, outputs=("y", "", "", "qk"), **HEADS, label="scores"),
    row("MultiHeadAttention", *[QUERY] * 3, None, None, None, *PAST_KEYS, **PRESENT_KEYS, **HEADS, label="past"),
    row("MultiHeadAttention", *[QUERY] * 3, BIAS, None, None, *PAST_KEYS, **PRESENT_KEYS, **HEADS, label="past-bias"),
    row(
        *("MultiHeadAttention", QUERY, QUERY, QUERY, None, np.ones((2, 7), np.int32), None, *PAST_KEYS),
        **PRESENT_KEYS,
        **HEADS,
        unidirectional=1,
        label="causal-past",
    ),
    row("MatMulNBits", NUMBERS, INTEGERS, SCALES, **FOUR_BITS),
    row("MatMulNBits", NUMBERS, INTEGERS, SCALES.ravel(), ZEROS.ravel(), **FOUR_BITS, label="packed-zeros"),
    row(
        *("MatMulNBits", NUMBERS, INTEGERS, SCALES, normal(5, 3, shift=6.0), None, normal(5)),
        **FOUR_BITS,
        label="zeros-and-bias",
    ),
    row("GatherBlockQuantized", TABLE, IDS, normal(5, 2, seed=4), block_size=16, quantize_axis=1),
    row(
        *("GatherBlockQuantized", TABLE, IDS, normal(5, 2, seed=4), ZEROS[:, :1]),
        **{"block_size": 16, "quantize_axis": 1, "bits": 4, "gather_axis": 0},
        label="zeros",
    ),
    row("RotaryEmbedding", X, POSITIONS, *ROTATIONS),
    row("RotaryEmbedding", normal(2, 3, 8), POSITIONS, *ROTATIONS, interleaved=1, label="interleaved"),
    row("RotaryEmbedding", X, np.array([2]), *ROTATIONS, label="offset"),
    row("RotaryEmbedding", normal(2, 2, 3, 4), POSITIONS, *ROTATIONS, label="heads"),
    row(
        *("RotaryEmbedding", normal(2, 3, 12), POSITIONS, *ROTATIONS),
        **{"num_heads": 2, "rotary_embedding_dim": 4},
        label="part",
    ),
]


LAST, TOTAL = np.array([4, 4], np.int32), np.array(5, np.int32)
SPLIT = normal(2, 5, 64), normal(2, 5, 32, seed=1), normal(2, 5, 32, seed=2)
PACKED = normal(2, 5, 128)
FOUR_HEADS = {"num_heads": 4, "kv_num_heads": 2}
NO_PAST = None, None
OLD = normal(2, 2, 3, 16, seed=3), normal(2, 2, 3, 16, seed=4)
LONGER = np.array([7], np.int32), np.array(8, np.int32)
TURNED = {"do_rotary": 1}
TURNS = np.cos(normal(10, 8)), np.sin(normal(10, 8))

ROWS += [
    row("GroupQueryAttention", *SPLIT, *NO_PAST, LAST, TOTAL, **FOUR_HEADS, **PRESENT_KEYS),
    row("GroupQueryAttention", PACKED, None, None, *NO_PAST, LAST, TOTAL, **FOUR_HEADS, **PRESENT_KEYS, label="packed"),
    row(
        *("GroupQueryAttention", PACKED, None, None, *NO_PAST, LAST, TOTAL, *TURNS),
        **(FOUR_HEADS | TURNED | PRESENT_KEYS),
        label="rotated",
    ),
    row(
        *("GroupQueryAttention", *SPLIT, *NO_PAST, np.array([2, 4], np.int32), TOTAL, *TURNS),
        **(FOUR_HEADS | TURNED | PRESENT_KEYS),
        rotary_interleaved=1,
        label="padded",
    ),
    row(
        *(
            "GroupQueryAttention",
            normal(2, 5, 192),
            None,
            None,
            *NO_PAST,
            LAST,
            TOTAL,
            *TURNS,
        ),
        **({"num_heads": 2, "kv_num_heads": 2} | TURNED | PRESENT_KEYS),
        label="partly-rotated",
    ),
    row(
        *("GroupQueryAttention", *(part[:1] for part in (*SPLIT, *OLD)), *LONGER, *TURNS),
        **(FOUR_HEADS | TURNED | PRESENT_KEYS),
        scale=0.3,
        label="past",
    ),
    row(
        *("GroupQueryAttention", *(part[:1] for part in (*SPLIT, *OLD)), *LONGER),
        **(FOUR_HEADS | PRESENT_KEYS),
        local_window_size=2,
        label="window-past",
    ),
    row(
        "GroupQueryAttention",
        *SPLIT,
        *NO_PAST,
        LAST,
        TOTAL,
        **FOUR_HEADS,
        local_window_size=2,
        label="window",
        **PRESENT_KEYS,
    ),
    row(
        "GroupQueryAttention", *SPLIT, *NO_PAST, LAST, TOTAL, **FOUR_HEADS, softcap=1.5, label="capped", **PRESENT_KEYS
    ),
    row(
        "GroupQueryAttention",
        *SPLIT,
        *NO_PAST,
        LAST,
        TOTAL,
        **FOUR_HEADS,
        smooth_softmax=1,
        label="smooth",
        **PRESENT_KEYS,
    ),
    row(
        *("GroupQueryAttention", PACKED, None, None, *NO_PAST, LAST, TOTAL, *TURNS),
        *(np.tile(np.arange(5) + 4, (2, 1)), normal(2, 1, 5, 5, seed=4), normal(4, seed=5)),
        **(FOUR_HEADS | TURNED | PRESENT_KEYS),
        label="positions-bias-sink",
    ),
    row(
        *("GroupQueryAttention", *SPLIT, *NO_PAST, LAST, TOTAL, None, None, None, normal(1, 4, 5, 5, seed=4)),
        **(FOUR_HEADS | PRESENT_KEYS),
        label="bias-per-head",
    ),
]


def model(operator, inputs, outputs, domain, attributes, opset=18):
    feeds = {f"x{i}": np.asarray(a) for i, a in enumerate(inputs) if a is not None}
    names = ["" if array is None else f"x{i}" for i, array in enumerate(inputs)]
    node = helper.make_node(operator, names, list(outputs), domain=domain, **attributes)
    infos = [
        helper.make_tensor_value_info(
            n, 1 if a.dtype.kind == "f" else helper.np_dtype_to_tensor_dtype(a.dtype), a.shape
        )
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


@pytest.mark.sampled("opset")
@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize(("operator", "inputs", "outputs", "domain", "attributes"), ROWS)
def test_body_equals_kernel(operator, inputs, outputs, domain, attributes, opset):
    given, feeds = model(operator, inputs, outputs, domain, attributes, opset)
    rng = np.random.default_rng(3)
    kernel = run(given, feeds)
    projections = {n: rng.normal(size=y.shape).astype(np.float32) for n, y in kernel.items() if y.dtype.kind == "f"}
    wrt = [name for name, array in feeds.items() if array.dtype.kind == "f"]
    built = projected_gradient(given, wrt, projections)
    if operator not in RULES:
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


def test_pasts_of_different_lengths():
    """Of a past that has room for more, a sequence has as many rows as it says."""
    inputs = *(part[:, :1] for part in SPLIT), *OLD, np.array([2, 3], np.int32), np.array(4, np.int32)
    given, feeds = model("GroupQueryAttention", inputs, PRESENT_KEYS["outputs"], "com.microsoft", FOUR_HEADS)
    built = projected_gradient(given, ["x0", "x3"], {"y": np.ones((2, 1, 64), np.float32)})
    found = run(built, feeds)
    np.testing.assert_allclose(found["y"], run(given, feeds)["y"], atol=2e-5)
    assert not found["x3_grad"][0, :, 2].any()
    assert found["x3_grad"][1, :, 2].all()


@pytest.mark.parametrize(
    ("operator", "bias"), [("Gelu", []), ("BiasGelu", [BETA]), ("FastGelu", []), ("FastGelu", [BETA])]
)
def test_gelu_stays_a_node_where_kernels_are(operator, bias):
    given, feeds = model(operator, [X, *bias], ("y",), "com.microsoft", {})
    projections = {"y": normal(*X.shape, seed=8).astype(np.float32)}
    kept = projected_gradient(given, list(feeds), projections, kernels=True)
    operators = {(node.domain, node.op_type) for node in kept.graph.node}
    assert {("com.microsoft", operator), ("onnxtrain", "GeluGradient")} <= operators
    if not kernels_available():
        pytest.skip("the native kernels are not installed")
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(kept.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: array.astype(np.float32) for name, array in feeds.items()})
    wanted = run(projected_gradient(given, list(feeds), projections), feeds)
    for output, array in zip(session.get_outputs(), found, strict=True):
        np.testing.assert_allclose(array, wanted[output.name], atol=2e-5)


def test_every_body_has_a_row():
    covered = {(values[3], values[0]) for values in (parameters.values for parameters in ROWS)} | test_quantized.COVERED
    assert not {
        (domain, operator)
        for domain, operator in registry.registered_bodies()
        if (domain, operator) not in covered and domain in ("", "com.microsoft")
    } - {("com.microsoft", "SimplifiedLayerNormalization")}  # ONNX Runtime has it in ONNX's domain


CHAIN = """
    <ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
    chain (float[batch, seq, 4] x) => (float y)
    <float[4] w = {1, 2, 3, 4}, float[4] b = {0.1, -0.2, 0.3, 0}>
    {
        a = SimplifiedLayerNormalization(x, w)
        c = com.microsoft.Attention<num_heads = 2>(a, qkv, shift)
        d = com.microsoft.SkipLayerNormalization(c, a, w, b)
        e = MatMul(d, m)
        f = com.microsoft.BiasGelu(e, b)
        g = com.microsoft.FusedMatMul<alpha = 0.5>(f, m)
        y = ReduceSum<keepdims = 0>(g)
    }
"""


def test_one_after_the_other_have_types_and_shapes():
    """ONNX infers nothing behind operators that it does not know."""
    chain = parser.parse_model(CHAIN)
    arrays = {"qkv": WEIGHTS, "shift": BIAS, "m": normal(4, 4)}
    weights = {name: array.astype(np.float32) for name, array in arrays.items()}
    chain.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    built = onnxtrain.gradient(chain)
    assert all(not node.domain for node in built.graph.node)
    found = run(built, {"x": X})
    direction = normal(4, 12, seed=5).astype(np.float32)

    def moved(step):
        changed = onnx.ModelProto()
        changed.CopyFrom(chain)
        tensor = next(tensor for tensor in changed.graph.initializer if tensor.name == "qkv")
        tensor.CopyFrom(numpy_helper.from_array(weights["qkv"] + np.float32(step) * direction, "qkv"))
        return float(run(changed, {"x": X})["y"])

    measured = (moved(1e-2) - moved(-1e-2)) / 2e-2
    np.testing.assert_allclose(np.sum(found["qkv_grad"] * direction), measured, rtol=2e-2)


def test_frozen_layers_stay_fused():
    chain = parser.parse_model(CHAIN)
    arrays = {"qkv": WEIGHTS, "shift": BIAS, "m": normal(4, 4)}
    for name, array in arrays.items():
        chain.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    everything = run(onnxtrain.gradient(chain), {"x": X})
    built = onnxtrain.gradient(chain, xs=["b"])
    left = [node.op_type for node in built.graph.node if node.domain or node.op_type.startswith("Simplified")]
    assert left == ["SimplifiedLayerNormalization", "Attention"]
    np.testing.assert_allclose(run(built, {"x": X})["b_grad"], everything["b_grad"], rtol=1e-4)


def test_inspection_tells_bodies_and_lists_no_constants_of_theirs():
    chain = parser.parse_model(CHAIN)
    for name, array in {"qkv": WEIGHTS, "shift": BIAS, "m": normal(4, 4)}.items():
        chain.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    found = onnxtrain.inspect(chain)
    assert {row.name for row in found.initializers} == {"w", "b", "qkv", "shift", "m"}
    assert all(row.trainable for row in found.initializers)
    assert {row.gradient for row in found.operators} == {"rule", "body"}
    assert not found.missing


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "message"),
    [
        ("Attention", (X, WEIGHTS, BIAS), {"do_rotary": 1, **HEADS}, "rotary embedding inside"),
        ("Attention", (X, WEIGHTS, BIAS), {"past_present_share_buffer": 1, **HEADS}, "one buffer for past and present"),
        (
            "MultiHeadAttention",
            (QUERY, QUERY, QUERY, None, None, None, *PAST_KEYS, np.array([1], np.int32)),
            HEADS,
            "one buffer for past and present",
        ),
        ("RotaryEmbedding", (X, POSITIONS, *ROTATIONS), {"is_packed_batching": 1}, "a packed batch"),
    ],
)
def test_what_bodies_do_not_cover_is_refused(operator, inputs, attributes, message):
    given, _ = model(operator, inputs, ("y",), "com.microsoft", attributes)
    with pytest.raises(GradientError, match=rf"{operator} node .* it has {message}, which its body .* does not cover"):
        onnxtrain.gradient(given, "y", ["x0"])


def test_an_unknown_activation_is_refused():
    given, _ = model("FusedGemm", (X[0], normal(4, 5)), ("y",), "com.microsoft", {"activation": "ScaledTanh"})
    with pytest.raises(GradientError, match=r"its activation is 'ScaledTanh', which its body .* does not cover"):
        onnxtrain.gradient(given, "y", ["x0"])


def gradient_of(operator, inputs, attributes):
    """The output and the gradients of the body, for what ONNX Runtime has no kernel for on the CPU."""
    given, feeds = model(operator, inputs, ("y",), "com.microsoft", attributes)
    wrt = [name for name, array in feeds.items() if array.dtype.kind == "f"]
    built = projected_gradient(given, wrt, {"y": normal(2, 3, 4, seed=8).astype(np.float32)})
    return run(built, feeds)


def test_a_packed_query_key_and_value_are_what_they_are_apart():
    parts = [normal(2, 3, 4, seed=seed) for seed in (1, 2, 3)]
    apart = gradient_of("MultiHeadAttention", (*parts, BIAS), HEADS)
    packed = np.stack([part.reshape(2, 3, 2, 2) for part in parts], axis=3)
    found = gradient_of("MultiHeadAttention", (packed, None, None, BIAS), HEADS)
    np.testing.assert_allclose(found["y"], apart["y"], atol=1e-6)
    for index in range(3):
        gradient = found["x0_grad"][:, :, :, index].reshape(2, 3, 4)
        np.testing.assert_allclose(gradient, apart[f"x{index}_grad"], atol=1e-5)
    np.testing.assert_allclose(found["x3_grad"], apart["x3_grad"], atol=1e-5)


def test_a_packed_key_and_value_are_what_they_are_apart():
    apart = gradient_of("MultiHeadAttention", (QUERY, KEY, VALUE), HEADS)
    packed = np.stack([part.reshape(2, 5, 2, 2) for part in (KEY, VALUE)], axis=3)
    found = gradient_of("MultiHeadAttention", (QUERY, packed, None), HEADS)
    np.testing.assert_allclose(found["y"], apart["y"], atol=1e-6)
    np.testing.assert_allclose(found["x0_grad"], apart["x0_grad"], atol=1e-5)
    for index in range(2):
        gradient = found["x1_grad"][:, :, :, index].reshape(2, 5, 4)
        np.testing.assert_allclose(gradient, apart[f"x{index + 1}_grad"], atol=1e-5)


def test_a_mask_of_the_longest_sequence_is_cut():
    rows = np.tril(np.ones((2, 1, 6, 6), np.int32))
    causal = gradient_of("Attention", (X, WEIGHTS, BIAS, None), {"unidirectional": 1, **HEADS})
    masked = gradient_of("Attention", (X, WEIGHTS, BIAS, rows), HEADS)
    for name, array in causal.items():
        np.testing.assert_allclose(masked[name], array, atol=1e-5)


@pytest.mark.parametrize("mask", [LENGTHS - 2, ENDS, SUMS], ids=["lengths", "ends", "sums"])
def test_masks_of_unknown_size_are_told_apart_in_the_graph(mask):
    given, feeds = model("Attention", (X, WEIGHTS, BIAS, mask), ("y",), "com.microsoft", HEADS)
    expected = run(given, feeds)["y"]
    for info in given.graph.input:
        for axis, dimension in enumerate(info.type.tensor_type.shape.dim):
            if info.name in ("x0", "x3"):
                dimension.dim_param = f"{info.name}_{axis}"
    built = projected_gradient(given, ["x0"], {"y": np.ones((2, 3, 4), np.float32)})
    np.testing.assert_allclose(run(built, feeds)["y"], expected, atol=2e-6)


def test_operators_for_gpus_only_are_known_as_such():
    """They have a schema, but no kernel on the processor; where one is there, they leave the list and get a body."""
    import onnxruntime.capi.onnxruntime_pybind11_state as state

    schemas = {schema.name for schema in state.get_all_operator_schema() if schema.domain == "com.microsoft"}
    kernels = {
        kernel.op_name
        for kernel in state.get_all_opkernel_def()
        if kernel.domain == "com.microsoft" and kernel.provider == "CPUExecutionProvider"
    }
    assert schemas >= GPU_ONLY
    assert not GPU_ONLY & kernels
    assert kernels >= {"Attention", "MultiHeadAttention"}


def test_a_model_that_was_optimized_for_gpus_is_refused():
    made = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
        f (float[n, 8] x, int32[b, s] offset, int32[c] sums) => (float[n, 8] y) {
            q = MatMul(x, w)  y = com.microsoft.PackedMultiHeadAttention <num_heads: int = 2> (q, q, q, , offset, sums)
        }"""
    )
    made.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    with pytest.raises(GradientError, match=r"PackedMultiHeadAttention .*for GPUs only.*before it was optimized"):
        onnxtrain.Trainer(made, loss="mean_squared_error")


def test_a_shape_without_a_type_is_no_type():
    """Passes leave such behind operators that ONNX does not know; then FastGelu's body had no type to compute in."""
    made = ir.serde.deserialize_model(
        parser.parse_model(
            """<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> f (float[n, s, 4] x, float[4] w) => (y) {
            a = com.microsoft.SkipLayerNormalization(x, x, w)  c = Relu(a)  y = com.microsoft.FastGelu(c) }"""
        )
    )
    normal_of_sum, middle, last = made.graph
    middle.outputs[0].type = ir.TensorType(ir.DataType.UNDEFINED)
    middle.outputs[0].shape = ir.Shape([None, None, 4])
    while learn_types(made.graph, 18):
        pass
    for node in (normal_of_sum, middle, last):
        assert node.outputs[0].dtype == ir.DataType.FLOAT
