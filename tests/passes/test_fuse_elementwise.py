"""Chains of elementwise operators become one node with the same results; what others read stays."""

import numpy as np
import onnxruntime
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator
from ways import operators, operators_of_step, passed, trained_both_ways

import onnxtrain
from onnxtrain.lowering.rules.elementwise import MOST_STEPS, SLOW, STEPS, WRITTEN, fuse_elementwise

CONSTANTS = "float half = {0.5}, float three = {3}, float[1] one = {1}, float[4] g = {1, -2, 0.5, 3}"
CHAINS = {
    "a product of a sum": "a = Add(x, u) y = Mul(a, x)",
    "numbers": "a = Mul(x, half) b = Sub(one, a) y = Div(b, three)",
    "the slope of HardSwish": "a = Abs(x) in = Less(a, three) b = Mul(x, half) c = Add(b, one) p = Greater(x, half) "
    "f = Cast <to = 1> (p) w = Where(in, c, f) y = Mul(u, w)",
    "signs": "a = Sign(x) y = Mul(a, u)",
    "bounds": "a = Max(x, half) b = Min(u, a) c = Mul(b, three) y = Sub(one, c)",
    "an equality": "q = Equal(x, three) w = Where(q, u, x) a = Sub(w, u) y = Mul(three, a)",
    "a bounded sum": "a = Add(u, half) b = Min(a, one) y = Relu(b)",
    "a remainder": "a = Mod <fmod = 1> (x, u) y = Neg(a)",
    "a power of a sum": "a = Abs(x) b = Add(a, half) p = Pow(b, u) l = Log(b) y = Mul(p, l)",
    "angles": "a = Sin(x) b = Cos(x) c = Tan(x) d = Mul(a, b) y = Add(c, d)",
    "hyperbolic angles": "a = Sinh(x) b = Cosh(x) c = Atanh(u) d = Mul(a, b) y = Add(d, c)",
    "a sum of many": "a = Sum(x, u, x) b = Neg(a) y = Relu(b)",
    "the slope of SiLU": "s = Sigmoid(x) r = Sub(one, s) a = Mul(x, r) b = Add(a, one) c = Mul(s, b) y = Mul(u, c)",
}
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3.0, -3.0, 88.0, -104.0, 1e-40], np.float32)


def model(nodes, more="", kind="float", opset=21):
    constants, nodes = (
        CONSTANTS.replace("float", kind),
        nodes.replace("to = 1>", "to = 11>" if kind == "double" else "to = 1>"),
    )
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> f ({kind}[n, 4] x, {kind}[n, 4] u) => ({kind}[n, 4] y{more}) '
        f"<{constants}> {{ {nodes} }}"
    )


def fuse(model):
    fuse_elementwise(model)


