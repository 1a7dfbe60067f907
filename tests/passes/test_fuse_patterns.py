"""The matcher finds declared patterns, and reports why others do not match."""

import logging

import onnx_ir as ir
import pytest
from onnx import helper, parser

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.patterns import (
    Number,
    OneOf,
    Op,
    Optional,
    Pattern,
    Product,
    Scaled,
    Var,
    find,
)
from onnxtrain.lowering.rules.activations import fuse_activations
from onnxtrain.lowering.rules.attention import fuse_attention

X, Y = Var("x"), Var("y")


def graph(nodes, outputs="float[2] out", gradient=()):
    text = (
        f'<ir_version: 8, opset_import: ["": 18]> g (float[2] a, float[2] b, float s) => ({outputs}) '
        "<float two = {2}, float half = {0.5}, float[1] one = {1}> { " + nodes + " }"
    )
    proto = parser.parse_model(text)
    if gradient:
        domain = "ai.onnx.preview.training"
        proto.opset_import.append(helper.make_opsetid(domain, 1))
        proto.graph.node.append(helper.make_node("Gradient", gradient, ["d"], domain=domain, xs=gradient, y="out"))
    return ir.from_proto(proto).graph


def captured(term, nodes, **more):
    """Return the names of captured values and captured numbers of the only match, or None."""
    found = [match for match in find(graph(nodes, **more), Pattern("test", term, {"Exp"})) if match.y.name == "out"]
    assert len(found) < 2
    if not found:
        return None
    return {name: item.name if isinstance(item, ir.Value) else item for name, item in found[0].captures}


@pytest.mark.parametrize(
    ("term", "nodes", "expected"),
    [
        (Op("Exp", X), "out = Exp(a)", {"x": "a"}),
        (Op("Exp", Op("Sub", X, Y)), "d = Sub(a, b) out = Exp(d)", {"x": "a", "y": "b"}),
        (Op("Exp", Op("Sub", X, X)), "d = Sub(a, b) out = Exp(d)", None),
        (Op("Mul", Op("Exp", X), Y), "e = Exp(a) out = Mul(b, e)", {"x": "a", "y": "b"}),
        (Op("Div", Op("Exp", X), Y), "e = Exp(a) out = Div(b, e)", None),
        (Op("Mul", Op("Exp", X), 2), "e = Exp(a) out = Mul(two, e)", {"x": "a"}),
        (Op("Mul", Op("Exp", X), 3), "e = Exp(a) out = Mul(two, e)", None),
        (Op("Mul", Op("Exp", X), Number(name="n")), "e = Exp(a) out = Mul(e, half)", {"x": "a", "n": 0.5}),
        (OneOf(Op("Log", X), Op("Exp", X)), "out = Exp(a)", {"x": "a"}),
        (Op("Clip", Op("Exp", X), Optional(Y)), "e = Exp(a) out = Clip(e)", {"x": "a"}),
        (Op("Clip", Op("Exp", X), Optional(Y)), "e = Exp(a) out = Clip(e, s)", {"x": "a", "y": "s"}),
        (Op("Clip", Op("Exp", X), Y), "e = Exp(a) out = Clip(e, s, s)", None),
        (Op("Softmax", Op("Exp", X), axis=(None, 0)), "e = Exp(a) out = Softmax(e)", {"x": "a"}),
        (Op("Softmax", Op("Exp", X), axis=(None, 0)), "e = Exp(a) out = Softmax<axis=-1>(e)", None),
        (Product(Op("Exp", X), Y, number=1), "e = Exp(a) m = Mul(e, two) n = Mul(b, half) out = Mul(n, m)", "x y"),
        (Product(Op("Exp", X), Y, number=0.25), "e = Exp(a) m = Div(e, two) n = Mul(half, m) out = Mul(n, b)", "x y"),
        (Product(Op("Exp", X), Y, number=1), "e = Exp(a) m = Mul(e, b) out = Mul(m, two)", None),
        (Scaled(Op("Exp", X), "f"), "e = Exp(a) m = Mul(e, two) out = Div(m, two)", {"f": 2.0, "x": "a"}),
    ],
)
def test_terms(term, nodes, expected):
    found = captured(term, nodes)
    if expected == "x y":
        expected = {"x": "a", "y": "b"}
    assert found == expected


