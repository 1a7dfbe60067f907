"""Gradient nodes: names and inputs, run on ONNX Runtime through the backend."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxtrain.errors import GradientError
from onnxtrain.lowering.pipeline import lower_graph

pytestmark = pytest.mark.plugins  # they run the graphs by onnxtrain.backend

X = np.asarray([1.0, -2.0, 3.0], np.float32)
W = np.asarray([0.5, 4.0, -1.0], np.float32)


def model(body: str, inputs: str = "float[3] x, float[3] w", outputs: str = "float[3] dx") -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
    graph ({inputs}) => ({outputs}) {{ {body.replace("Gradient", "ai.onnx.preview.training.Gradient")} }}"""
    return onnx.parser.parse_model(text)


def run(proto: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    from onnxtrain import backend  # here, so that the file is read without interop/, too

    return list(backend.run_model(proto, list(inputs)))


def lowered(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in lower_graph(ir.from_proto(proto)).graph]


def refused(proto: onnx.ModelProto, message: str) -> None:
    with pytest.raises(GradientError, match=message):
        lower_graph(ir.from_proto(proto))


def test_gradient_at_the_named_tensors_reuses_the_forward_values():
    proto = model(
        'e = Exp(x)  y = Mul(e, w)  dx, dw = Gradient <xs = ["x", "w"], y = "y"> (x, w)',
        outputs="float[3] y, float[3] dx, float[3] dw",
    )
    y, dx, dw = run(proto, X, W)
    np.testing.assert_allclose(dx, W * np.exp(X), rtol=1e-6)
    np.testing.assert_allclose(dw, np.exp(X), rtol=1e-6)
    np.testing.assert_array_equal(dx, y)
    assert lowered(proto).count("Exp") == 1


def test_other_values_are_substituted_for_the_named_tensors():
    """Check the derivative of x² w at (x, w) = (w, 1), while y itself is computed at (x, w)."""
    proto = model(
        "s = Mul(x, x) y = Mul(s, w) one = Constant <value = float[3] {1, 1, 1}> () "
        'dx, dw = Gradient <xs = ["x", "w"], y = "y"> (w, one)',
        outputs="float[3] y, float[3] dx, float[3] dw",
    )
    y, dx, dw = run(proto, X, W)
    np.testing.assert_allclose(y, X * X * W)
    np.testing.assert_allclose(dx, 2 * W)
    np.testing.assert_allclose(dw, W * W)


def test_one_name_may_keep_its_tensor():
    proto = model('y = Mul(x, w) p = Neg(y) z = Mul(p, x) dx = Gradient <xs = ["x"], zs = ["w"], y = "z"> (w, w)')
    np.testing.assert_allclose(run(proto, X, W)[0], -2 * W * W)


def test_one_tensor_may_be_given_for_two_names():
    proto = model(
        'a = Mul(x, x) y = Mul(a, w) dx, dw = Gradient <xs = ["x", "w"], y = "y"> (x, x)',
        outputs="float[3] dx, float[3] dw",
    )
    dx, dw = run(proto, X, W)
    np.testing.assert_allclose(dx, 2 * X * X)
    np.testing.assert_allclose(dw, X * X)


def test_substitutes_swap():
    proto = model(
        'a = Mul(x, x) y = Mul(a, w) dx, dw = Gradient <xs = ["x", "w"], y = "y"> (w, x)',
        outputs="float[3] dx, float[3] dw",
    )
    dx, dw = run(proto, X, W)
    np.testing.assert_allclose(dx, 2 * W * X)
    np.testing.assert_allclose(dw, W * W)


def test_a_substitute_may_have_another_shape():
    proto = model(
        'y = Mul(x, w) dx, dw = Gradient <xs = ["x", "w"], y = "y"> (other, w)',
        inputs="float[3] x, float[3] w, float[4, 3] other",
        outputs="float[4, 3] dx, float[3] dw",
    )
    other = np.arange(12, dtype=np.float32).reshape(4, 3)
    dx, dw = run(proto, X, W, other)
    np.testing.assert_allclose(dx, np.broadcast_to(W, (4, 3)))
    np.testing.assert_allclose(dw, other.sum(axis=0))


def test_an_input_that_is_left_out_is_the_named_tensor():
    proto = model('y = Mul(x, w) dx = Gradient <xs = ["x", "w"], y = "y"> (x, w)')
    proto.graph.node[1].input[1] = ""
    np.testing.assert_allclose(run(proto, X, W)[0], W)


def test_an_intermediate_value_in_xs():
    """Check dy/dh, where h = x w: nodes before h do not matter."""
    proto = model('h = Mul(x, w) y = Mul(h, h) dx = Gradient <xs = ["h"], y = "y"> (h)')
    np.testing.assert_allclose(run(proto, X, W)[0], 2 * X * W)


def test_a_substitute_for_an_intermediate_value():
    proto = model('h = Mul(x, w) a = Exp(h) y = Mul(a, h) dx = Gradient <xs = ["h"], y = "y"> (x)')
    np.testing.assert_allclose(run(proto, X, W)[0], np.exp(X) * (1 + X), rtol=1e-6)


def test_second_order():
    """Check y = x³ w: d²y/dx² = 6 x w, and the mixed derivative is 3 x²."""
    proto = model(
        's = Mul(x, x) c = Mul(s, x) y = Mul(c, w) first, skipped = Gradient <xs = ["x", "w"], y = "y"> (x, w) '
        'dxx, dxw = Gradient <xs = ["x", "w"], y = "first"> (x, w)',
        outputs="float[3] first, float[3] dxx, float[3] dxw",
    )
    first, dxx, dxw = run(proto, X, W)
    np.testing.assert_allclose(first, 3 * X**2 * W, rtol=1e-6)
    np.testing.assert_allclose(dxx, 6 * X * W, rtol=1e-6)
    np.testing.assert_allclose(dxw, 3 * X**2, rtol=1e-6)


def test_second_order_at_other_values():
    proto = model(
        's = Mul(x, x) y = Mul(s, x) first = Gradient <xs = ["x"], y = "y"> (x) '
        'dx = Gradient <xs = ["x"], y = "first"> (w)'
    )
    np.testing.assert_allclose(run(proto, X, W)[0], 6 * W, rtol=1e-6)


def test_third_order():
    proto = model(
        'y = Exp(x) a = Gradient <xs = ["x"], y = "y"> (x) b = Gradient <xs = ["x"], y = "a"> (x) '
        'dx = Gradient <xs = ["x"], y = "b"> (x)',
        inputs="float[3] x",
    )
    np.testing.assert_allclose(run(proto, X)[0], np.exp(X), rtol=1e-6)


def test_a_first_gradient_that_is_an_intermediate_value_keeps_its_name():
    """Check that the next Gradient finds dy/dx, which is h itself, under both names."""
    proto = model(
        'h = Mul(w, w) y = Mul(x, h) first = Gradient <xs = ["x"], y = "y"> (x) '
        'dw = Gradient <xs = ["w"], y = "first"> (w) dh = Gradient <xs = ["h"], y = "y"> (h)',
        outputs="float[3] first, float[3] dw, float[3] dh",
    )
    first, dw, dh = run(proto, X, W)
    np.testing.assert_allclose(first, W * W)
    np.testing.assert_allclose(dw, 2 * W)
    np.testing.assert_allclose(dh, X)


@pytest.mark.parametrize("kept", [(0,), (1,), (0, 1), ()])
def test_outputs_with_an_empty_name_are_skipped(kept):
    names = ["dx", "dw"]
    proto = model(
        'y = Mul(x, w) dx, dw = Gradient <xs = ["x", "w"], y = "y"> (x, w)',
        outputs=", ".join(["float[3] y", *(f"float[3] {names[k]}" for k in kept)]),
    )
    for k in {0, 1} - set(kept):
        proto.graph.node[1].output[k] = ""
    outputs = run(proto, X, W)[1:]
    for got, k in zip(outputs, kept, strict=True):
        np.testing.assert_array_equal(got, (W, X)[k])


def test_trailing_outputs_may_be_missing():
    proto = model('y = Mul(x, w) dx = Gradient <xs = ["x", "w"], y = "y"> (x, w)')
    np.testing.assert_array_equal(run(proto, X, W)[0], W)


def test_zs_are_held_fixed():
    proto = model('a = Mul(x, w) y = Mul(a, w) dx = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w)')
    np.testing.assert_allclose(run(proto, X, W)[0], W * W)


def test_an_intermediate_value_in_zs_is_held_fixed():
    proto = model('h = Exp(w) y = Mul(x, h) dx = Gradient <xs = ["x"], zs = ["h"], y = "y"> (x, w)')
    np.testing.assert_allclose(run(proto, X, W)[0], W)  # at h = w


def test_integers_in_zs():
    proto = model(
        'p = Gather(x, i) y = Mul(p, p) dx = Gradient <xs = ["x"], zs = ["i"], y = "y"> (x, i)',
        inputs="float[3] x, int64[2] i",
    )
    np.testing.assert_allclose(run(proto, X, np.asarray([2, 2]))[0], [0, 0, 4 * X[2]])


def test_a_y_that_is_not_scalar_is_seeded_with_ones():
    proto = model(
        'y = MatMul(a, x) dx = Gradient <xs = ["x"], zs = ["a"], y = "y"> (x, a)', "float[2, 3] a, float[3] x"
    )
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(run(proto, a, X)[0], a.sum(axis=0))


def test_an_independent_x_gets_zeros():
    proto = model('y = Exp(x) dx, dw = Gradient <xs = ["x", "w"], y = "y"> (x, w)', outputs="float[3] dx, float[3] dw")
    dx, dw = run(proto, X, W)
    np.testing.assert_allclose(dx, np.exp(X), rtol=1e-6)
    np.testing.assert_array_equal(dw, np.zeros(3, np.float32), strict=True)


def test_y_may_be_in_xs():
    proto = model('y = Mul(x, w) dx = Gradient <xs = ["y"], y = "y"> (y)')
    np.testing.assert_array_equal(run(proto, X, W)[0], np.ones(3, np.float32))


def test_initializers_and_symbolic_shapes():
    proto = model(
        'y = Mul(x, k) dx, dk = Gradient <xs = ["x", "k"], y = "y"> (x, k)',
        "float[n, 3] x",
        "float[n, 3] dx, float[3] dk",
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(W, "k"))
    x = np.ones((5, 3), np.float32)
    dx, dk = run(proto, x)
    np.testing.assert_array_equal(dx, np.broadcast_to(W, (5, 3)))
    np.testing.assert_array_equal(dk, np.full(3, 5, np.float32))


def test_a_branch_that_reads_a_substituted_value():
    """The branches read x without it being an input of If."""
    infos = [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [3])]
    then = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["inner"])], "then", [], infos)
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["inner_too"])], "else", [],
                              [helper.make_tensor_value_info("inner_too", TensorProto.FLOAT, [3])])  # fmt: skip
    proto = model('y = Identity(x) dx = Gradient <xs = ["x"], y = "y"> (w)', "bool c, float[3] x, float[3] w")
    proto.graph.node[0].CopyFrom(helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other))
    np.testing.assert_allclose(run(proto, np.asarray(True), X, W)[0], 2 * W)
    np.testing.assert_allclose(run(proto, np.asarray(False), X, W)[0], -np.ones(3))


