"""Structures of hard cases are removed, and the result equals the masked original."""

import numpy as np
import onnx
import pytest
from masked_models import build, compare, masked, run, shapes, shrink_by, structures_of, without
from structure_cases import CASES, FEEDS, HEAD, TAIL, X, ints, sequence, text

from sentences import raises_sentence


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fraction", [0.15, 0.4])
def test_equals_the_masked_original(name, fraction):
    shrink_by(CASES[name], FEEDS.get(name, X), fraction)


@pytest.mark.parametrize("batch", ["2", "n"])
@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("directions", [1, 2])
def test_units_of_recurrent_layers(operator, directions, batch):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    way = "bidirectional" if directions == 2 else "forward"
    model = build(
        text(
            f'i = MatMul(x, w0) s, t = {operator}<hidden_size = 6, direction = "{way}">(i, w, r, b)'
            f" p = Transpose<perm = [0, 2, 1, 3]>(s) m = Reshape(p, merged) y = MatMul(m, head)",
            f"float[4, {batch}, 3] x",
            f"float[4, {batch}, 5] y",
        ),
        **{"w0": (3, 7), "w": (directions, gates * 6, 7), "r": (directions, gates * 6, 6)},
        **{"b": (directions, 2 * gates * 6), "merged": ints(4, -1, 6 * directions), "head": (6 * directions, 5)},
    )
    feeds = {"x": np.random.default_rng(6).normal(size=(4, 2, 3)).astype(np.float32)}
    small = shrink_by(model, feeds, 0.4)
    units = shapes(small)["r"][2]
    assert units < 6
    assert shapes(small)["head"] == (units * directions, 5)


@pytest.mark.parametrize("fixed", ["b", "w", "r"])
def test_recurrent_weights_that_are_inputs_keep_the_units(fixed):
    sizes = {"w": (1, 24, 3), "r": (1, 24, 6), "b": (1, 48)}
    shape = ", ".join(map(str, sizes[fixed]))
    model = build(
        text(
            "s, t = LSTM<hidden_size = 6>(x, w, r, b) m = Squeeze(s, one) u = MatMul(m, w1) v = Relu(u)"
            " y = MatMul(v, w2)",
            f"float[4, 2, 3] x, float[{shape}] {fixed}",
            "float[4, 2, 5] y",
        ),
        **{name: size for name, size in sizes.items() if name != fixed},
        **{"one": ints(1), "w1": (6, 8), "w2": (8, 5)},
    )
    rng = np.random.default_rng(6)
    feeds = {"x": rng.normal(size=(4, 2, 3)), fixed: rng.normal(size=sizes[fixed])}
    small = shrink_by(model, {name: array.astype(np.float32) for name, array in feeds.items()}, 0.1)
    assert shapes(small)["w1"][0] == 6
    assert shapes(small)["w1"][1] < 8


def test_a_part_of_the_channels_does_not_vanish():
    model = CASES["a part of the channels without weights of its own"]
    structures = structures_of(model)
    labels = next(structures.of(axes[0]) for value, axes in structures.parameters() if value.name == "w1")
    with raises_sentence("nothing_would_remain", what="q", got=1):
        without(model, labels[6:])


ATTENTION = (
    "q0 = MatMul(x, wq) q1 = Add(q0, bq) q2 = Reshape(q1, apart) q = Transpose<perm = [0, 2, 1, 3]>(q2)"
    " k0 = MatMul(x, wk) k1 = Add(k0, bk) k2 = Reshape(k1, apart) k = Transpose<perm = [0, 2, 3, 1]>(k2)"
    " v0 = MatMul(x, wv) v1 = Add(v0, bv) v2 = Reshape(v1, apart) v = Transpose<perm = [0, 2, 1, 3]>(v2)"
    " s0 = MatMul(q, k) s = Mul(s0, scale) p = Softmax<axis = -1>(s) o = MatMul(p, v)"
    " o1 = Transpose<perm = [0, 2, 1, 3]>(o) o2 = Reshape(o1, merged) o3 = MatMul(o2, wo) h = Add(x, o3)"
    " n = LayerNormalization(h, g, e) f = MatMul(n, w1) f1 = Add(f, b1) a = Relu(f1) u = MatMul(a, w2) y = Add(n, u)"
)


