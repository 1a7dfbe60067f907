"""ONNX Runtime's own operators: their bodies agree with its kernels, and so do the gradients."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import test_quantized
from onnx import numpy_helper, parser

import onnxtrain
from autodiff.case import normal
from autodiff.microsoft_rows import (
    BETA,
    BIAS,
    ENDS,
    FOUR_HEADS,
    GAMMA,
    HEADS,
    KEPT,
    KEY,
    LAST,
    LENGTHS,
    NO_PAST,
    OLD,
    PAST_KEYS,
    POSITIONS,
    PRESENT_KEYS,
    QUERY,
    ROTATIONS,
    ROWS,
    SPLIT,
    SUMS,
    TOTAL,
    VALUE,
    WEIGHTS,
    X,
    model,
    run,
)
from onnxtrain.autodiff import registry
from onnxtrain.autodiff.expand import learn_types
from onnxtrain.autodiff.missing import GPU_ONLY
from onnxtrain.errors import GradientError
from onnxtrain.runtime.native import custom_ops_library, kernels_available
from onnxtrain.runtime.testing import projected_gradient
from sentences import raises_sentence


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
    if operator not in KEPT:
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
    """A KV cache may have more rows than a sequence uses."""
    inputs = *(part[:, :1] for part in SPLIT), *OLD, np.array([2, 3], np.int32), np.array(4, np.int32)
    given, feeds = model("GroupQueryAttention", inputs, PRESENT_KEYS["outputs"], "com.microsoft", FOUR_HEADS)
    built = projected_gradient(given, ["x0", "x3"], {"y": np.ones((2, 1, 64), np.float32)})
    found = run(built, feeds)
    np.testing.assert_allclose(found["y"], run(given, feeds)["y"], atol=2e-5)
    assert not found["x3_grad"][0, :, 2].any()
    assert found["x3_grad"][1, :, 2].all()


@pytest.mark.parametrize(
    ("operator", "inputs", "domain", "gradient"),
    [
        ("Gelu", [], "com.microsoft", "GeluGradient"),
        ("BiasGelu", [BETA], "com.microsoft", "GeluGradient"),
        ("FastGelu", [], "com.microsoft", "GeluGradient"),
        ("FastGelu", [BETA], "com.microsoft", "GeluGradient"),
        ("SimplifiedLayerNormalization", [GAMMA], "", "RMSNormalizationGradient"),
        ("RotaryEmbedding", [POSITIONS, *ROTATIONS], "com.microsoft", None),
    ],
)
def test_what_kernels_have_stays_a_node_where_they_are(operator, inputs, domain, gradient):
    given, feeds = model(operator, [X, *inputs], ("y",), domain, {})
    projections = {"y": normal(*X.shape, seed=8).astype(np.float32)}
    wrt = [name for name, array in feeds.items() if array.dtype.kind == "f"]
    kept = projected_gradient(given, wrt, projections, kernels=True)
    operators = [(node.domain, node.op_type) for node in kept.graph.node]
    assert operators.count((domain, operator)) == (1 if gradient else 2), "forward, and back by the opposite angles"
    assert gradient is None or ("onnxtrain", gradient) in operators
    if not kernels_available():
        pytest.skip("the native kernels are not installed")
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(kept.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = session.run(None, {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in feeds.items()})
    wanted = run(projected_gradient(given, wrt, projections), feeds)
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
    assert left == ["Attention"]
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
        (
            "GroupQueryAttention",
            (*SPLIT, *NO_PAST, LAST, TOTAL, *[None] * 7, *[np.ones(16)] * 2),
            FOUR_HEADS,
            "normalized queries and keys .build the model with fuse_qk_norm_gqa=false.",
        ),
        (
            "GroupQueryAttention",
            (*SPLIT, *OLD, LAST, TOTAL, *[None] * 9, np.array([4, 4], np.int32)),
            FOUR_HEADS,
            "lengths of padded queries .query_seqlens.",
        ),
        (
            "GroupQueryAttention",
            (*SPLIT, *OLD, LAST, TOTAL),
            {"local_window_size": 2, "sliding_window_cache": 1, **FOUR_HEADS},
            "a KV cache as long as its window .sliding_window_cache.",
        ),
    ],
)
def test_what_bodies_do_not_cover_is_refused(operator, inputs, attributes, message):
    given, _ = model(operator, inputs, ("y",), "com.microsoft", attributes)
    with pytest.raises(GradientError, match=rf"{operator} node .* it has {message}, which its body .* does not cover"):
        onnxtrain.gradient(given, "y", ["x0"])


def test_an_unknown_activation_is_refused():
    given, _ = model("FusedGemm", (X[0], normal(4, 5)), ("y",), "com.microsoft", {"activation": "ScaledTanh"})
    with raises_sentence("activation_not_covered", got="ScaledTanh"):
        onnxtrain.gradient(given, "y", ["x0"])


def gradient_of(operator, inputs, attributes):
    """The output and the gradients of the body, for operators without a CPU kernel in ONNX Runtime."""
    given, feeds = model(operator, inputs, ("y",), "com.microsoft", attributes)
    wrt = [name for name, array in feeds.items() if array.dtype.kind == "f"]
    built = projected_gradient(given, wrt, {"y": normal(2, 3, 4, seed=8).astype(np.float32)})
    return run(built, feeds)


def test_packed_query_key_and_value_equal_separate_ones():
    parts = [normal(2, 3, 4, seed=seed) for seed in (1, 2, 3)]
    apart = gradient_of("MultiHeadAttention", (*parts, BIAS), HEADS)
    packed = np.stack([part.reshape(2, 3, 2, 2) for part in parts], axis=3)
    found = gradient_of("MultiHeadAttention", (packed, None, None, BIAS), HEADS)
    np.testing.assert_allclose(found["y"], apart["y"], atol=1e-6)
    for index in range(3):
        gradient = found["x0_grad"][:, :, :, index].reshape(2, 3, 4)
        np.testing.assert_allclose(gradient, apart[f"x{index}_grad"], atol=1e-5)
    np.testing.assert_allclose(found["x3_grad"], apart["x3_grad"], atol=1e-5)


def test_packed_key_and_value_equal_separate_ones():
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
def test_masks_of_unknown_size_are_distinguished_in_the_graph(mask):
    given, feeds = model("Attention", (X, WEIGHTS, BIAS, mask), ("y",), "com.microsoft", HEADS)
    expected = run(given, feeds)["y"]
    for info in given.graph.input:
        for axis, dimension in enumerate(info.type.tensor_type.shape.dim):
            if info.name in ("x0", "x3"):
                dimension.dim_param = f"{info.name}_{axis}"
    built = projected_gradient(given, ["x0"], {"y": np.ones((2, 3, 4), np.float32)})
    np.testing.assert_allclose(run(built, feeds)["y"], expected, atol=2e-6)


def test_operators_for_gpus_only_are_known_as_such():
    """Operators with a schema and no CPU kernel; one that gets a kernel needs a body instead."""
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
    with raises_sentence("for_gpus_only", nodes="PackedMultiHeadAttention"):
        onnxtrain.Trainer(made, loss="mean_squared_error")


def test_a_shape_without_a_type_is_not_a_type():
    """Passes leave untyped values behind operators that ONNX does not know, where FastGelu's body lacked a type."""
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


def test_the_layout_of_one_kind_of_cpu_is_refused_with_its_cure(tmp_path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 4
    onnxruntime.InferenceSession(onnxtrain.examples.digits_cnn().SerializeToString(), options, providers=PROVIDERS)
    written = onnx.load(tmp_path / "optimized.onnx")
    if all(node.domain != "com.microsoft.nchwc" for node in written.graph.node):
        pytest.skip("ONNX Runtime has no such layout for this CPU")
    with raises_sentence("optimized_for_one_cpu"):
        onnxtrain.Trainer(written, loss="cross_entropy")


PROVIDERS = ["CPUExecutionProvider"]