# Refused nodes.


@pytest.mark.parametrize("attribute", ["xs", "zs", "y"])
def test_unknown_names(attribute):
    names = {"xs": '["x"]', "zs": '["w"]', "y": '"y"'}
    names[attribute] = names[attribute].replace(names[attribute].strip('[]"'), "nowhere")
    attributes = ", ".join(f"{k} = {v}" for k, v in names.items())
    refused(
        model(f"y = Mul(x, w) dx = Gradient <{attributes}> (x, w)"),
        "Gradient node .* names 'nowhere', but no value of that name is in the graph; .* xs, zs and y name tensors",
    )


@pytest.mark.parametrize("missing", ["xs", "y"])
def test_missing_attributes(missing):
    proto = model('y = Mul(x, w) dx = Gradient <xs = ["x"], y = "y"> (x)')
    node = proto.graph.node[1]
    kept = [a for a in node.attribute if a.name != missing]
    del node.attribute[:]
    node.attribute.extend(kept)
    refused(proto, f"Gradient node .* lacks the attribute '{missing}'")


def test_the_number_of_inputs():
    refused(
        model('y = Mul(x, w) dx = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x)'),
        "has 1 inputs, but xs and zs name 2 tensors; give one each",
    )


def test_the_number_of_outputs():
    refused(
        model('y = Mul(x, w) dx, dw = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w)'),
        "has 2 outputs, but xs names 1 tensors; one gradient each",
    )