def attention(apart=(2, 5, 4, 4), merged=(2, 5, 16)):
    return sequence(
        ATTENTION,
        **{"wq": (8, 16), "wk": (8, 16), "wv": (8, 16), "bq": (16,), "bk": (16,), "bv": (16,), "wo": (16, 8)},
        **{"apart": ints(*apart), "merged": ints(*merged), "scale": np.array(0.5, np.float32)},
        **{"g": (8,), "e": (8,), "w1": (8, 20), "b1": (20,), "w2": (20, 8)},
    )


@pytest.mark.parametrize(
    "sizes", [((2, 5, 4, 4), (2, 5, 16)), ((0, 0, -1, 4), (0, 0, -1)), ((0, -1, 4, 4), (0, -1, 16))]
)
def test_heads_and_hidden_units_of_attention(sizes):
    model, feeds = attention(*sizes)
    heads = shapes(shrink_by(model, feeds, 0.25, ["heads"]))
    assert heads["wq"][1] % 4 == 0
    assert heads["wq"] == heads["wk"] == heads["wv"]
    assert heads["w1"] == (8, 20)
    hidden = shapes(shrink_by(model, feeds, 0.25, ["hidden"]))
    assert hidden["wq"] == (8, 16)
    assert hidden["w1"][1] < 20


def test_the_width_of_a_layer_norm_stays_with_its_reason():
    model, _ = sequence(
        "a = MatMul(x, w0) n = LayerNormalization(a, g, e) y = MatMul(n, w1)",
        **{"w0": (8, 12), "g": (12,), "e": (12,), "w1": (12, 8)},
    )
    structures = structures_of(model)
    width = next(axes[0] for value, axes in structures.parameters() if value.name == "w1")
    reasons = {structures.locked[root] for root in structures.of(width).tolist()}
    assert any("LayerNormalization (output 'n') normalizes over it" in reason for reason in reasons)


def test_packed_queries_keys_and_values():
    model, feeds = sequence(
        "z = MatMul(x, w) z1 = Reshape(z, apart) z2 = Transpose<perm = [2, 0, 3, 1, 4]>(z1)"
        " q = Gather<axis = 0>(z2, i0) k = Gather<axis = 0>(z2, i1) v = Gather<axis = 0>(z2, i2)"
        " kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) p = Softmax<axis = -1>(s) o = MatMul(p, v)"
        " o1 = Transpose<perm = [0, 2, 1, 3]>(o) o2 = Reshape(o1, merged) y = MatMul(o2, wo)",
        **{"w": (8, 48), "apart": ints(2, 5, 3, 4, 4), "merged": ints(2, 5, 16), "wo": (16, 8)},
        **{f"i{number}": np.array(number, np.int64) for number in range(3)},
    )
    small = shapes(shrink_by(model, feeds, 0.25, ["heads"]))
    assert small["w"][1] == 3 * small["wo"][0]


def test_sizes_that_the_graph_computes():
    """An exporter's Shape, Gather and Concat, with a dynamic batch and length."""
    nodes = (
        "sx = Shape(x) b = Gather(sx, i0) l = Gather(sx, i1) b1 = Unsqueeze(b, zero) l1 = Unsqueeze(l, zero)"
        " apart = Concat<axis = 0>(b1, l1, four, size)"
        " q0 = MatMul(x, wq) sq = Shape(q0) width = Gather(sq, i2) w1 = Unsqueeze(width, zero)"
        " q2 = Reshape(q0, apart) q = Transpose<perm = [0, 2, 1, 3]>(q2)"
        " k0 = MatMul(x, wk) k2 = Reshape(k0, apart) k = Transpose<perm = [0, 2, 3, 1]>(k2)"
        " s = MatMul(q, k) p = Softmax<axis = -1>(s) o = MatMul(p, q) o1 = Transpose<perm = [0, 2, 1, 3]>(o)"
        " merged = Concat<axis = 0>(b1, l1, w1) o2 = Reshape(o1, merged) y = MatMul(o2, wo)"
    )
    model = build(
        text(nodes, "float[batch, length, 8] x", "float[batch, length, 8] y"),
        **{"wq": (8, 16), "wk": (8, 16), "wo": (16, 8), "zero": ints(0), "four": ints(4), "size": ints(4)},
        **{f"i{number}": np.array(number, np.int64) for number in range(3)},
    )
    _, feeds = attention()
    small = shrink_by(model, feeds, 0.25)
    other = {"x": np.random.default_rng(7).normal(size=(3, 9, 8)).astype(np.float32)}
    assert run(small, other)[0].shape == (3, 9, 8)


