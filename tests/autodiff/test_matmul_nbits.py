"""MatMulNBits: its gradients against float64, over bits, zero points and partial blocks, with kernels and without."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import GradientError
from onnxtrain.runtime.native import custom_ops_library, kernels_available
from onnxtrain.runtime.testing import projected_gradient
from sentences import raises_sentence

OUTPUTS = 37


def weight(bits, zeros, inputs, block=16, outputs=OUTPUTS, seed=0):
    """The inputs of a node after x, and the weight that they encode, in float64."""
    rng = np.random.default_rng(seed)
    blocks = -(-inputs // block)
    packed = rng.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8)
    scales = rng.uniform(0.01, 0.2, (outputs, blocks)).astype(np.float32)
    points, given = np.full((outputs, blocks), 2.0 ** (bits - 1)), None
    if zeros == "packed":
        given = rng.integers(0, 256, (outputs, -(-blocks * bits // 8)), np.uint8)
        points = unpacked(given, bits)[:, :blocks].astype(float)
    elif zeros == "numbers":
        given = rng.uniform(0, 2**bits, (outputs, blocks)).astype(np.float32)
        points = given.astype(float)
    integers = unpacked(packed, bits).reshape(outputs, blocks, block)
    w = (integers - points[..., None]) * scales[..., None].astype(float)
    return packed, scales, given, w.reshape(outputs, -1)[:, :inputs]


def unpacked(packed, bits):
    parts = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
    return parts.reshape(len(packed), -1)


def model(inputs, bits, packed, scales, zeros, shape, dtype=np.float32, block=16, **attributes):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = {"w": packed, "scales": scales.astype(dtype)}
    if zeros is not None:
        weights["zeros"] = zeros if zeros.dtype == np.uint8 else zeros.astype(dtype)
    size = {"K": inputs, "N": len(packed), "bits": bits, "block_size": block}
    node = helper.make_node("MatMulNBits", ["x", *weights], ["y"], "product", domain="com.microsoft", **size)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(built, feeds, kernels):
    options = onnxruntime.SessionOptions()
    if kernels:
        options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(built.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.sampled("kernels")
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("inputs", [96, 83, 16, 3])
@pytest.mark.parametrize("zeros", ["none", "packed", "numbers"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_gradient_is_that_of_float64(bits, zeros, inputs, kernels):
    if kernels and not kernels_available():
        pytest.skip("the native kernels are not installed")
    if (bits, zeros) == (8, "numbers"):
        pytest.skip("ONNX Runtime has no such node")
    *parts, w = weight(bits, zeros, inputs)
    rng = np.random.default_rng(1)
    x, dy = (rng.normal(size=(2, 5, size)).astype(np.float32) for size in (inputs, OUTPUTS))
    built = projected_gradient(model(inputs, bits, *parts, (2, 5, inputs)), ["x"], {"y": dy}, kernels=kernels)
    operators = {node.op_type for node in built.graph.node}
    assert ("MatMulNBitsGradient" in operators) == kernels
    found = run(built, {"x": x}, kernels)
    assert distance(found["y"], x @ w.T) < (1e-5 if bits == 8 else 1e-6)
    assert found["x_grad"].shape == x.shape
    assert distance(found["x_grad"], dy.astype(float) @ w) < 1e-6


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 700, 40), (300, 1030, 600), (7, 20, 1), (0, 40, 8)])
def test_parts_of_large_weights(rows, inputs, outputs, block):
    if not kernels_available():
        pytest.skip("the native kernels are not installed")
    *parts, w = weight(4, "packed", inputs, block, outputs)
    rng = np.random.default_rng(1)
    x, dy = (rng.normal(size=(rows, size)).astype(np.float32) for size in (inputs, outputs))
    given = model(inputs, 4, *parts, ("rows", inputs), block=block)
    found = run(projected_gradient(given, ["x"], {"y": dy}, kernels=True), {"x": x}, True)["x_grad"]
    assert found.shape == x.shape
    assert rows == 0 or distance(found, dy.astype(float) @ w) < 1e-6


@pytest.mark.parametrize("kernels", [False, True])
def test_half_precision_is_multiplied_in_single_precision(kernels):
    if kernels and not kernels_available():
        pytest.skip("the native kernels are not installed")
    *parts, _ = weight(4, "packed", 64)
    scales = parts[1].astype(np.float16).astype(np.float32)
    *_, w = weight(4, "packed", 64)
    w = w / np.repeat(parts[1], 16, axis=1) * np.repeat(scales, 16, axis=1)
    rng = np.random.default_rng(1)
    x, dy = (rng.normal(size=(5, size)).astype(np.float16) for size in (64, OUTPUTS))
    given = model(64, 4, *parts, (5, 64), np.float16)
    found = run(projected_gradient(given, ["x"], {"y": dy}, kernels=kernels), {"x": x}, kernels)["x_grad"]
    expected = (dy.astype(float) @ w).astype(np.float16)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)  # one rounding at the end


def test_the_runtime_keeps_no_dequantized_weight():
    """No tensor of the weight's size follows from constants alone: the runtime would fold and keep it."""
    *parts, _ = weight(4, "packed", 64)
    built = projected_gradient(model(64, 4, *parts, (5, 64)), ["x"], {"y": np.ones((5, OUTPUTS), np.float32)})
    constant = {tensor.name for tensor in built.graph.initializer}
    for node in built.graph.node:
        if set(node.input) <= constant and node.op_type != "Reshape":  # of the zero points
            assert "w" not in node.input
            constant |= set(node.output)


def test_groups_by_index_are_refused():
    *parts, _ = weight(4, "none", 64)
    given = model(64, 4, *parts, (5, 64))
    given.graph.initializer.append(numpy_helper.from_array(np.zeros(64, np.int32), "groups"))
    given.graph.node[0].input.extend(["", "groups"])
    sentence = r"com.microsoft::MatMulNBits node 'product' \(output 'y'\) has an input g_idx.*without act_order"
    with pytest.raises(GradientError, match=sentence):
        onnxtrain.gradient(scalar(given), xs=["x"])


def test_groups_by_index_in_front_of_what_is_trained():
    *parts, _ = weight(4, "none", 64)
    given = model(64, 4, *parts, (5, 64))
    given.graph.initializer.append(numpy_helper.from_array(np.zeros(64, np.int32), "groups"))
    given.graph.initializer.append(numpy_helper.from_array(np.ones(OUTPUTS, np.float32), "scale"))
    given.graph.node[0].input.extend(["", "groups"])
    given.graph.node[0].output[0] = "hidden"
    given.graph.node.append(helper.make_node("Mul", ["hidden", "scale"], ["y"]))
    built = onnxtrain.gradient(scalar(given), xs=["scale"])
    found = run(built, {"x": np.ones((5, 64), np.float32)}, False)
    assert found["scale_grad"].shape == (OUTPUTS,)


def test_attributes_that_fit_nothing_are_refused():
    *parts, _ = weight(4, "none", 64)
    given = model(64, 4, *parts, (5, 64))
    given.graph.node[0].attribute[2].i = 3
    given.graph.value_info.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, OUTPUTS]))
    with raises_sentence(
        "nbits_attributes", what="com.microsoft::MatMulNBits node 'product' (output 'y')", attributes="bits = 3"
    ):
        onnxtrain.gradient(scalar(given), xs=["x"])


def scalar(given: onnx.ModelProto) -> onnx.ModelProto:
    """The sum of the output."""
    given.graph.node.append(helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0))
    given.graph.output[0].CopyFrom(helper.make_tensor_value_info("total", TensorProto.FLOAT, []))
    return given
