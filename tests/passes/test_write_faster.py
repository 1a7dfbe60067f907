"""Operators written as faster ones have the same values and gradients."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnxtrain import custom_ops_library, testing

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 2, "f": 3}
EQUATIONS = [
    "ab,bc->ac",
    "ab,cb->ac",
    "abc,dca->bda",
    "abc,acd->abd",
    "abc,cdb->adc",
    "abcd,aecd->acbe",
    "abc,cd->abcd",
    "ab,ab->",
    "ab,ab->a",
    "a,b->ab",
    "abcd,abcd->abd",
    "abc,bd->cd",
    "abcd,cdef->abef",
    "abc,c->ab",
    "ab,bc",
    "abcd,abe->acde",
    "abc,abd->cd",
    "ab,bc->ca",
    "a,a->",
    "a,a->a",
    "ab,cd->ac",
    "ab,b->b",
]
OTHERS = ["aab,bc->ac", "ab,bc,cd->ad", "...b,bc->...c", "ab->ba"]


def arrays(equation):
    random = np.random.default_rng(0)
    terms = equation.partition("->")[0].replace("...", "a").split(",")
    return [random.normal(size=[SIZES[label] for label in term]).astype(np.float32) for term in terms]


def model(equation, given, sizes):
    """One node; the labels name the axes where sizes are symbols."""
    names = [f"x{index}" for index in range(len(given))]
    terms = equation.partition("->")[0].split(",")
    inputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, list(term) if sizes == "symbols" else x.shape)
        for name, x, term in zip(names, given, terms, strict=True)
    ]
    node = helper.make_node("Einsum", names, ["y"], equation=equation)
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "einsum", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def lowered(equation, given, sizes="numbers"):
    cotangent = np.random.default_rng(1).normal(size=np.einsum(equation, *given).shape).astype(np.float32)
    names = [f"x{index}" for index in range(len(given))]
    return testing.projected_gradient(model(equation, given, sizes), names, {"y": cotangent}, kernels=True), cotangent


def session(proto):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


def has_einsum(graph):
    return any(node.op_type == "Einsum" for node in graph.node)


@pytest.mark.parametrize("sizes", ["numbers", "symbols"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_and_gradients(equation, sizes):
    given = arrays(equation)
    found, cotangent = lowered(equation, given, sizes)
    assert not has_einsum(found.graph)
    y, *gradients = session(found).run(None, {f"x{index}": x for index, x in enumerate(given)})
    np.testing.assert_allclose(y, np.einsum(equation, *given), rtol=1e-4, atol=1e-5)
    for index, (gradient, x) in enumerate(zip(gradients, given, strict=True)):
        direction = np.random.default_rng(2).normal(size=x.shape)
        moved = [other if place != index else direction for place, other in enumerate(given)]  # linear in each operand
        np.testing.assert_allclose(
            np.vdot(gradient, direction), np.vdot(np.einsum(equation, *moved), cotangent), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("equation", OTHERS)
def test_others_stay(equation):
    assert has_einsum(lowered(equation, arrays(equation))[0].graph)


def test_an_axis_that_may_broadcast_stays():
    given = arrays("ab,bc->ac")
    proto = model("ab,bc->ac", given, "symbols")
    proto.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "other"
    assert has_einsum(testing.projected_gradient(proto, ["x0"], {"y": np.ones((2, 4), np.float32)}, kernels=True).graph)


REDUCTIONS = ["ReduceL1", "ReduceLogSum", "ReduceLogSumExp"]


@pytest.mark.parametrize("keeps", [0, 1])
@pytest.mark.parametrize("axes", ["", ", axes"])
@pytest.mark.parametrize("operator", REDUCTIONS)
def test_sums_of_functions(operator, axes, keeps):
    x = np.random.default_rng(0).uniform(0.1, 2, (3, 4, 5)).astype(np.float32)
    x[0, 0] = 60  # exp overflows without the largest
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> f (float[3, 4, 5] x) => (float[] y) <int64[2] axes = {{0, -1}}>
        {{ y = {operator} <keepdims = {keeps}> (x{axes}) }}"""
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    found = testing.projected_gradient(proto, ["x"], {"y": np.ones_like(expected)}, kernels=True)
    assert operator not in {node.op_type for node in found.graph.node}
    y, gradient = session(found).run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    wide, step = x.astype(np.float64), np.zeros_like(x, np.float64)
    step.flat[7] = 1e-4
    sides = [ReferenceEvaluator(proto).run(None, {"x": wide + sign * step})[0].sum() for sign in (1, -1)]
    np.testing.assert_allclose(gradient.flat[7], (sides[0] - sides[1]) / 2e-4, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", ["n, 8, 5, 3", "4, 8, 5, 3", "n, 8"])
def test_groups_are_those_of_the_reference(shape):
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> f (float[{shape}] x) => (float[{shape}] y)
        <float[8] scale = {{1, 2, 3, 4, 5, 6, 7, 8}}, float[8] bias = {{0, 1, 0, 1, 0, 1, 0, 1}}>
        {{ y = GroupNormalization <num_groups = 4> (x, scale, bias) }}"""
    )
    sizes = [4 if size == "n" else int(size) for size in shape.split(", ")]
    x, cotangent = (random.normal(size=sizes).astype(np.float32) for _ in range(2))
    names = ["x", "scale", "bias"]
    ways = [testing.projected_gradient(proto, names, {"y": cotangent}, kernels=kernels) for kernels in (True, False)]
    assert "GroupNormalization" not in {node.op_type for node in ways[0].graph.node}
    for found, expected in zip(*(session(way).run(None, {"x": x}) for way in ways), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_a_sum_of_exponentials_of_the_largest_numbers(dtype):
    most = np.finfo(dtype if dtype == "double" else np.float32).max
    x = np.array([[most, 0.0], [-most, -most], [-np.inf, -np.inf], [np.inf, 1.0]], "d" if dtype == "double" else "f")
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> f ({dtype}[4, 2] x) => ({dtype}[4] y) <int64[1] axes = {{1}}>
        {{ y = ReduceLogSumExp <keepdims = 0> (x, axes) }}"""
    )
    graph = testing.projected_gradient(proto, ["x"], {"y": np.ones(4, x.dtype)}, kernels=True)
    y, gradient = session(graph).run(None, {"x": x})
    np.testing.assert_array_equal(y, [most, -most, -np.inf, np.inf])
    np.testing.assert_array_equal(gradient[:2], [[1, 0], [0.5, 0.5]])