DYNAMIC = ("float[batch, length, 8] x", "float[batch, length, 8] y")
SIZES = (
    "sx = Shape(x) b = Slice(sx, zero, one) l = Slice(sx, one, two) d = Identity(four)"
    " apart = Concat<axis = 0>(b, l, minus, d)"
    " q0 = MatMul(x, wq) q1 = Reshape(q0, apart) q = Transpose<perm = [0, 2, 1, 3]>(q1)"
    " k0 = MatMul(x, wk) k1 = Reshape(k0, apart) k = Transpose<perm = [0, 2, 1, 3]>(k1)"
    " v0 = MatMul(x, wv) v1 = Reshape(v0, apart) v = Transpose<perm = [0, 2, 1, 3]>(v1)"
)
MERGED = (
    " c1 = Transpose<perm = [0, 2, 1, 3]>(c) back = Concat<axis = 0>(b, l, minus) c2 = Reshape(c1, back)"
    " y = MatMul(c2, wo)"
)
BATCHED_HEADS = {
    "keys are flattened and transposed": (
        " flat = Concat<axis = 0>(minus, l, d) kf = Reshape(k, flat) kt = Transpose<perm = [0, 2, 1]>(kf)"
        " sk = Shape(k) front = Slice(sk, zero, two) unflat = Concat<axis = 0>(front, d, l) ku = Reshape(kt, unflat)"
        " s = MatMul(q, ku) p = Softmax<axis = -1>(s) c = MatMul(p, v)"
    ),
    "attention with a computed number of matrices": (
        " n = Mul(b, four) flat = Concat<axis = 0>(n, minus, d) qf = Reshape(q, flat) kf = Reshape(k, flat)"
        " vf = Reshape(v, flat) kt = Transpose<perm = [0, 2, 1]>(kf) s = MatMul(qf, kt)"
        " wide = Concat<axis = 0>(b, four, l, l) s4 = Reshape(s, wide) p4 = Softmax<axis = -1>(s4)"
        " tall = Concat<axis = 0>(n, l, l) p = Reshape(p4, tall) cf = MatMul(p, vf)"
        " unflat = Concat<axis = 0>(b, four, l, d) c = Reshape(cf, unflat)"
    ),
    "batch and heads as one axis throughout": (
        " flat = Concat<axis = 0>(minus, l, d) qf = Reshape(q, flat) kf = Reshape(k, flat) vf = Reshape(v, flat)"
        " kt = Transpose<perm = [0, 2, 1]>(kf) s = MatMul(qf, kt) p = Softmax<axis = -1>(s) cf = MatMul(p, vf)"
        " unflat = Concat<axis = 0>(b, minus, l, d) c = Reshape(cf, unflat)"
    ),
}


@pytest.mark.parametrize("name", BATCHED_HEADS)
def test_heads_in_one_axis_with_a_dynamic_batch(name):
    model = build(
        text(SIZES + BATCHED_HEADS[name] + MERGED, *DYNAMIC),
        **{"wq": (8, 16), "wk": (8, 16), "wv": (8, 16), "wo": (16, 8)},
        **{"zero": ints(0), "one": ints(1), "two": ints(2), "four": ints(4), "minus": ints(-1)},
    )
    structures = structures_of(model)
    heads = structures.tagged(["heads"]).tolist()
    assert len(heads) == 4
    for batch, length in ((2, 5), (3, 7)):
        feeds = {"x": np.random.default_rng(batch).normal(size=(batch, length, 8)).astype(np.float32)}
        small = compare(model, feeds, [heads[0], heads[2]])
        assert shapes(small)["wq"] == (8, 8)
        assert shapes(small)["wo"] == (8, 8)
    onnx.checker.check_model(small, full_check=True)


