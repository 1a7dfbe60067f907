"""Attention of three parts of a Split reads the whole; others stay."""

import numpy as np
import pytest
from onnx import parser
from ways import operators, operators_of_step, passed, trained_both_ways

from onnxtrain.lowering.rules.attention import fuse_attention, pack_attention

X = np.random.default_rng(0).normal(0, 1, (4, 5, 6)).astype(np.float32)
W = np.random.default_rng(1).normal(0, 0.5, (6, 18)).astype(np.float32)

SPLIT = "h = MatMul(x, w) q0, k0, v0 = Split<axis={axis}>(h, sizes) "
HEADS = (
    "q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads) "
    "q = Transpose<perm=[0, 2, 1, 3]>({q}) k = Transpose<perm=[0, 2, 3, 1]>({k}) v = Transpose<perm=[0, 2, 1, 3]>({v}) "
)
ATTENTION = (
    "s0 = MatMul(q, k) s1 = Mul(s0, c) s = Add(s1, bias) p = Softmax<axis=-1>(s) o = MatMul(p, v) "
    "y0 = Transpose<perm=[0, 2, 1, 3]>(o) y = Reshape(y0, flat)"
)


def model(*, axis="-1", sizes="6, 6, 6", order="q1 k1 v1", more="", outputs=""):
    q, k, v = order.split()
    weights = ", ".join(map(str, W.reshape(-1).tolist()))
    return parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> f (float[n, 5, 6] x) => (float[n, 5, 6] y' + outputs + ") <"
        f"int64[3] sizes = {{{sizes}}}, int64[4] heads = {{0, 0, 2, 3}}, int64[3] flat = {{0, 0, 6}}, "
        f"float c = {{0.5}}, float[6, 18] w = {{{weights}}}, float[5, 5] bias = {{{', '.join(['0.25'] * 25)}}}> "
        f"{{ {SPLIT.format(axis=axis)} {HEADS.format(q=q, k=k, v=v)} {ATTENTION} {more} }}"
    )


def packed(proto):
    def both(working):
        fuse_attention(working)
        pack_attention(working)

    return passed(proto, both)


@pytest.mark.parametrize("axis", ["-1", "2"])
def test_three_parts_in_order_are_read_in_one(axis):
    found = operators(packed(model(axis=axis)))
    assert found.count("PackedAttention") == 1
    assert "Split" not in found
    assert "Attention" not in found


def test_readers_of_a_shape_read_that_of_the_whole():
    sizes = "g = Shape(q1) z = Identity(g)"
    found = packed(model(more=sizes, outputs=", int64[4] z"))
    assert operators(found).count("PackedAttention") == 1
    assert "Split" not in operators(found)
    made = {name: node for node in found.graph.node for name in node.output}
    (shape,) = (node for node in found.graph.node if node.op_type == "Concat")
    assert made["z"].input[0] == shape.output[0]


@pytest.mark.parametrize(
    "change",
    [{"order": "k1 q1 v1"}, {"order": "q1 q1 v1"}, {"more": "z = Neg(q0)", "outputs": ", float[n, 5, 6] z"}],
    ids=["another order", "a part twice", "a part read elsewhere"],
)
def test_others_stay(change):
    found = operators(packed(model(**change)))
    assert found.count("Attention") == 1
    assert found.count("Split") == 1


def test_training_is_the_same_as_in_standard_operators():
    targets = np.random.default_rng(2).normal(0, 1, X.shape).astype(np.float32)
    (standard, _), (fused, trainer) = trained_both_ways(model(), ["w", "bias"], X, targets)
    np.testing.assert_allclose(fused, standard, rtol=1e-5)
    step = operators_of_step(trainer)
    assert {"PackedAttention", "PackedAttentionGradient"} <= set(step)
    assert not {"Split", "Concat"} & set(step)
