"""The gradient checker finds wrong rules; the registry and the engine reject invalid rules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, parser

from onnxtrain.autodiff import Node, no_gradient, register_gradient, registry, unregister_gradient
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder
from onnxtrain.runtime.testing import GradientMismatchError, check_gradient, projected_gradient
from sentences import raises_sentence

X = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])


@pytest.fixture(autouse=True)
def _same_rules_afterwards() -> Iterator[None]:
    list(registry.entries())
    saved = copy.deepcopy(registry._rules._entries)
    yield
    registry._rules._entries.clear()
    registry._rules._entries.update(saved)


def model(body: str, inputs: str = "double[2, 3] x", functions: str = "") -> onnx.ModelProto:
    return parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18, "test" : 1]> '
        f"agraph ({inputs}) => (double[2, 3] y) {{ {body} }} {functions}"
    )


def function(signature: str, body: str) -> str:
    return f'<domain: "test", opset_import: ["" : 18]> {signature} {{ {body} }}'


SQUARE = model("y = test.Square(x)", functions=function("Square (a) => (b)", "b = Mul(a, a)"))
SCALE = "y = test.Scale(x, s)", function("Scale (a, s) => (b)", "b = Mul(a, s)")


def scaled(shape: str) -> onnx.ModelProto:
    return model(SCALE[0], f"double[2, 3] x, double{shape} s", SCALE[1])


def right(node: Node, dy: Any) -> Any:
    return 2 * node.x * dy


def test_right_rule_passes() -> None:
    register_gradient("Square", domain="test")(right)
    result = check_gradient(SQUARE, [X])
    assert result.wrt == ("x",)
    assert 0 <= result.worst <= 1e-6
    assert "Square" in {node.op_type for node in result.model.graph.node}


def test_body_passes_without_a_rule() -> None:
    result = check_gradient(SQUARE, {"x": X})
    assert "Square" not in {node.op_type for node in result.model.graph.node}


WRONG: dict[str, tuple[Callable[[Node, Any], Any], type[Exception], str]] = {
    "sign": (
        lambda node, dy: -2 * node.x * dy,
        GradientMismatchError,
        "gradient of 'x' along a random direction is .* but central differences give .* a relative error of",
    ),
    "factor": (lambda node, dy: node.x * dy, GradientMismatchError, "central differences"),
    "small factor": (lambda node, dy: node.x * dy * 2.0001, GradientMismatchError, "more than 1e-06"),
    "forgotten dy": (lambda node, dy: node.x * 2, GradientMismatchError, "central differences"),
    "constant": (lambda node, dy: dy, GradientMismatchError, "central differences"),
    "none": (lambda node, dy: None, GradientMismatchError, "is 0, but central differences"),
    "sizes": (
        lambda node, dy: node.op.ReduceSum(right(node, dy), node.op.ints(0), keepdims=1),
        GradientMismatchError,
        r"gradient of 'x' is float64 of shape \(1, 3\); the input is float64 of shape \(2, 3\)",
    ),
    "rank": (
        lambda node, dy: node.op.ReduceSum(right(node, dy), node.op.ints(0), keepdims=0),
        GradientError,
        r"gradient rule of test::Square node .* returned shape \(3,\) for the input 'x' of shape \(2, 3\)",
    ),
    "type": (
        lambda node, dy: node.op.cast(right(node, dy), ir.DataType.FLOAT),
        GradientError,
        "returned float for the double input 'x'; a gradient has the type of its value",
    ),
    "not a number": (
        lambda node, dy: right(node, dy) * (node.x - node.x) / (node.x - node.x),
        GradientMismatchError,
        "gradient of 'x' is not finite: .*nan",
    ),
    "infinite": (lambda node, dy: dy / (node.x - node.x), GradientMismatchError, "is not finite: .*inf"),
    "too many": (
        lambda node, dy: (dy, dy, dy),
        GradientError,
        "test::Square node .* returned 3 gradients, but the node has 1 inputs; return one gradient or None",
    ),
    "too few": (lambda node, dy: (), GradientError, "returned 0 gradients, but the node has 1 inputs"),
    "overflow in float32": (
        lambda node, dy: right(node, dy) * 1e30 * 1e30 / 1e30 / 1e30,
        GradientMismatchError,
        "On ONNX Runtime in float32 the gradient of 'x' .* differs by",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rule_is_found(mistake: str) -> None:
    rule, error, message = WRONG[mistake]
    register_gradient("Square", domain="test")(rule)
    with pytest.raises(error, match=message):
        check_gradient(SQUARE, [X])


@pytest.mark.parametrize("shapes", ["dynamic", "unknown"])
@pytest.mark.parametrize("mistake", ["sign", "factor", "sizes", "not a number"])
def test_wrong_rule_is_found_where_sizes_are_hidden(mistake: str, shapes: Any) -> None:
    rule, error, message = WRONG[mistake]
    register_gradient("Square", domain="test")(rule)
    with pytest.raises(error, match=message):
        check_gradient(SQUARE, [X], shapes=shapes)


def scale_rule(node: Node, dy: Any) -> Any:
    return dy * node.input_required(1), dy * node.x


@pytest.mark.parametrize("shape", ["[3]", "[1, 3]", "[2, 1]", ""])
def test_broadcast_is_summed_where_the_rule_says_so(shape: str) -> None:
    register_gradient("Scale", domain="test", broadcasts=True)(scale_rule)
    check_gradient(scaled(shape), [X, np.full([int(n) for n in shape.strip("[]").split(",") if n], 2.0)])


def test_missing_broadcast_of_an_axis_is_found() -> None:
    register_gradient("Scale", domain="test")(scale_rule)
    with pytest.raises(GradientMismatchError, match=r"gradient of 's' is float64 of shape \(2, 3\).* \(1, 3\)"):
        check_gradient(scaled("[1, 3]"), [X, np.full((1, 3), 2.0)])


def test_missing_broadcast_of_the_rank_is_found() -> None:
    register_gradient("Scale", domain="test")(scale_rule)
    with raises_sentence("rule_shape", what="s", got=(2, 3), wanted=(3,)):
        check_gradient(scaled("[3]"), [X, np.full(3, 2.0)])


def test_gradients_in_the_wrong_order_are_found() -> None:
    register_gradient("Scale", domain="test")(lambda node, dy: scale_rule(node, dy)[::-1])
    with pytest.raises(GradientMismatchError, match="central differences"):
        check_gradient(scaled("[2, 3]"), [X, X + 3])


def test_only_what_is_asked_for_is_checked() -> None:
    register_gradient("Scale", domain="test", broadcasts=True)(
        lambda node, dy: (dy * node.input_required(1), dy)  # the second is wrong
    )
    feeds = [X, np.full(3, 2.0)]
    assert check_gradient(scaled("[3]"), feeds, wrt=["x"]).wrt == ("x",)
    with pytest.raises(GradientMismatchError, match="gradient of 's'"):
        check_gradient(scaled("[3]"), feeds)


def test_wrong_replacement_of_a_standard_rule_is_found() -> None:
    node = helper.make_node("Softsign", ["x"], ["y"])
    check_gradient(node, [X])
    unregister_gradient("Softsign")
    register_gradient("Softsign")(lambda node, dy: dy / (node.op.Abs(node.x) + 1))
    with pytest.raises(GradientMismatchError, match="central differences"):
        check_gradient(node, [X])


def test_number_of_arrays_must_fit() -> None:
    with raises_sentence("arrays_for_inputs", what=["x"], got=2, wanted=1):
        check_gradient(SQUARE, [X, X])


def test_overlapping_versions_are_refused() -> None:
    register_gradient("Square", domain="test", since=3, until=7)(right)
    message = "gradient of test::Square is registered for versions 3 to 7 already; the new one says 7 to the newest"
    with pytest.raises(GradientError, match=message):
        register_gradient("Square", domain="test", since=7)(right)
    with pytest.raises(GradientError, match=r"unregister the first"):
        no_gradient("Square", domain="test", reason="none")
    register_gradient("Square", domain="test", since=8)(right)
    register_gradient("Square", domain="test", until=2)(right)


def test_standard_domain_has_two_names() -> None:
    with raises_sentence("rule_registered", operator="ai.onnx::Relu"):
        register_gradient("Relu", domain="ai.onnx")(right)


def test_the_rule_for_a_version_is_found() -> None:
    old = register_gradient("Square", domain="test", until=4)(lambda node, dy: dy)
    new = register_gradient("Square", domain="test", since=5)(right)
    found = [registry.find("Square", "test", version) for version in (1, 4, 5, 9)]
    assert [entry and entry.function for entry in found] == [old, old, new, new]
    unregister_gradient("Square", "test")
    assert registry.find("Square", "test", 5) is None


def _gradient(body: str) -> onnx.ModelProto:
    return projected_gradient(model(body), ["x"], {"y": np.ones((2, 3))})


def test_missing_rules_are_reported_all_at_once() -> None:
    body = "a = test.Foo(x) b = Relu(a) c = test.Bar(b) d = test.Foo(c) y = Mul(d, d)"
    with pytest.raises(GradientError) as raised:
        _gradient(body)
    message = str(raised.value)
    assert message.startswith("No gradient rule for 2 operators between the parameters and the loss: ")
    assert "test::Foo (opset 1): test::Foo node (output 'a'), test::Foo node (output 'd')" in message
    assert "test::Bar (opset 1): test::Bar node (output 'c')" in message
    assert "freeze=" in message
    assert "@onnxtrain.register_gradient" in message


def test_of_many_nodes_without_rule_three_are_named() -> None:
    chain = " ".join(f"v{i + 1} = test.Foo(v{i})" for i in range(5))
    with raises_sentence(
        "no_gradient_rule",
        number="1 operator",
        operators="'v1'), test::Foo node (output 'v2'), test::Foo node (output 'v3'), ...",
    ):
        _gradient(f"v0 = Relu(x) {chain} y = Relu(v5)")


def test_operators_off_the_path_need_no_rule() -> None:
    built = _gradient("a = test.Foo(x) y = Mul(x, x)")
    assert [o.name for o in built.graph.output] == ["y", "x_grad"]


def test_no_gradient_flows_through_what_is_listed() -> None:
    functions = function("Square (a) => (b)", "b = Mul(a, a)")
    no_gradient("Square", domain="test", reason="held constant here")
    subject = model("a = test.Square(x) y = Mul(a, x)", functions=functions)
    built = projected_gradient(subject, ["x"], {"y": np.ones((2, 3))})
    from onnx.reference import ReferenceEvaluator

    y, dx = ReferenceEvaluator(built).run(None, {"x": X})
    np.testing.assert_allclose(y, X**3)
    np.testing.assert_allclose(dx, X**2)


def test_own_rule_takes_the_place_of_a_body() -> None:
    @register_gradient("Quantize", domain="test")
    def straight_through(node: Node, dy: Any) -> Any:
        """y = round(10 x) / 10: dx = dy."""
        return dy

    body = "t = Constant<value = double {10}>() s = Mul(a, t) r = Round(s) b = Div(r, t)"
    subject = model("y = test.Quantize(x)", functions=function("Quantize (a) => (b)", body))
    projection = np.arange(6.0).reshape(2, 3)
    built = projected_gradient(subject, ["x"], {"y": projection})
    from onnx.reference import ReferenceEvaluator

    y, dx = ReferenceEvaluator(built).run(None, {"x": X + 0.01})
    np.testing.assert_allclose(y, np.round(10 * (X + 0.01)) / 10)
    np.testing.assert_array_equal(dx, projection)


def test_own_rule_for_several_outputs_gets_their_gradients() -> None:
    seen = []

    @register_gradient("Both", domain="test")
    def both(node: Node, *dys: Any) -> Any:
        seen.append([None if dy is None else dy.dtype.name for dy in dys])
        return 2 * node.x * dys[0] + 3 * dys[1]

    functions = function(
        "Both (a) => (b, c, d)", "b = Mul(a, a) t = Constant<value = double {3}>() c = Mul(a, t) d = Shape(a)"
    )
    check_gradient(model("p, q, r = test.Both(x) y = Mul(p, q)", functions=functions), [X])
    assert seen
    assert all(types == ["DOUBLE", "DOUBLE", None] for types in seen)


def test_gradients_are_of_floating_tensors() -> None:
    node = helper.make_node("Gather", ["x", "i"], ["y"])
    with raises_sentence("gradient_of_integers", what="i", got="int64"):
        check_gradient(node, [X, np.array([0])], wrt=["i"])


def test_rule_that_needs_an_unknown_rank_says_so() -> None:
    register_gradient("Square", domain="test")(lambda node, dy: right(node, dy) * node.rank())
    with raises_sentence("gradient_needs_rank", what="x"):
        check_gradient(SQUARE, [X], shapes="unknown")


def test_rule_that_needs_an_absent_input_says_so() -> None:
    register_gradient("Square", domain="test")(lambda node, dy: dy * node.input_required(1))
    with raises_sentence("node_lacks_input", what="test::Square node (output 'y')", wanted=1):
        check_gradient(SQUARE, [X])


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (["y"], ["y", "", "y/LayerNormalization_2"]),
        (["y", "mean"], ["y", "mean", "y/LayerNormalization_2"]),
        (["y", "", ""], ["y", "", "y/LayerNormalization_2"]),
        (["y", "mean", "deviation"], ["y", "mean", "deviation"]),
    ],
)
def test_rule_may_ask_for_another_output(outputs: list[str], expected: list[str]) -> None:
    x, scale = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("x", "scale"))
    values = [ir.Value(name=name) for name in outputs]
    graph = ir.Graph([x, scale], [], nodes=[ir.Node("", "LayerNormalization", [x, scale], outputs=values)])
    node = Node(graph[0], Builder(graph, 18))
    value = node.output_required(2, ir.DataType.FLOAT, ("N", 1))
    assert [output.name for output in graph[0].outputs] == expected
    assert value.name == expected[2]
    assert node.output_required(2, ir.DataType.FLOAT).ir is value.ir is node.outputs[2].ir
    if outputs != expected:
        assert (value.dtype, value.shape) == (ir.DataType.FLOAT, ("N", 1))
