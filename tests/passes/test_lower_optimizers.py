"""Optimizer nodes inside models: inference of types, replacement, functions and subgraphs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from operator_cases import ATTRIBUTES, CASES, IDS, problem
from operator_graphs import lowered, model_of, run

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.optimizer_bodies import lower_optimizers
from onnxtrain.operators import OPTIMIZERS, infer_optimizer_types

R, T = np.asarray(0.1, np.float32), np.asarray(1)


def graph_inputs(made) -> list[np.ndarray]:
    return [R, T, *made.tensors]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_outputs_have_the_types_and_shapes_of_their_inputs(name, attributes, shapes):
    made = problem(name, attributes, [((2, 3), np.float32), ((4,), np.float64)])
    made.tensors[2] = made.tensors[2][:1]  # a broadcast gradient does not determine the output's shape
    count = len(made.old)
    model = ir.from_proto(model_of(name, graph_inputs(made), attributes, outputs=count, shapes=shapes))
    node = model.graph[0]
    assert infer_optimizer_types(node) is True
    assert infer_optimizer_types(node) is False
    sources = [*node.inputs[2:4], *node.inputs[6:]]
    for source, output in zip(sources, node.outputs, strict=True):
        assert source is not None
        assert output.dtype == source.dtype
        assert output.shape == source.shape


def test_other_nodes_are_left_alone():
    node = ir.Node("", "Adam", [ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))], num_outputs=1)
    assert infer_optimizer_types(node) is False
    assert node.outputs[0].type is None


def test_inference_of_a_model_continues_behind_ssgd():
    """Infer a node that reads the output of SSGD, which ONNX does not know."""
    made = problem("SSGD", {}, [((2, 3), np.float32)])
    proto = model_of("SSGD", graph_inputs(made), {}, outputs=1)
    proto.graph.node.insert(0, helper.make_node("Relu", ["i0"], ["x"]))
    proto.graph.node[1].input[2] = "x"
    proto.graph.node.append(helper.make_node("Shape", ["o0"], ["sizes"]))
    proto.graph.node.append(helper.make_node("Transpose", ["o0"], ["turned"]))
    proto.opset_import.append(helper.make_opsetid("", 18))
    model = infer_shapes(ir.from_proto(proto))
    values = {value.name: value for node in model.graph for value in node.outputs}
    assert str(values["o0"].shape) == "[2,3]"
    assert values["sizes"].dtype == ir.DataType.INT64
    assert str(values["turned"].shape) == "[3,2]"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_outputs_with_an_empty_name_are_skipped(name):
    attributes = {**ATTRIBUTES[name][0], **({"alpha": 0.9} if name == "SSGD" else {})}
    made = problem(name, attributes, [((3,), np.float32)] * 2)
    inputs = graph_inputs(made)
    wanted = made.run(R, T)
    for kept in range(len(wanted)):
        skip = [k for k in range(len(wanted)) if k != kept]
        body = lowered(model_of(name, inputs, attributes, outputs=len(wanted), skip=skip))
        assert [value.name for value in body.graph.output] == [f"o{kept}"]
        np.testing.assert_allclose(run(body, inputs)[0], wanted[kept], rtol=1e-6)


def test_names_of_inputs_and_outputs_stay_and_the_training_domain_goes():
    made = problem("Adam", {}, [((3,), np.float32)])
    model = model_of("Adam", graph_inputs(made), {}, outputs=3)
    body = lowered(model)
    assert [v.name for v in body.graph.input] == [v.name for v in model.graph.input]
    assert [v.name for v in body.graph.output] == ["o0", "o1", "o2"]


def test_two_optimizers_in_one_graph():
    """Let the second start from the results of the first: two steps in one model."""
    made = problem("Momentum", ATTRIBUTES["Momentum"][0], [((3,), np.float32)])
    proto = model_of("Momentum", graph_inputs(made), made.attributes, outputs=2)
    second = onnx.NodeProto()
    second.CopyFrom(proto.graph.node[0])
    second.input[2], second.input[4] = "o0", "o1"
    second.output[0], second.output[1] = "p0", "p1"
    proto.graph.node.append(second)
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in ("p0", "p1"))
    got = run(lowered(proto), graph_inputs(made))
    x1, v1 = made.run(R, T)
    np.testing.assert_array_equal(got[0], x1)
    made.tensors[0], made.tensors[2] = x1, v1
    x2, v2 = made.run(R, T)
    np.testing.assert_array_equal(got[2], x2)
    np.testing.assert_array_equal(got[3], v2)


def in_a_branch(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Run the optimizer where ``condition`` holds; else return X."""
    update = helper.make_graph([proto.graph.node[0]], "then", [], [helper.make_empty_tensor_value_info("o0")])
    keep = helper.make_graph(
        [helper.make_node("Identity", ["i0"], ["same"])], "else", [], [helper.make_empty_tensor_value_info("same")]
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["condition"], ["result"], then_branch=update, else_branch=keep)],
        "branches",
        [*proto.graph.input, helper.make_tensor_value_info("condition", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, [3])],
    )
    imports = [*proto.opset_import, helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize("condition", [True, False])
def test_optimizers_in_subgraphs(condition):
    made = problem("Adagrad", {}, [((3,), np.float32)])
    proto = in_a_branch(model_of("Adagrad", graph_inputs(made), {}, outputs=2))
    got = run(lowered(proto), [*graph_inputs(made), np.asarray(condition)])[0]
    np.testing.assert_array_equal(got, made.run(R, T)[0] if condition else made.tensors[0])


def in_a_function(proto: onnx.ModelProto, domain: str, name: str) -> onnx.ModelProto:
    node = proto.graph.node[0]
    imports = [*proto.opset_import, helper.make_opsetid("", 18)]
    function = helper.make_function(domain, name, list(node.input), list(node.output), [node], imports)
    call = helper.make_node(name, list(node.input), list(node.output), domain=domain)
    graph = helper.make_graph([call], "calls", proto.graph.input, proto.graph.output)
    return helper.make_model(
        graph,
        functions=[function],
        opset_imports=[*imports, helper.make_opsetid(domain, 1)],
        ir_version=8,
    )


def test_optimizers_in_functions():
    made = problem("Adagrad", {}, [((3,), np.float32)])
    proto = in_a_function(model_of("Adagrad", graph_inputs(made), {}, outputs=2), "mine", "step")
    model = lower_optimizers(ir.from_proto(proto))
    got = run(ir.to_proto(model), graph_inputs(made))
    for new, want in zip(got, made.run(R, T), strict=True):
        np.testing.assert_array_equal(new, want)


def test_a_function_of_the_same_name_has_precedence():
    made = problem("Adagrad", {}, [((3,), np.float32)])
    proto = model_of("Adagrad", graph_inputs(made), {}, outputs=2)
    domain = proto.graph.node[0].domain
    names = list(proto.graph.node[0].input)
    function = helper.make_function(
        domain, "Adagrad", names, ["a", "b"],
        [helper.make_node("Neg", [names[2]], ["a"]), helper.make_node("Neg", [names[4]], ["b"])],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("", 18))
    model = lower_optimizers(ir.from_proto(proto))
    assert [node.op_type for node in model.graph] == ["Adagrad"]
    got = run(ir.to_proto(model), graph_inputs(made))
    np.testing.assert_array_equal(got[0], -made.tensors[0])


def test_a_model_without_optimizers_is_left_as_it_is():
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "plain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert ir.to_proto(lower_optimizers(ir.from_proto(proto))).graph == ir.to_proto(ir.from_proto(proto)).graph


@pytest.mark.parametrize(("name", "attributes"), CASES)
def test_valid_input_is_accepted(name, attributes):
    made = problem(name, attributes, [((3,), np.float32)])
    lowered = lower_optimizers(ir.from_proto(model_of(name, graph_inputs(made), attributes, outputs=len(made.old))))
    assert {node.domain for node in lowered.graph} == {""}
