"""Branches of If that differ in rank, and bodies within bodies."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser

import onnxtrain
from onnxtrain.errors import GradientError, ModelError
from onnxtrain.graph.limits import DEEPEST
from sentences import raises_sentence

HEADER = '<ir_version: 10, opset_import: ["" : 17]>'


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def squeezing(declared: str, then: str, otherwise: str) -> onnx.ModelProto:
    """TorchScript's export of ``x.squeeze(0)`` with an axis of unknown size."""
    return parser.parse_model(
        f"{HEADER} g (float[n,4] x) => (float y)"
        f"<int64[1] axis = {{0}}, int64 zero = {{0}}, int64 one = {{1}}{declared}>"
        "{ t = Tanh(x) s = Shape(t) d = Gather<axis=0>(s, zero) c = Equal(d, one)"
        f" z = If(c) <then_branch = t () => ({then} a) {{ a = Squeeze(t, axis) }},"
        f" else_branch = e () => ({otherwise} b) {{ b = Identity(t) }}>"
        " q = Mul(z, z) y = ReduceSum<keepdims=0>(q) }"
    )


@pytest.mark.sampled("rows")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("then", ["float[4]", "float[]", "float[m]"])
@pytest.mark.parametrize("otherwise", ["float[n,4]", "float[]"])
@pytest.mark.parametrize("declared", ["", ", float[n,4] z", ", float[4] z", ", float[] z"])
def test_branches_may_differ_in_rank(declared: str, then: str, otherwise: str, rows: int) -> None:
    x = np.linspace(-1, 2, 4 * rows, dtype=np.float32).reshape(rows, 4)
    found = run(onnxtrain.gradient(squeezing(declared, then, otherwise), "y", ["x"]), x=x)
    np.testing.assert_allclose(found["x_grad"], 2 * np.tanh(x) * (1 - np.tanh(x) ** 2), rtol=1e-5, atol=1e-7)