@pytest.mark.parametrize("shape", [(4,), (3, 1), (1, 4), (3, 4), ()])
def test_powers_of_a_row_are_chains(shape):
    """Values and gradients are NumPy's, also where the exponent is 0."""
    random = np.random.default_rng(0)
    x = random.uniform(0.1, 2, (3, 4)).astype(np.float32)
    b = np.asarray(random.uniform(-2, 2, shape), np.float32)
    b.flat[0], cotangent = 0, random.normal(size=x.shape).astype(np.float32)
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, a.shape) for n, a in (("x0", x), ("x1", b))]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, x.shape)
    graph = helper.make_graph([helper.make_node("Pow", ["x0", "x1"], ["y"])], "power", inputs, [output])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    steps = testing.projected_gradient(proto, ["x0", "x1"], {"y": cotangent}, kernels=True)
    assert not any(node.op_type == "Pow" for node in steps.graph.node)
    y, dx, db = session(steps).run(None, {"x0": x, "x1": b})
    np.testing.assert_allclose(y, x**b, rtol=1e-6)
    np.testing.assert_allclose(dx, cotangent * b * x ** (b - 1), rtol=1e-5, atol=1e-6)
    axes = tuple(a for a in range(2) if b.ndim < 2 - a or b.shape[a - 2] == 1)
    total = (cotangent * x**b * np.log(x)).sum(axes).reshape(shape)
    np.testing.assert_allclose(db, total, rtol=1e-5, atol=1e-5)
