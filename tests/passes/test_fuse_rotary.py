"""Rotary embeddings as exporters write them become one node of ONNX Runtime's, if tables and shapes allow it."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest
from onnx import helper, parser
from ways import assert_same_results, operators, operators_of_step, passed, recomputed, trained_both_ways

import onnxtrain
from onnxtrain.graph.passes import clean
from onnxtrain.lowering.rules.rotary import fuse_rotary

B, S, H, D = 2, 5, 3, 4
HALVES = "a = Slice(x, zero, two, last, one) b = Slice(x, two, end, last, one) "
TURNED = "m = Neg(b) r = Concat<axis = -1>(m, a) "
SUM = "p = Mul(x, c) q = Mul(r, s) y = Add(p, q)"
WAYS = {
    "as PyTorch writes it": HALVES + TURNED + SUM,
    "products and sum the other way round": HALVES + TURNED + "p = Mul(c, x) q = Mul(s, r) y = Add(q, p)",
    "split": "a, b = Split<axis = -1, num_outputs = 2>(x) " + TURNED + SUM,
    "axes counted from the front": HALVES.replace("last", "third") + TURNED.replace("-1", "3") + SUM,
}
CONSTANTS = (
    "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {9223372036854775807}, "
    "int64[1] last = {-1}, int64[1] third = {3}, int64[4] heads = {0, 0, 3, 4}, float[2] f = {1, 0.1}, "
    "float[2] g = {1, 0.2}, float scaling = {1.5}, float[3, 1, 1] factors = {2, 3, 4}"
)
# Cosines and sines: computed from at, positions [B, S] or [1, S], or constants of a shape.
ANGLES = "n = Unsqueeze(at, last) k = Cast<to = 1>(n) t = Mul(k, f) d = Concat<axis = -1>(t, t) "
COMPUTED = ANGLES + (
    "c0 = Cos(d) c1 = Mul(c0, scaling) c = Unsqueeze(c1, one) s0 = Sin(d) s1 = Mul(s0, scaling) s = Unsqueeze(s1, one) "
)
TAKEN = "c0 = Gather(cosines, at) c = Unsqueeze(c0, one) s0 = Gather(sines, at) s = Unsqueeze(s0, one) "
DIVIDED = "h = Reshape(v, heads) x = Transpose<perm = [0, 2, 1, 3]>(h) "


def tables(*shape, same=True):
    half = np.random.default_rng(1).uniform(-3, 3, (*shape, D // 2))
    angles = np.concatenate([half, half if same else half + 1], -1).astype(np.float32)
    return {"c": np.cos(angles), "s": np.sin(angles)}


def model(nodes, given=None, x=f"float[{B}, {H}, {S}, {D}] x", positions="int64[2, 5] at", more=""):
    result = (
        "float[N, 3, T, 4]" if "N" in x else f"float[{B}, {H}, {S}, {D}]" if x.endswith("v") else x.split("] ")[0] + "]"
    )
    inputs = f"{x}, {positions}" if positions else x
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> f ({inputs}) => ({result} y{more}) <{CONSTANTS}> {{ {nodes} }}'
    )
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(given[name], name) for name in given or ())
    return proto


def is_fused(proto):
    found = operators(proto)
    return found.count("RotaryEmbedding") == 1 and "Neg" not in found and "Add" not in found


def feeds(proto):
    rng, sizes = np.random.default_rng(0), {"N": B, "T": S}
    found = {}
    for value in proto.graph.input:
        shape = [size.dim_value or sizes[size.dim_param] for size in value.type.tensor_type.shape.dim]
        found[value.name] = rng.integers(0, 8, shape) if value.name == "at" else rng.normal(size=shape).astype("f")
    return found


@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_pattern_becomes_one_node(nodes):
    given = model(nodes, tables(1, 1, S), positions="")
    found = passed(given, fuse_rotary)
    assert operators(found) == ["RotaryEmbedding"]
    assert_same_results(given, found, feeds(given))


@pytest.mark.parametrize("shape", [(S,), (1, S), (1, 1, S), (B, 1, S)])
def test_constant_tables_broadcast(shape):
    given = model(WAYS["as PyTorch writes it"], tables(*shape), positions="")
    found = passed(given, fuse_rotary)
    assert is_fused(found)
    assert_same_results(given, found, feeds(given))


@pytest.mark.parametrize("shape", [(S, 1), (1, S, 1), (B, S, 1)])
def test_heads_behind_positions(shape):
    given = model(WAYS["as PyTorch writes it"], tables(*shape), f"float[{B}, {S}, {H}, {D}] x", "")
    found = passed(given, fuse_rotary)
    assert is_fused(found)
    assert "Transpose" not in operators(found)
    assert_same_results(given, found, feeds(given))


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("computed", [COMPUTED, TAKEN], ids=["computed", "taken"])
@pytest.mark.parametrize("positions", ["int64[2, 5] at", "int64[1, 5] at", "int64[N, T] at", "int64[1, T] at"])
def test_tables_that_the_graph_computes(computed, positions, divided):
    free = "T" in positions
    x = f"float[{'N, 3, T, 4' if free else '2, 3, 5, 4'}] x"
    nodes = computed + WAYS["as PyTorch writes it"]
    if divided:
        x, nodes = f"float[{'N, T' if free else '2, 5'}, 12] v", DIVIDED + nodes
    rows = {"cosines": tables(8)["c"], "sines": tables(8)["s"]} if computed is TAKEN else None
    given = model(nodes, rows, x, positions)
    found = passed(given, lambda working: (fuse_rotary(working), clean(working)))
    assert is_fused(found)
    assert operators(found).count("Transpose") == divided
    assert_same_results(given, found, feeds(given))


def test_tables_of_many_sums_are_looked_at_once_each():
    """Add each table to itself: the paths through them are too many to visit."""
    sums = " ".join(f"a{number + 1} = Add(a{number}, a{number})" for number in range(60))
    nodes = COMPUTED.replace("d = Concat", "a0 = Concat").replace("c0 =", f"{sums} d = Mul(a60, tiny) c0 =")
    given = model(nodes + WAYS["as PyTorch writes it"], {"tiny": np.float32(0.5**60)})
    found = operators(passed(given, fuse_rotary))
    assert found.count("RotaryEmbedding") == 1
    assert "Neg" not in found


PLAIN = WAYS["as PyTorch writes it"]


@pytest.mark.parametrize(
    ("nodes", "shape", "reason"),
    [
        (PLAIN.replace("Neg(b)", "Neg(a)").replace("(m, a)", "(m, b)"), (S,), "the halves are not turned"),
        (PLAIN.replace("Concat<axis = -1>(m, a)", "Concat<axis = -1>(a, m)"), (S,), "the first half is negated"),
        (PLAIN.replace("y = Add", "y = Sub"), (S,), "a difference"),
        (PLAIN.replace("Mul(x, c)", "Mul(r, c)"), (S,), "both products are of the turned halves"),
        (PLAIN.replace("q = Mul(r, s)", "q = Mul(r, r)"), (S,), "a square"),
        (PLAIN.replace("y = Add(p, q)", "u = Add(p, q) y = Add(u, r)"), (S,), "read outside"),
        (PLAIN.replace("Slice(x, zero, two", "Slice(x, one, third"), (S,), "other elements"),
        (PLAIN.replace("b = Slice(x, two, end", "b = Slice(x, one, third"), (S,), "other elements of the second"),
        ("w = Exp(x) " + PLAIN.replace("b = Slice(x", "b = Slice(w"), (S,), "halves of two values"),
        ("w = Exp(x) " + PLAIN.replace("p = Mul(x", "p = Mul(w"), (S,), "another value by cosines"),
        (PLAIN, (H, S), "cosines of each head"),
        (PLAIN, (1,), "cosines that all places share"),
        (PLAIN.replace("Mul(r, s)", "Mul(r, factors)"), (S,), "no sines"),
        ("b, a = Split<axis = -1, num_outputs = 2>(x) " + TURNED + SUM, (S,), "split, and not turned"),
    ],
)
def test_others_stay(nodes, shape, reason):
    given = model(nodes, tables(*shape), positions="")
    assert operators(passed(given, fuse_rotary)) == operators(given), reason


@pytest.mark.parametrize(
    "computed",
    [
        COMPUTED.replace("(t, t)", "(t, u)").replace("d =", "u = Mul(k, g) d ="),
        COMPUTED.replace("Mul(s0, scaling)", "Mul(s0, unequal)"),
    ],
    ids=["of two frequencies", "times unequal factors"],
)
def test_tables_of_halves_that_may_differ_stay(computed):
    given = model(computed + " " + PLAIN, {"unequal": tables(same=False)["c"]})
    assert "RotaryEmbedding" not in operators(passed(given, fuse_rotary))


def test_constant_tables_of_unequal_halves_stay():
    given = model(PLAIN, tables(S, same=False), positions="")
    assert "RotaryEmbedding" not in operators(passed(given, fuse_rotary))


def test_tables_that_are_fed_stay():
    given = model(PLAIN, {"s": tables(S)["s"]}, positions="float[5, 4] c")
    assert "RotaryEmbedding" not in operators(passed(given, fuse_rotary))


def test_sizes_that_may_differ_stay():
    given = model(COMPUTED + PLAIN, None, "float[N, 3, T, 4] x", "int64[N, M] at")
    assert "RotaryEmbedding" not in operators(passed(given, fuse_rotary))


def test_double_precision_stays():
    arrays = {name: array.astype(np.float64) for name, array in tables(S).items()}
    given = model(PLAIN, arrays, f"double[{B}, {H}, {S}, {D}] x", "")
    assert "RotaryEmbedding" not in operators(passed(given, fuse_rotary))


def test_an_output_inside_stays():
    given = model(PLAIN, tables(S), positions="", more=f", float[{B}, {H}, {S}, {D}] r")
    assert operators(passed(given, fuse_rotary)) == operators(given)


@pytest.mark.parametrize(("named", "fused"), [("x", True), ("r", False), ("c", False)])
def test_what_a_gradient_names_stays(named, fused):
    given = model(DIVIDED + PLAIN, tables(S), "float[2, 5, 12] v", "", f", float[{B}, {H}, {S}, {D}] dx")
    given.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    attributes = {"domain": "ai.onnx.preview.training", "xs": [named], "y": "y"}
    given.graph.node.append(helper.make_node("Gradient", [named], ["dx"], **attributes))
    found = passed(given, fuse_rotary)
    assert ("RotaryEmbedding" in operators(found)) == fused
    if fused:  # dependents of x still depend on x
        assert next(node for node in found.graph.node if node.op_type == "RotaryEmbedding").input[0] == "x"


NET = f"z = MatMul(inputs, w) v = Reshape(z, shape) {COMPUTED} {DIVIDED} {{}} result = Sin(y)"


def net(nodes=PLAIN):
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> net (float[N, 5, 6] inputs) => (float[N, 3, 5, 4] result) '
        f"<{CONSTANTS}, int64[3] shape = {{0, 0, 12}}, int64[1, 5] at = {{0, 1, 2, 4, 6}}> {{ {NET.format(nodes)} }}"
    )
    array = np.random.default_rng(0).normal(size=(6, 12)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    return proto


def batch():
    rng = np.random.default_rng(1)
    return rng.normal(size=(4, 5, 6)).astype(np.float32), rng.normal(size=(4, 3, 5, 4)).astype(np.float32)


def test_training_is_the_same_and_the_gradient_is_one_node():
    (plain_losses, plain), (losses, trainer) = trained_both_ways(net(), ["w"], *batch())
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    np.testing.assert_allclose(trainer.parameters["w"], plain.parameters["w"], atol=1e-5)
    assert losses[-1] < losses[0]
    assert operators_of_step(trainer).count("RotaryEmbedding") == 2
    assert "RotaryEmbedding" not in operators_of_step(plain)


def test_frequencies_that_are_trained_have_their_gradient():
    (plain_losses, plain), (losses, trainer) = trained_both_ways(net(), ["w", "f"], *batch())
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    np.testing.assert_allclose(trainer.parameters["f"], plain.parameters["f"], atol=1e-5)
    assert "RotaryEmbedding" not in operators_of_step(trainer)


def test_fused_node_is_recomputed_where_its_result_is():
    assert recomputed(net(), "y", ["w"], *batch()) != []
    assert recomputed(net(), "r", ["w"], *batch()) == []  # values inside are never kept


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_both_exporters_of_pytorch(dynamo, free):
    torch = pytest.importorskip("torch")

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projections = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(3))
            self.register_buffer("inv_freq", torch.tensor([1.0, 0.1]))

        def forward(self, inputs, position_ids):
            angles = position_ids[:, :, None].float() * self.inv_freq
            angles = torch.cat((angles, angles), dim=-1)
            cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
            shape = (*inputs.shape[:-1], -1, 4)
            q, k, v = (part(inputs).view(shape).transpose(1, 2) for part in self.projections)
            q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
            y = torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v
            return y.transpose(1, 2).reshape(*inputs.shape[:-1], -1).contiguous()

    def rotate_half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    torch.manual_seed(0)
    example = torch.randn(2, 5, 12), torch.arange(10).reshape(2, 5)
    buffer, names = io.BytesIO(), ["inputs", "position_ids"]
    if dynamo:
        sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("T")}
        options = {"dynamic_shapes": (sizes, sizes)} if free else {}
    else:
        options = {"dynamic_axes": {name: {0: "N", 1: "T"} for name in names}} if free else {}
    made = torch.onnx.export(
        Attention().eval(), example, *(() if dynamo else (buffer,)), input_names=names, dynamo=dynamo, opset_version=18,
        verbose=False, **options,
    )  # fmt: skip
    given = made.model_proto if dynamo else onnx.load_from_string(buffer.getvalue())
    found = passed(given, fuse_rotary)
    assert operators(found).count("RotaryEmbedding") == 2
    assert "Neg" not in operators(found)
    batch = dict(zip(names, (value.numpy() for value in example), strict=True))
    assert_same_results(given, found, batch)
    trainer = onnxtrain.Trainer(given, loss="mean_squared_error")
    trainer.train_step(batch, np.ones((2, 5, 12), np.float32))
    step = operators_of_step(trainer)
    assert (step.count("RotaryEmbedding"), step.count("Attention")) == (4, 1)