def results(proto, feeds):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(str(onnxtrain.custom_ops_library()))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("nodes", CHAINS.values(), ids=CHAINS)
def test_a_chain_is_one_node_with_the_same_results(nodes, kind):
    given = model(nodes, kind=kind)
    found = passed(given, fuse)
    assert operators(found) == ["Elementwise"]
    dtype = np.float32 if kind == "float" else np.float64
    rng = np.random.default_rng(0)
    x, u = (rng.normal(0, 3, (9001, 4)).astype(dtype) for _ in range(2))  # several tasks, and a tail
    x.flat[: SPECIAL.size] = SPECIAL
    x.flat[-SPECIAL.size :] = SPECIAL
    feeds = {"x": x, "u": u}
    after = results(found, feeds)
    if any(f"{function}(" in nodes for function in ("Pow", "Sin", "Sinh")):  # ONNX Runtime lacks some of doubles
        with np.errstate(all="ignore"):
            (before,) = ReferenceEvaluator(given).run(None, feeds)
        np.testing.assert_allclose(after, before, rtol=2e-6, atol=1e-6)  # sums that cancel
        return
    before = results(given, feeds)
    if "Sigmoid" in nodes:
        # ONNX Runtime's sigmoid is off by up to 3e-7, which is multiplied by u: up to 12.
        np.testing.assert_allclose(after, before, rtol=3e-6, atol=1e-5)
    else:
        np.testing.assert_array_equal(after, before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("operator", [*WRITTEN, *sorted(SLOW), "LeakyRelu <alpha = 0.3>", "Elu <alpha = 2.5>"])
def test_an_operator_that_is_slow_alone_is_a_chain(operator, kind):
    two = {
        "Where": "q = IsNaN(x) y = Where(q, u, half)",
        "Mod": "y = Mod <fmod = 1> (x, u)",
        "Pow": "y = Pow(x, u)",
    }
    given = model(two.get(operator, f"y = {operator}(x)"), kind=kind, opset=24 if operator == "Swish" else 21)
    found = passed(given, fuse)
    assert operators(found)[-1] == "Elementwise"
    dtype = np.float32 if kind == "float" else np.float64
    x, u = (np.random.default_rng(0).normal(0, 3, (9001, 4)).astype(dtype) for _ in range(2))
    x.flat[: SPECIAL.size] = SPECIAL
    with np.errstate(all="ignore"):
        (before,) = ReferenceEvaluator(given).run(None, {"x": x, "u": u})
    np.testing.assert_allclose(results(found, {"x": x, "u": u}), before, rtol=3e-6, atol=1e-6)


def test_softplus_keeps_its_digits():
    """log(1 + e) of a small e is not 0."""
    x = np.linspace(-80, 80, 4 * 1000, dtype=np.float32).reshape(-1, 4)
    found = results(passed(model("y = Softplus(x)"), fuse), {"x": x, "u": x})
    np.testing.assert_allclose(found, np.logaddexp(0, x.astype(np.float64)), rtol=1e-6)


EXACT = {
    "Atanh": np.arctanh,
    "Cos": np.cos,
    "Cosh": np.cosh,
    "Log": np.log,
    "Mod <fmod = 1>": np.fmod,
    "Pow": np.power,
    "Sin": np.sin,
    "Sinh": np.sinh,
    "Tan": np.tan,
}


@pytest.mark.parametrize("operator", EXACT)
def test_functions_are_exact_to_an_ulp(operator):
    """Of small and huge arguments, of infinities and NaN; zeros keep their sign."""
    rng = np.random.default_rng(0)
    x = np.exp(rng.uniform(-103, 88, 40_000)) * rng.choice([-1, 1], 40_000)
    x[20_000:30_000] = rng.uniform(-1, 1, 10_000)
    x[30_000:] = rng.uniform(-91, 91, 10_000)
    x = x.astype(np.float32)
    special = np.array([*SPECIAL, 1, -1, 0.9999999, 3e38, -3e38, 2.7e8, 1e9], np.float32)
    x[: special.size**2], u = np.repeat(special, special.size), rng.permutation(x)
    u[: special.size**2] = np.tile(special, special.size)
    u[1000:10_000] = np.abs(x[1000:10_000]) ** 0.1  # powers and remainders that are neither 0 nor infinite
    given = f"{operator}(x, u)" if operator[:3] in ("Mod", "Pow") else f"{operator}(x)"
    feeds = {"x": x.reshape(-1, 4), "u": u.reshape(-1, 4)}
    found = results(passed(model(f"y = {given}"), fuse), feeds).reshape(-1)
    with np.errstate(all="ignore"):
        exact = EXACT[operator](*(each.astype(np.float64) for each in ((x, u) if "u" in given else (x,))))
        rounded = exact.astype(np.float32)
        error = np.abs(found - exact) / np.spacing(np.abs(rounded)).astype(np.float64)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(found[~finite], rounded[~finite])
    assert error[finite].max() < 1
    zero = rounded == 0
    np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(rounded[zero]))


