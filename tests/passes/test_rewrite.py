"""The driver of rewrites: what it takes over, names, removes and reports."""

import logging

import onnx_ir as ir
import pytest
from onnx import helper, parser

from onnxtrain.autodiff.engine import Backward
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.patterns import Op, Pattern, Var, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule

PAIR = Pattern("pair", Op("Log", Op("Exp", Var("x"), name="inner")), {"Exp"})


def model(nodes, outputs="float[2] out", names=()):
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[2] a, bool c) => ({outputs}) {{ {nodes} }}'
    proto = parser.parse_model(text)
    for node in proto.graph.node:
        node.name = f"{node.output[0]}_node"
    if names:
        domain = "ai.onnx.preview.training"
        proto.opset_import.append(helper.make_opsetid(domain, 1))
        proto.graph.node.append(helper.make_node("Gradient", ["a"], ["d"], domain=domain, xs=["a"], zs=names, y="out"))
    return infer_shapes(ir.from_proto(proto))


def absolute(op, match):
    return op.Abs(op.wrap(match["x"]))


def shown(graph):
    return [(node.op_type, node.name, node.inputs[0].name, node.outputs[0].name) for node in graph]


def test_a_new_node_takes_over_uses_name_type_and_shape():
    working = model("e = Exp(a) l = Log(e) out = Neg(l)")
    assert Rewrite(Rule(PAIR, absolute))(working)
    assert shown(working.graph) == [("Abs", "l_node", "a", "l"), ("Neg", "out_node", "l", "out")]
    value = working.graph[0].outputs[0]
    assert (value.dtype, value.shape) == (ir.DataType.FLOAT, ir.Shape([2]))


def test_the_name_can_be_that_of_another_node():
    working = model("e = Exp(a) out = Log(e)")
    Rewrite(Rule(PAIR, absolute, namesake="inner"))(working)
    assert shown(working.graph) == [("Abs", "e_node", "a", "out")]


def test_what_only_the_old_nodes_read_goes():
    working = model("s = Sin(a) e = Exp(s) l = Log(e) out = Add(l, a)")
    Rewrite(Rule(PAIR, lambda op, match: op.wrap(working.graph.inputs[0]) * 2.0))(working)
    assert [node.op_type for node in working.graph] == ["Mul", "Add"]


@pytest.mark.parametrize(
    ("nodes", "more"),
    [
        ("e = Exp(a) out = Log(e)", {"outputs": "float[2] out, float[2] e"}),
        ("e = Exp(a) out = Log(e)", {"names": ["e"]}),
        ("e = Exp(a) f = Log(e) out = Mul(e, f)", {}),
    ],
)
def test_values_that_others_need_stay(nodes, more):
    working = model(nodes, **more)
    before = shown(working.graph)
    assert not Rewrite(Rule(PAIR, absolute))(working)
    assert shown(working.graph) == before


def test_a_guard_gives_its_findings_or_a_reason(caplog):
    caplog.set_level(logging.DEBUG, "onnxtrain.lowering")

    def guard(match):
        return "it is the first" if match.y.name == "p" else [match.y.name]

    found = []
    rule = Rule(operators("sine", "Sin"), lambda op, match: found.append(match.found), guard)
    assert Rewrite(rule)(model("p = Sin(a) out = Sin(p)"))
    assert found == [["out"]]
    assert caplog.messages == ["sine: Sin 'p_node' is in no match: it is the first."]


def test_results_for_several_outputs():
    working = model("p, q = Split<axis=0, num_outputs=2>(a) out = Concat<axis=0>(q, p)")
    rule = Rule(operators("split", "Split"), lambda op, match: [None, op.Neg(op.wrap(match.y))])
    Rewrite(rule, sort=True)(working)
    assert [node.op_type for node in working.graph] == ["Split", "Neg", "Concat"]
    assert [value.name for value in working.graph[2].inputs] == ["q", "p"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_bodies_of_operators(everywhere):
    body = "float[2] y) { e = Exp(a) y = Log(e) }"
    working = model(f"out = If(c) <then_branch = t () => ({body}, else_branch = f () => ({body}>")
    assert Rewrite(Rule(PAIR, absolute, everywhere=everywhere))(working) == everywhere
    inner = [[node.op_type for node in graph] for graph in working.graph.subgraphs()]
    assert inner == [["Abs"] if everywhere else ["Exp", "Log"]] * 2


def test_the_backward_pass_has_the_new_nodes():
    working = model("e = Exp(a) l = Log(e) out = Neg(l)")
    exp, log, _ = working.graph
    backward = Backward([exp, log], {exp.outputs[0], log.outputs[0]})
    Rewrite(Rule(PAIR, absolute))(working, backward)
    made = working.graph[0]
    assert backward.nodes[-1] is made
    assert backward.arriving == {made.outputs[0]}