@pytest.mark.parametrize("names", ['xs = ["x", "h"]', 'xs = ["x"], zs = ["h"]', 'xs = ["h"], zs = ["x"]'])
def test_an_x_that_another_determines(names):
    refused(
        model(f'h = Exp(x) y = Mul(h, w) dx = Gradient <{names}, y = "y"> (x, h)'),
        "lists 'h' and also 'x', which determines it; list independent tensors",
    )


def test_integers_have_no_gradient():
    refused(
        model('y = Gather(x, i) dx = Gradient <xs = ["i"], y = "y"> (i)', "float[3] x, int64[1] i", "int64[1] dx"),
        "A gradient needs floating tensors, but 'i' is int64",
    )


def test_operators_without_a_rule_are_named():
    proto = model('y = Mul(x, w) dx = Gradient <xs = ["x"], y = "y"> (x)')
    proto.graph.node[0].domain, proto.graph.node[0].op_type = "somewhere", "Mystery"
    proto.opset_import.append(helper.make_opsetid("somewhere", 1))
    proto.graph.value_info.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [3]))
    refused(proto, "No gradient rule for 1 operator .* somewhere::Mystery")


def test_a_node_in_a_subgraph():
    body = helper.make_graph(
        [helper.make_node("Gradient", ["x"], ["g"], "deep", domain="ai.onnx.preview.training", xs=["x"], y="y")],
        "branch", [], [helper.make_tensor_value_info("g", TensorProto.FLOAT, [3])],
    )  # fmt: skip
    proto = model("y = Mul(x, x) dx = Identity(y)", "bool c, float[3] x")
    proto.graph.node[1].CopyFrom(helper.make_node("If", ["c"], ["dx"], then_branch=body, else_branch=body))
    refused(proto, "The Gradient node 'deep' is in a subgraph or a function")
