"""Reductions of rows, running sums and products, and writing at indices: kernels with the bits of ONNX Runtime's."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnxtrain import custom_ops_library, testing

REDUCTIONS = ["ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare"]


def model(operator, feeds, attributes, domain=""):
    """One node; the first input has floats, and arrays of integers without a shape in the graph are constants."""
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
        if name not in ("axis", "axes")
    ]
    constants = [onnx.numpy_helper.from_array(feeds[name], name) for name in ("axis", "axes") if name in feeds]
    node = helper.make_node(operator, list(feeds), ["y"], domain=domain, **attributes)
    result = helper.make_tensor_value_info("y", given[0].type.tensor_type.elem_type, None)
    graph = helper.make_graph([node], "one", given, [result], constants)
    opsets = [helper.make_opsetid("", 26), helper.make_opsetid("onnxtrain", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(proto, feeds, threads=1):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    options.register_custom_ops_library(str(custom_ops_library()))
    made = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    return made.run(None, {value.name: feeds[value.name] for value in made.get_inputs()})


def lowered(operator, feeds, attributes, cotangent=None):
    """The node and its gradient by the first input, with kernels."""
    proto = model(operator, feeds, attributes)
    y = run(proto, feeds)[0] if cotangent is None else cotangent
    return testing.projected_gradient(proto, ["x"], {"y": np.ones_like(y)}, kernels=True)


def domains(graph, operator):
    return {node.domain for node in graph.graph.node if node.op_type == operator}


def same_bits(operator, feeds, attributes):
    (expected,) = run(model(operator, feeds, attributes), feeds)
    for threads in (1, 3):
        (found,) = run(model(operator, feeds, attributes, "onnxtrain"), feeds, threads)
        np.testing.assert_array_equal(found, expected)


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("operator", REDUCTIONS)
def test_reductions_over_the_first_axes_have_the_bits_of_onnx_runtime(operator, dtype):
    for shape, axes, keeps in [((2, 3000), [0], 0), ((700, 33), [-2], 1), ((6, 5, 4), [0, 1], 0)]:
        feeds = {"x": draw(*shape, dtype=dtype), "axes": np.array(axes)}
        same_bits(operator, feeds, {"keepdims": keeps})
    assert domains(lowered(operator, feeds, {}), operator) == {"onnxtrain"}


def test_products_over_the_last_axes():
    for shape, axes in [((7, 5), [1]), ((3, 70), [-1]), ((6, 5, 4), [1, 2])]:
        feeds = {"x": draw(*shape), "axes": np.array(axes)}
        (y,) = run(model("ReduceProd", feeds, {"keepdims": 0}, "onnxtrain"), feeds)
        np.testing.assert_allclose(y, feeds["x"].astype(np.float64).prod(tuple(axes)), rtol=1e-4, atol=1e-30)
        assert domains(lowered("ReduceProd", feeds, {"keepdims": 0}), "ReduceProd") == {"onnxtrain"}


@pytest.mark.parametrize("operator", REDUCTIONS)
def test_other_reductions_stay(operator):
    """Over all axes, as clipping by norm has them; over others; of one column; of other types."""
    cases = [((4, 5), [0, 1]), ((4, 5, 6), [1]), ((4, 5, 6), [0, 2]), ((40, 1), [0])]
    for shape, axes in cases + ([((4, 5), [1])] if operator != "ReduceProd" else []):
        assert domains(lowered(operator, {"x": draw(*shape), "axes": np.array(axes)}, {}), operator) == {""}
    half = {"x": draw(4, 5, dtype=np.float16), "axes": np.array([0])}
    assert domains(lowered(operator, half, {}, np.ones((1, 5), np.float16)), operator) == {""}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("operator", ["CumProd", "CumSum"])
def test_running_sums_and_products_have_the_bits_of_onnx_runtime(operator, dtype):
    for shape, axis in [((50,), 0), ((33, 70), -1), ((3, 18, 20), 1)]:
        for exclusive, reverse in [(0, 0), (1, 1)] if len(shape) > 1 else [(0, 1), (1, 0)]:
            feeds = {"x": draw(*shape, dtype=dtype), "axis": np.array(axis)}
            same_bits(operator, feeds, {"exclusive": exclusive, "reverse": reverse})
    assert domains(lowered(operator, feeds, {"reverse": 1}), operator) == {"onnxtrain"}
    narrow = {"x": draw(4, 5), "axis": np.array(1, np.int32)}
    assert domains(lowered(operator, narrow, {}), operator) == {""}


@pytest.mark.parametrize("reduction", ["none", "add", "mul"])
def test_writing_at_indices_has_the_bits_of_onnx_runtime(reduction):
    random = np.random.default_rng(0)
    for shape, axis in [((9,), 0), ((20, 30), -1), ((4, 5, 6), 0), ((4, 5, 6), 1)]:
        x = draw(*shape)
        if reduction == "none":  # each position once
            indices = np.argsort(random.random(shape), axis=axis)
        else:
            indices = random.integers(-shape[axis], shape[axis], [max(1, size - 1) for size in shape])
        feeds = {"x": x, "indices": indices, "updates": draw(*indices.shape)}
        attributes = {"axis": axis, "reduction": reduction}
        if reduction != "mul":
            same_bits("ScatterElements", feeds, attributes)
    first, *_ = (
        n for n in lowered("ScatterElements", feeds, attributes, x).graph.node if n.op_type == "ScatterElements"
    )
    assert first.domain == ("" if reduction == "mul" else "onnxtrain")


PEERS = {
    "ReduceProd": ([0.0, 0.3, 0.7, 1.0], lambda x: x.prod(1)),
    "CumProd": ([0.0, 0.3, 0.7, 1.0], lambda x: x.cumprod(1)),
}


@pytest.mark.torch
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("operator", PEERS)
def test_gradients_of_products_with_zeros(operator, kernels):
    torch = pytest.importorskip("torch")
    shares, peer = PEERS[operator]
    random = np.random.default_rng(0)
    x = random.uniform(0.5, 2, (40, 9))
    x[random.random((40, 9)) < np.repeat(shares, 10)[:, None] / 3] = 0  # rows without zeros, and with ever more
    place = {"ReduceProd": {"axes": np.array([1])}, "CumProd": {"axis": np.array(1)}}[operator]
    attributes = {"keepdims": 0} if operator == "ReduceProd" else {}
    wanted = torch.from_numpy(x).requires_grad_()
    y = peer(wanted)
    cotangent = random.normal(size=y.shape)
    (expected,) = torch.autograd.grad(y, wanted, torch.from_numpy(cotangent))
    feeds = {"x": x, **place}
    graph = testing.projected_gradient(model(operator, feeds, attributes), ["x"], {"y": cotangent}, kernels=kernels)
    np.testing.assert_allclose(run(graph, feeds)[-1], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("batch", [0, 1])
def test_the_gradient_of_gather_nd_adds_rows(batch, kernels):
    random = np.random.default_rng(0)
    x = draw(3, 4, 5, 6)
    indices = random.integers(-4, 4, (3, 7, 1)) if batch else random.integers(-3, 3, (7, 2))
    feeds = {"x": x, "indices": indices}
    proto = model("GatherND", feeds, {"batch_dims": batch})
    cotangent = draw(3, 7, 5, 6) if batch else draw(7, 5, 6)
    expected = np.zeros_like(x)
    places = (np.arange(3)[:, None], indices[..., 0]) if batch else tuple(indices.T)
    np.add.at(expected, places, cotangent)
    graph = testing.projected_gradient(proto, ["x"], {"y": cotangent}, kernels=kernels)
    assert not kernels or domains(graph, "GatherGradient") == {"onnxtrain"}
    np.testing.assert_allclose(run(graph, feeds)[-1], expected, rtol=1e-5, atol=1e-6)


REFUSED = [
    ("ReduceSum", {"x": draw(4, 5), "axes": np.array([1])}, {}, r"\(axes\) has 1 axes .* must have the first ones\."),
    ("ReduceProd", {"x": draw(4, 5, 6), "axes": np.array([1])}, {}, "the first ones or the last ones"),
    ("CumSum", {"x": draw(4, 5), "axis": np.array(2)}, {}, "'axis' is 2"),
    ("CumProd", {"x": draw(4, 5), "axis": np.array([0, 1])}, {}, r"\(axis\) has shape \[2\], and must be one number"),
    ("ScatterElements", {"x": draw(4), "indices": np.array([4]), "updates": draw(1)}, {}, "an index is 4"),
    ("ScatterElements", {"x": draw(4), "indices": np.array([-5]), "updates": draw(1)}, {}, "an index is -5"),
    ("ScatterElements", {"x": draw(2, 2), "indices": np.array([0]), "updates": draw(1)}, {}, r"fit into .*\[2, 2\]"),
    ("ScatterElements", {"x": draw(2), "indices": np.array([0]), "updates": draw(2)}, {}, "they must have one shape"),
]


@pytest.mark.parametrize(("operator", "feeds", "attributes", "message"), REFUSED)
def test_what_does_not_fit_is_refused(operator, feeds, attributes, message):
    proto = model(operator, feeds, attributes, "onnxtrain")
    with pytest.raises(Exception, match=message):
        run(proto, feeds)