def test_scales_by_values_of_one_element_are_listed_from_the_outside_in():
    nodes = graph("e = Exp(a) m = Mul(one, e) n = Div(m, s) out = Mul(half, n)")
    (match,) = find(nodes, Pattern("test", Scaled(Op("Exp", X), "f"), {"Exp"}), backwards=True)
    number, (divisor, div), constant = match.all("f")
    assert (number, divisor.name, div, constant) == (0.5, "s", "Div", 1.0)


@pytest.mark.parametrize(
    ("nodes", "more", "reason"),
    [
        ("e = Exp(a) out = Log(e)", {"outputs": "float[2] out, float[2] e"}, "'e' is an output of the graph"),
        ("e = Exp(a) out = Log(e) other = Neg(e)", {}, "'e' is read by Neg as well"),
        ("e = Exp(a) out = Log(e)", {"gradient": ["e"]}, "a Gradient node names 'e'"),
        ("e = Exp(a) out = Neg(e)", {}, "it is read by Neg"),
        ("e = Exp(b) f = Neg(e) out = Log(f)", {}, "it is read by Neg"),
    ],
)
def test_the_log_says_why_a_node_is_in_no_match(nodes, more, reason, caplog):
    caplog.set_level(logging.DEBUG, "onnxtrain.lowering")
    pattern = Pattern("logarithm", Op("Log", Op("Exp", X)), {"Exp"})
    assert list(find(graph(nodes, **more), pattern, {"e"} if "gradient" in more else ())) == []
    assert caplog.messages == [f"logarithm: Exp is in no match{';' if 'it is' in reason else ':'} {reason}."]


def test_a_capture_that_the_match_computes_is_refused():
    nodes = graph("e = Exp(a) out = Mul(e, e)")
    assert not list(find(nodes, Pattern("test", Op("Mul", Op("Exp", X), Y), {"Exp"})))


def test_nothing_is_logged_unless_asked_for(caplog):
    assert list(find(graph("e = Exp(a) out = Neg(e)"), Pattern("test", Op("Log", Op("Exp", X)), {"Exp"}))) == []
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("fuse", "nodes", "reason"),
    [
        (
            fuse_activations,
            "h = Mul(x, half) s = Div(x, two) e = Erf(s) n = Add(e, one) y = Mul(h, n)",
            "Gelu: Erf is in no match: the pattern has a product with the constant 0.707107, not 0.5 where the graph "
            "has 's' of Div.",
        ),
        (
            fuse_attention,
            "k = Transpose<perm=[0, 1, 3, 2]>(x) m = MatMul(x, k) p = Softmax<axis=-1>(m) d = Abs(p) y = MatMul(d, x)",
            "attention: Softmax is in no match; it is read by Abs.",
        ),
        (
            fuse_attention,
            "k = Transpose<perm=[0, 1, 3, 2]>(x) m = MatMul(x, k) p = Softmax<axis=-2>(m) y = MatMul(p, x)",
            "attention: Softmax is in no match: the softmax is along axis -2, not along the last of four.",
        ),
    ],
)
def test_a_pass_says_why_it_left_a_node(fuse, nodes, reason, caplog):
    caplog.set_level(logging.DEBUG, "onnxtrain.lowering")
    text = (
        '<ir_version: 8, opset_import: ["": 18]> g (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y) '
        "<float two = {2}, float half = {0.5}, float one = {1}> { " + nodes + " }"
    )
    fuse(infer_shapes(ir.from_proto(parser.parse_model(text))))
    assert caplog.messages == [reason]