def test_every_operator_of_a_chain_is_tested():
    assert {word for chain in CHAINS.values() for word in STEPS if f"{word}(" in chain or f"{word} <" in chain} == STEPS


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ("y = Mul(x, u)", ["Mul"]),  # one operator is no chain
        ("a = Add(x, u) b = Exp(a) y = Mul(b, x)", ["Add", "Exp", "Mul"]),  # an operator that chains do not have
        ("a = Add(x, u) b = Mul(a, x) e = Exp(a) y = Mul(b, e)", ["Add", "Exp", "Elementwise"]),  # a is read by Exp
        ("a = Add(x, g) y = Mul(a, u)", ["Add", "Mul"]),  # a row for all rows
        ("s = Sigmoid(x) e = Exp(s) y = Mul(s, e)", ["Sigmoid", "Exp", "Mul"]),  # s is kept anyway
        (
            "s = Sigmoid(x) y0 = Mul(s, x) e = Exp(y0) a = Mul(s, e) y = Add(a, x)",
            ["Elementwise", "Exp", "Elementwise"],
        ),
    ],
)
def test_what_others_read_stays(nodes, left):
    assert operators(passed(model(nodes), fuse)) == left


def test_outputs_stay():
    given = model("a = Add(x, u) b = Mul(a, x) y = Neg(b)", more=", float[n, 4] a")
    assert operators(passed(given, fuse)) == ["Add", "Elementwise"]


def test_no_chain_keeps_several_values_while_others_are_computed():
    """The result of the chain waits for the long way, and not its inputs."""
    early = "a = Tanh(x) b = Exp(a) c = Erf(b) p = Mul(a, b) q = Sub(p, c)"
    found = passed(model(f"{early} h = Softmax(c) long = Tanh(h) y = Add(q, long)"), fuse)
    assert operators(found) == ["Tanh", "Exp", "Erf", "Elementwise", "Softmax", "Tanh", "Add"]


def test_one_value_may_be_kept_for_another():
    found = passed(model("a = Tanh(x) b = Neg(a) h = Exp(u) y = Add(b, h)"), fuse)
    assert operators(found) == ["Tanh", "Exp", "Elementwise"]


def test_long_chains_are_cut():
    nodes = " ".join(f"v{i + 1} = Mul({'x' if i == 0 else f'v{i}'}, half)" for i in range(40))
    found = operators(passed(model(f"{nodes} y = Neg(v40)"), fuse))
    assert found == ["Elementwise"] * -(-41 // MOST_STEPS)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("Erf x0", "the operator 'Erf', which chains do not have"),
        ("Mul x0", "1 operands for Mul, which has 2"),
        ("Neg s0", "the operand 's0' in step 0"),
        ("Neg x8", "the operand 'x8' in step 0"),
        ("Neg x99999999999999999999", "the operand 'x9+' in step 0"),
        ("", "0 steps: a chain has 1 to 16"),
        (";".join(["Neg x0"] * 17), "17 steps: a chain has 1 to 16"),
        ("Mul x0 x2", "the program reads x2, and there are 2 inputs"),
        ("Mul x0 x1", r"\(x1\) has shape \[3\] and .*: they must have one shape"),
    ],
)
def test_messages(program, message):
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "onnxtrain": 1]> f (float[2, 3] a, float[b] b) => (float[2, 3] y) '
        f'{{ y = onnxtrain.Elementwise <program = "{program}"> (a, b) }}'
    )
    with pytest.raises(Exception, match=message):
        results(proto, {"a": np.ones((2, 3), np.float32), "b": np.ones(1 if "x2" in program else 3, np.float32)})


NETWORKS = {
    "SiLU": "h = Mul(x, g) s = Sigmoid(h) y = Mul(h, s)",
    "HardSwish": "h = Mul(x, g) y = HardSwish(h)",
    "a gate": "h = Mul(x, g) p = Tanh(h) s = Sigmoid(h) y = Mul(p, s)",
}


@pytest.mark.parametrize("nodes", NETWORKS.values(), ids=NETWORKS)
def test_training_is_as_without_kernels(nodes):
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> f (float[n, 4] x) => (float[n, 4] y) <{CONSTANTS}> {{ {nodes} }}'
    )
    x = np.random.default_rng(1).normal(0, 2, (50, 4)).astype(np.float32)
    (plain_losses, plain), (losses, trainer) = trained_both_ways(proto, "g", x, np.ones_like(x))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert "Elementwise" in operators_of_step(trainer)
    assert "Elementwise" not in operators_of_step(plain)
    assert "Where" not in operators_of_step(trainer)
