"""Ties, zeros, repeated indices and negative padding: gradients that conventions decide, not limits."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from sentences import raises_sentence


def gradients(node, feeds, wrt, constants=None, opset=18, shapes=None, outputs=("y",)):
    """The gradients of sum(y) on ONNX Runtime."""
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), (shapes or {}).get(name, a.shape))
        for name, a in feeds.items()
    ]
    summed = helper.make_node("ReduceSum", [outputs[0]], ["total"], keepdims=0)
    initializers = [numpy_helper.from_array(a, name) for name, a in (constants or {}).items()]
    total = helper.make_tensor_value_info("total", TensorProto.FLOAT, ())
    graph = helper.make_graph([node, summed], "special", infos, [total], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    built = onnxtrain.gradient(model, "total", wrt)
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([f"{name}_grad" for name in wrt], feeds)


def floats(*numbers):
    return np.array(numbers, dtype=np.float32)


def test_products_with_zeros_give_the_product_of_the_others():
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], reduction="mul")
    x, u = floats(2, 0, 0, 5), floats(3, 0, 4, 0, 7)
    dx, du = gradients(node, {"x": x, "u": u}, ["x", "u"], {"i": np.array([0, 0, 1, 2, 3])})
    # y = [2 3 0, 0 4, 0 0, 5 7]
    np.testing.assert_array_equal(dx, floats(0, 4, 0, 7))
    np.testing.assert_array_equal(du, floats(0, 6, 0, 0, 5))


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("operator", ["ScatterElements", "ScatterND"])
def test_extrema_share_the_gradient_among_equals(operator, reduction):
    sign = 1 if reduction == "max" else -1
    node = helper.make_node(operator, ["x", "i", "u"], ["y"], reduction=reduction)
    indices = np.array([0, 0, 1, 2])
    x, u = sign * floats(2, 1, 3), sign * floats(2, 2, 4, 0)
    constants = {"i": indices if operator == "ScatterElements" else indices[:, None]}
    dx, du = gradients(node, {"x": x, "u": u}, ["x", "u"], constants)
    np.testing.assert_allclose(dx, floats(1 / 3, 0, 1))
    np.testing.assert_allclose(du, floats(1 / 3, 1 / 3, 1, 0))


def test_top_k_gives_ties_to_the_elements_that_were_taken():
    node = helper.make_node("TopK", ["x", "k"], ["y", "places"])
    (dx,) = gradients(node, {"x": floats(1, 3, 3, 3)}, ["x"], {"k": np.array([2])})
    np.testing.assert_array_equal(dx, floats(0, 1, 1, 0))


@pytest.mark.parametrize("rows", [100, 1000])
def test_repeated_rows_of_a_table_lose_nothing_to_threads(rows):
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 3, 20_000)
    table = rng.normal(size=(rows, 16)).astype(np.float32)
    node = helper.make_node("Gather", ["table", "i"], ["y"])
    for _ in range(5):
        (found,) = gradients(node, {"table": table, "i": indices}, ["table"])
        np.testing.assert_array_equal(found[:, 0], np.bincount(indices, minlength=rows))


@pytest.mark.parametrize("constant", [True, False])
def test_negative_padding_gives_zeros_where_it_cuts(constant):
    node = helper.make_node("Pad", ["x", "pads", "value"], ["y"])
    pads = {"pads": np.array([-1, 2, 1, -2])}
    feeds = {"x": np.ones((3, 4), np.float32), "value": np.array(0.5, np.float32)}
    given = feeds if constant else feeds | pads
    dx, dvalue = gradients(node, given, ["x", "value"], pads if constant else None)
    np.testing.assert_array_equal(dx, [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    assert dvalue == 8


@pytest.mark.parametrize("shape", [(3, 4), ("rows", "columns")])
def test_fewer_indices_than_elements_along_other_axes(shape):
    node = helper.make_node("GatherElements", ["x", "i"], ["y"], axis=1)
    feeds = {"x": np.ones((3, 4), np.float32), "i": np.array([[3, 3, 0], [1, -1, 1]])}
    (dx,) = gradients(node, feeds, ["x"], shapes={"x": shape})
    np.testing.assert_array_equal(dx, [[1, 0, 0, 2], [0, 2, 0, 1], [0, 0, 0, 0]])


def test_depth_of_one_hot_as_a_vector():
    node = helper.make_node("OneHot", ["i", "depth", "values"], ["y"], axis=0)
    constants = {"i": np.array([0, 5, 1]), "depth": np.array([3])}
    (dvalues,) = gradients(node, {"values": floats(0, 1)}, ["values"], constants)
    np.testing.assert_array_equal(dvalues, floats(7, 2))


def resize(policy, sizes, shape):
    node = helper.make_node(
        "Resize", ["x", "", "", "sizes"], ["y"], keep_aspect_ratio_policy=policy, axes=[2, 3], mode="linear"
    )
    return gradients(node, {"x": np.ones((1, 1, 4, 5), np.float32)}, ["x"], {"sizes": np.array(sizes)}, 19, shape)


def test_resize_that_keeps_the_ratio_needs_sizes():
    with raises_sentence("resize_needs_constant_sizes", what="x", got=(1, 1, "h", 5)):
        resize("not_larger", [8, 11], {"x": (1, 1, "h", 5)})


def test_axis_of_a_transform_has_to_be_known():
    node = helper.make_node("DFT", ["x", "", "axis"], ["y"])
    feeds = {"x": np.ones((2, 4, 1), np.float32), "axis": np.array(1)}
    with raises_sentence("axis_computed", what="axis"):
        gradients(node, feeds, ["x"], opset=20)
