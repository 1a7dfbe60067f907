"""Runnable models of ONNX Runtime's own operators: attributes, optional inputs, masks, KV caches."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from autodiff.case import normal

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


def row(operator, *inputs, outputs=("y",), domain="com.microsoft", label="plain", **attributes):
    return pytest.param(operator, inputs, outputs, domain, attributes, id=f"{operator}-{label}-{domain or 'ai.onnx'}")


KEPT = {"MatMulNBits", "ArrayFeatureExtractor"}
"""Operators with rules that keep their nodes."""

ROWS = [
    row("ArrayFeatureExtractor", normal(3, 4), np.array([[2, 0, 2]]), domain="ai.onnx.ml"),
    row("ArrayFeatureExtractor", normal(2, 3, 4), np.array([1, 3]), domain="ai.onnx.ml", label="rank-3"),
    row("ArrayFeatureExtractor", normal(4), np.array([3, 1, 1]), domain="ai.onnx.ml", label="rank-1"),
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
    row("SimplifiedLayerNormalization", X, GAMMA, domain="", outputs=("y", "deviation"), label="deviation"),
    row("SkipSimplifiedLayerNormalization", X, X[::-1], GAMMA, outputs=("y", "", "deviation"), label="deviation"),
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
    row("GroupQueryAttention", *SPLIT, *NO_PAST, LAST, TOTAL, **FOUR_HEADS, causal=0, label="both", **PRESENT_KEYS),
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
    imports = [
        helper.make_opsetid("", opset),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid("ai.onnx.ml", 3),
    ]
    graph = helper.make_graph([node], "fused", infos, given)
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def run(built, feeds):
    single = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, single), strict=True))
