"""Matmuls with low-bit weights: selection for the native kernel, and results."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.rules.kernels import use_kernels
from onnxtrain.runtime.native import custom_ops_library

ROWS, INPUTS, OUTPUTS, BLOCK = 5, 40, 24, 16
BLOCKS = 3


def model(*, bits=4, zeros="", bias=False, groups=False, level=None, block=BLOCK, dtype=np.float32, behind=True):
    """Return y = x wᵀ by ONNX Runtime's operator."""
    random = np.random.default_rng(bits)
    blocks = -(-INPUTS // block)
    arrays = {
        "w": random.integers(0, 256, (OUTPUTS, blocks, block * bits // 8), np.uint8),
        "s": random.uniform(0.01, 0.1, OUTPUTS * blocks).astype(dtype),
    }
    if zeros == "packed":
        arrays["z"] = random.integers(0, 256, (OUTPUTS * -(-blocks * bits // 8)), np.uint8)
    elif zeros:
        arrays["z"] = random.uniform(0, 2**bits, OUTPUTS * blocks).astype(dtype)
    if groups:
        arrays["g"] = (np.arange(INPUTS) // block).astype(np.int32)
    if bias:
        arrays["b"] = random.standard_normal(OUTPUTS).astype(dtype)
    names = ["x", "w", "s", *(name if name in arrays else "" for name in "zgb")]
    while not names[-1]:
        names.pop()
    attributes = {"K": INPUTS, "N": OUTPUTS, "bits": bits, "block_size": block}
    if level is not None:
        attributes["accuracy_level"] = level
    made = ["product"] if behind else ["y"]
    nodes = [helper.make_node("MatMulNBits", names, made, "fc", domain="com.microsoft", **attributes)]
    if behind:
        nodes.append(helper.make_node("Tanh", ["product"], ["y"]))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [helper.make_tensor_value_info(name, kind, [None, size]) for name, size in (("x", INPUTS), ("y", OUTPUTS))]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def with_kernels(proto):
    working = infer_shapes(ir.from_proto(proto))
    use_kernels(working)
    return ir.to_proto(working)


def domain(proto):
    (found,) = (node.domain for node in proto.graph.node if node.op_type == "MatMulNBits")
    return found


def run(proto, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(custom_ops_library()))
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(["y"], {"x": x})[0]


@pytest.mark.parametrize(
    "settings",
    [
        *({"bits": bits, "zeros": zeros} for bits in (2, 4, 8) for zeros in ("", "packed")),
        {"zeros": "numbers"},
        {"bias": True},
        {"behind": False, "bias": True},
        {"level": 1},
    ],
    ids=str,
)
def test_the_kernel_computes_what_onnx_runtime_does(settings):
    proto = model(**settings)
    made = with_kernels(proto)
    onnx.checker.check_model(made)
    assert domain(made) == "onnxtrain"
    assert [value.name for value in made.graph.output] == ["y"]
    x = np.random.default_rng(0).standard_normal((ROWS, INPUTS)).astype(np.float32)
    np.testing.assert_allclose(run(made, x), run(proto, x), atol=2e-5)


@pytest.mark.parametrize("settings", [{"groups": True}, {"level": 4}, {"dtype": np.float16}], ids=str)
def test_others_stay(settings):
    assert domain(with_kernels(model(**settings))) == "com.microsoft"