def test_a_slice_of_batches_and_heads_keeps_the_heads():
    """Fewer heads would move its bounds, so that only the entries of heads can go."""
    model = build(
        text(
            SIZES + " flat = Concat<axis = 0>(minus, l, d) kf = Reshape(k, flat) kc = Slice(kf, zero, two, zero)"
            " r = ReduceSum(kc) c = Mul(q, r)" + MERGED,
            *DYNAMIC,
        ),
        **{"wq": (8, 16), "wk": (8, 16), "wv": (8, 16), "wo": (16, 8)},
        **{"zero": ints(0), "one": ints(1), "two": ints(2), "four": ints(4), "minus": ints(-1)},
    )
    structures = structures_of(model)
    keys = next(axes[1] for value, axes in structures.parameters() if value.name == "wk")
    assert len(np.unique(structures.of(keys))) == 4
    feeds = {"x": np.random.default_rng(2).normal(size=(2, 5, 8)).astype(np.float32)}
    compare(model, feeds, structures.of(keys)[[1, 2]].tolist())
    assert structures.of(keys)[0] != structures.of(keys)[1]


def test_layers_that_share_a_stored_vector():
    """Exporters store equal vectors once; the width of the layer norm stays, the hidden units go, sharing returns."""
    model, feeds = sequence(
        "bias = Identity(b) n = LayerNormalization(x, g, bias) a = MatMul(n, w1) h = Add(a, b) r = Tanh(h)"
        " u = MatMul(r, w2) y = Add(u, b)",
        **{"g": (8,), "b": (8,), "w1": (8, 8), "w2": (8, 8)},
    )
    small = shapes(shrink_by(model, feeds, 0.3))
    assert small["w1"] == (8, small["w2"][0])
    assert sorted(shape for name, shape in small.items() if name.startswith("b")) == [(small["w2"][0],), (8,)]


def test_attention_of_opset_23():
    model = build(
        text(
            "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
            " o = Attention<q_num_heads = 4, kv_num_heads = 2>(q, k, v) y = MatMul(o, wo)",
            "float[2, 5, 8] x",
            "float[2, 5, 8] y",
            opset=23,
        ),
        **{"wq": (8, 16), "wk": (8, 8), "wv": (8, 8), "wo": (16, 8)},
    )
    _, feeds = attention()
    small = shapes(shrink_by(model, feeds, 0.3))
    assert (small["wq"], small["wk"]) == ((8, 8), (8, 4))


def test_fused_operators_stop_the_search_and_the_rest_shrinks():
    model, feeds = sequence(
        "a = MatMul(x, w1) b = Relu(a) c = MatMul(b, w2) y = com.microsoft.Attention<num_heads = 2>(c, wa, ba)",
        **{"wa": (8, 24), "ba": (24,), "w1": (8, 12), "w2": (12, 8)},
    )
    small = shrink_by(model, feeds, 0.1)
    assert shapes(small)["wa"] == (8, 24)
    assert "joins several layers in one operator" in structures_of(model).stops["com.microsoft::Attention"]


def test_an_operator_that_nobody_knows_stops_the_search():
    model = build(
        HEAD.format(opset=18, inputs="float[2, 4] x", outputs="float[2, 5] y", nodes="")
        .replace('"com.microsoft": 1', '"other": 1')
        .replace("{  }", "{ a = MatMul(x, w1) b = other.Strange(a) y = MatMul(b, w2) }"),
        w1=(4, 6),
        w2=(6, 5),
    )
    structures = structures_of(model)
    assert structures.stops == {"other::Strange": "no axis rule is known for this operator"}
    assert not structures.tagged(["hidden"]).size


def test_bodies_stop_the_search():
    branch = "g () => (float[2, 6] z) { z = Mul(a, a) }"
    model = build(
        text(
            f"a = MatMul(x, w1) b = If<then_branch = {branch}, else_branch = {branch}>(flag) y = MatMul(b, w2)",
            "float[2, 4] x, bool flag",
        ),
        w1=(4, 6),
        w2=(6, 5),
    )
    structures = structures_of(model)
    assert "not followed into bodies" in structures.stops["::If"]
    assert not structures.tagged(["hidden"]).size