def nested(depth: int, operator: str) -> onnx.ModelProto:
    """If in the branch of If in the branch of If."""

    def nodes(level: int) -> list[onnx.NodeProto]:
        if not level:
            return [helper.make_node("Mul", ["x", "w"], ["y0"])]
        inner = [*nodes(level - 1), helper.make_node(operator, [f"y{level - 1}"], [f"o{level}"])]
        then = helper.make_graph(inner, f"t{level}", [], [helper.make_tensor_value_info(f"o{level}", 1, [3])])
        other = [helper.make_node("Sub", ["x", "w"], [f"p{level}"])]
        otherwise = helper.make_graph(other, f"e{level}", [], [helper.make_tensor_value_info(f"p{level}", 1, [3])])
        node = helper.make_node(
            "If", ["c"], [f"y{level}"], then_branch=then, else_branch=otherwise, name=f"choice_{level}"
        )
        return [node]

    last = [helper.make_node("ReduceSum", [f"y{depth}"], ["y"], keepdims=0)]
    inputs = [helper.make_tensor_value_info("x", 1, [3]), helper.make_tensor_value_info("c", 9, [])]
    graph = helper.make_graph(
        [*nodes(depth), *last],
        "g",
        inputs,
        [helper.make_tensor_value_info("y", 1, [])],
        [helper.make_tensor("w", 1, [3], [1, 2, 3])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_nested_branches_have_the_right_gradient() -> None:
    x = np.array([0.1, -0.2, 0.3], np.float32)
    found = run(onnxtrain.gradient(nested(12, "Tanh"), "y", ["x"]), x=x, c=np.array(True))
    value, slope = x * [1, 2, 3], np.array([1.0, 2, 3])
    for _ in range(12):
        value = np.tanh(value)
        slope = slope * (1 - value**2)
    np.testing.assert_allclose(found["x_grad"], slope, rtol=1e-5)
    found = run(onnxtrain.gradient(nested(12, "Tanh"), "y", ["x"]), x=x, c=np.array(False))
    np.testing.assert_array_equal(found["x_grad"], 1)


def count(graph: onnx.GraphProto) -> int:
    return sum(
        1 + sum(count(attribute.g) for attribute in node.attribute if attribute.HasField("g")) for node in graph.node
    )


def test_the_gradient_of_nested_branches_grows_with_their_depth() -> None:
    """No level is recomputed here: each occurs once forward and once backward."""
    nodes, names = {}, {}
    for depth in (8, 16, 24):
        built = onnxtrain.gradient(nested(depth, "Neg"), "y", ["x"])
        nodes[depth], names[depth] = count(built.graph), len(built.SerializeToString())
    assert nodes[24] - nodes[16] == nodes[16] - nodes[8]
    assert names[24] < 2 * names[16] < 4 * names[8] + 4000


def test_what_nested_branches_compute_again_is_bounded() -> None:
    """Each level recomputes the levels inside it: quadratic nodes, and names that do not double in length."""
    sizes = {depth: onnxtrain.gradient(nested(depth, "Tanh"), "y", ["x"]) for depth in (15, 30)}
    assert count(sizes[30].graph) < 4 * count(sizes[15].graph)
    assert sizes[30].ByteSize() < 6 * sizes[15].ByteSize() < 1e6


def test_bodies_that_are_nested_too_deeply_are_one_sentence() -> None:
    with pytest.raises((GradientError, ModelError), match=f"{DEEPEST + 1} levels deep, but protocol buffers read"):
        onnxtrain.gradient(nested(DEEPEST + 1, "Neg"), "y", ["x"])


def test_a_file_that_nests_too_deeply_is_one_sentence(tmp_path) -> None:
    def field(number: int, content: bytes) -> bytes:
        return _varint(number << 3 | 2) + _varint(len(content)) + content

    graph = field(2, b"innermost")
    for _ in range(40):
        attribute = field(1, b"then_branch") + field(6, graph) + _varint(20 << 3) + b"\x05"
        graph = field(1, field(2, b"y") + field(4, b"If") + field(5, attribute)) + field(2, b"g")
    (tmp_path / "deep.onnx").write_bytes(b"\x08\x0a" + field(7, graph) + field(8, b"\x10\x12"))
    with raises_sentence("bodies_too_deep", what=f"'{tmp_path}/deep.onnx'"):
        onnxtrain.gradient(tmp_path / "deep.onnx")


def _varint(number: int) -> bytes:
    encoded = b""
    while number >= 128:
        encoded += bytes([number & 127 | 128])
        number >>= 7
    return encoded + bytes([number])


LOOP = """n = Constant<value_int = 3>()
    s = Loop<body = step (int64 i, bool go, float[3] before) => (bool again, float[3] after)
        { again = Identity(go) after = Mul(before, w) }>(n, , x)"""


def test_a_loop_within_branches_within_branches() -> None:
    inner, result = LOOP, "s"
    for level in range(4):
        inner = (
            f"z{level} = If(c) <then_branch = a{level} () => (float[3] t{level})"
            f" {{ {inner} t{level} = Tanh({result}) }},"
            f" else_branch = b{level} () => (float[3] u{level}) {{ u{level} = Neg(x) }}>"
        )
        result = f"z{level}"
    model = parser.parse_model(
        f"{HEADER} g (float[3] x, bool c) => (float y) <float[3] w = {{1, 2, 3}}>"
        f"{{ {inner} y = ReduceSum<keepdims=0>({result}) }}"
    )
    x = np.array([0.01, -0.02, 0.03], np.float32)
    found = run(onnxtrain.gradient(model, "y", ["x"]), x=x, c=np.array(True))
    value, slope = np.array([1.0, 8, 27]) * x, np.array([1.0, 8, 27])
    for _ in range(4):
        value = np.tanh(value)
        slope = slope * (1 - value**2)
    np.testing.assert_allclose(found["x_grad"], slope, rtol=1e-4)