def test_the_rest_shrinks_beside_a_body():
    """A body that reads a value of the outer graph keeps its axes."""
    model = build(
        text(
            "a = MatMul(x, w1) r = Relu(a) b = If<then_branch = g () => (float[2, 6] z) { z = Mul(c, c) },"
            " else_branch = g () => (float[2, 6] z) { z = Add(c, c) }>(flag) y = MatMul(b, w3)",
            "float[2, 4] x, bool flag",
        ).replace("r = Relu(a)", "r = Relu(a) c = MatMul(r, w2)"),
        **{"w1": (4, 8), "w2": (8, 6), "w3": (6, 5)},
    )
    feeds = {"x": np.random.default_rng(3).normal(size=(2, 4)).astype(np.float32), "flag": np.array(True)}
    small = shapes(shrink_by(model, feeds, 0.2))
    assert small["w1"][1] < 8
    assert small["w3"] == (6, 5)


def test_images_of_any_size():
    model = build(
        text(
            "a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1) r = Relu(a) p = MaxPool<kernel_shape = [2, 2]>(r) h = Conv(p, w2)"
            f" {TAIL}",
            "float[batch, 3, height, width] x",
            "float[batch, 5] y",
        ),
        **{"w1": (8, 3, 3, 3), "b1": (8,), "w2": (6, 8, 1, 1), "head": (5, 6), "bias": (5,)},
    )
    for size in (6, 9):
        feeds = {"x": np.random.default_rng(size).normal(size=(2, 3, size, size + 1)).astype(np.float32)}
        assert shapes(shrink_by(model, feeds, 0.3))["w1"][0] < 8


def test_functions_are_inlined():
    model = build(
        '<ir_version: 8, opset_import: ["": 18, "own": 1]> f (float[2, 4] x) => (float[2, 5] y)'
        " { a = MatMul(x, w1) b = own.square(a) y = MatMul(b, w2) }"
        ' <domain: "own", opset_import: ["": 18]> square (p) => (q) { q = Mul(p, p) }',
        w1=(4, 6),
        w2=(6, 5),
    )
    shrink_by(model, {"x": X["x"].reshape(-1)[:8].reshape(2, 4)}, 0.4)


def test_a_mean_over_a_structure_locks_it():
    model = build(
        text("a = MatMul(x, w1) m = ReduceMean(a, last) b = Sub(a, m) y = MatMul(b, w2)", "float[2, 4] x"),
        **{"w1": (4, 6), "w2": (6, 5), "last": ints(-1)},
    )
    structures = structures_of(model)
    assert not structures.tagged(["hidden"]).size
    assert any("fewer entries give another result" in reason for reason in structures.locked.values())


def test_a_wrong_removal_is_noticed():
    """The comparison fails for a model that lacks another structure than the masked one."""
    model = CASES["tied weights"]
    structures = structures_of(model)
    one, other = structures.tagged(["hidden"]).tolist()[:2]
    feeds = FEEDS["tied weights"]
    right = run(masked(model, structures, [one]), feeds)[0]
    np.testing.assert_allclose(run(without(model, [one]), feeds)[0], right, rtol=1e-4)
    assert np.abs(run(without(model, [other]), feeds)[0] - right).max() > 0.1


def test_masks_that_change_nothing_are_noticed():
    model = build(
        text("a = MatMul(x, w1) b = Relu(a) y = MatMul(b, w2)", "float[2, 4] x"),
        w1=(4, 6),
        w2=np.zeros((6, 5), np.float32),
    )
    removed = structures_of(model).tagged(["hidden"]).tolist()[:2]
    with pytest.raises(AssertionError, match="masking changes no output"):
        compare(model, {"x": X["x"].reshape(-1)[:8].reshape(2, 4)}, removed)


def test_old_operator_sets():
    """Attributes instead of inputs: Slice, Squeeze, Split and Pad of opset 9."""
    model = build(
        text(
            "a = Conv(x, w1) b = Pad<pads = [0, 0, 1, 1, 0, 0, 1, 1]>(a) p, q = Split<axis = 1, split = [3, 5]>(b)"
            " r = Slice<axes = [1], starts = [1], ends = [4]>(q) c = Concat<axis = 1>(p, r) g = GlobalAveragePool(c)"
            " s = Squeeze<axes = [2, 3]>(g) y = MatMul(s, head)",
            opset=9,
        ),
        w1=(8, 3, 1, 1),
        head=(6, 5),
    )
    shrink_by(model, X, 0.3)


def test_the_checker_accepts_the_result():
    small = shrink_by(CASES["channel shuffle between grouped convolutions"], X, 0.2)
    onnx.checker.check_model(small, full_check=True)
