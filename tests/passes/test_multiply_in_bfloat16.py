"""Linear layers, convolutions and attention in bfloat16: selection, operands and results."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

from onnxtrain.autodiff.options import COMPUTE_KEY, GradientOptions
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.build_gradients import Derivative
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rules.kernels import LEAST
from onnxtrain.runtime.native import custom_ops_library, multiplies_bfloat16
from sentences import raises_sentence

WIDE, NARROW, ROWS = LEAST, LEAST - 1, 5
STORED = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def product(stored="float", *, inputs=WIDE, outputs=WIDE, kind="float"):
    """Return y = -(g x) w with a weight stored in a type and a gain g."""
    w = "w" if stored == kind else "v"
    made = f"v = Cast<to={1 if kind == 'float' else 11}>(w)" if stored != kind else ""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({kind}[n,{inputs}] x) => ({kind}[n,{outputs}] y) {{
        {made} h = Mul(x, gain) p = MatMul(h, {w}) y = Neg(p) }}""")
    random = np.random.default_rng(0)
    array = random.standard_normal((inputs, outputs)).astype(STORED.get(stored, np.float64))
    gain = random.standard_normal(inputs).astype(np.float32 if kind == "float" else np.float64)
    weight = helper.make_tensor(
        "w", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.tobytes(), raw=True
    )
    model.graph.initializer.extend([weight, numpy_helper.from_array(gain, "gain")])
    return model, array.astype(gain.dtype), gain


def few_bits():
    """Return y = -(g x) wᵀ by MatMulNBits."""
    model, _, gain = product()
    del model.graph.node[:], model.graph.initializer[:]
    nodes = [
        helper.make_node("Mul", ["x", "gain"], ["h"]),
        helper.make_node(
            "MatMulNBits", ["h", "w", "s"], ["p"], domain="com.microsoft", K=WIDE, N=WIDE, bits=4, block_size=32
        ),
        helper.make_node("Neg", ["p"], ["y"]),
    ]
    random = np.random.default_rng(1)
    integers = random.integers(0, 256, (WIDE, WIDE // 32, 16), np.uint8)
    scales = random.uniform(0.1, 1, WIDE * WIDE // 32).astype(np.float32)
    arrays = {"w": integers, "s": scales, "gain": gain}
    model.graph.node.extend(nodes)
    model.graph.initializer.extend([numpy_helper.from_array(array, name) for name, array in arrays.items()])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def lowered(proto, of="gain", compute="bfloat16", *, kernels=True):
    """Return the graph for a session, with the gradient of y by the named values."""
    working = infer_shapes(ir.from_proto(proto))
    working.metadata_props.update(GradientOptions(compute=compute).entries())
    xs = [working.graph.initializers[of]] if of else []
    lower_graph(working, kernels=kernels, derivative=Derivative(working.graph.outputs[0], xs) if xs else None)
    return working


def products(working):
    """Return this project's linear layers, convolutions and attention, and the type that each computes in."""
    return sorted(
        (node.op_type, node.attributes["compute"].value if "compute" in node.attributes else "float32")
        for node in working.graph
        if node.domain == "onnxtrain" and node.op_type.startswith(("Linear", "MatMulNBits", "Attention", "Conv"))
    )


def run(working, **feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), options)
    return session.run(None, feeds)


def rounded(array):
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("stored", STORED)
def test_forward_and_gradient_round_their_factors(stored):
    model, w, gain = product(stored)
    working = lowered(model)
    assert products(working) == [("Linear", "bfloat16")] * 2
    x = np.random.default_rng(2).standard_normal((ROWS, WIDE)).astype(np.float32)
    y, dgain = run(working, x=x)
    np.testing.assert_allclose(-y, rounded(x * gain) @ rounded(w), atol=1e-4)
    expected = -(x * (np.ones((ROWS, WIDE)) @ rounded(w).T)).sum(0)
    np.testing.assert_allclose(dgain, expected, rtol=1e-4, atol=1e-3)
    assert np.abs(y + (x * gain).astype(np.float64) @ w).max() > 1e-3  # unrounded results differ


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_weights_of_16_bits_are_read_as_they_are(stored):
    working = lowered(product(stored)[0])
    assert all(node.op_type != "Cast" for node in working.graph)
    read = [node.inputs[1] for node in working.graph if node.op_type == "Linear"]
    assert {value.name for value in read} == {"w"}


def test_gradients_of_weights_round_too():
    working = lowered(product()[0], of="w")
    assert products(working) == [("Linear", "bfloat16"), ("LinearWeightGradient", "bfloat16")]


def test_products_that_no_gradient_flows_through_round_too():
    working = lowered(product()[0], of=None)
    assert products(working) == [("Linear", "bfloat16")]


def test_weights_of_few_bits():
    working = lowered(few_bits())
    assert products(working) == [("MatMulNBits", "bfloat16"), ("MatMulNBitsGradient", "bfloat16")]
    x = np.random.default_rng(2).standard_normal((ROWS, WIDE)).astype(np.float32)
    exact, close = run(lowered(few_bits(), compute="float32"), x=x), run(working, x=x)
    for one, other in zip(exact, close, strict=True):
        assert 0 < np.abs(one - other).max() < 0.02 * np.abs(one).max()


def attention(kind="float"):
    """Return y = -softmax(q (g k)) v per head of 64 tokens."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({kind}[2,64,3,32] q, {kind}[2,64,3,32] k, {kind}[2,64,3,32] v) => ({kind}[2,64,3,32] y) {{
        scaled = Mul(k, gain) a = Transpose<perm=[0,2,1,3]>(q) j = Transpose<perm=[0,2,3,1]>(scaled)
        w = Transpose<perm=[0,2,1,3]>(v) n = MatMul(a, j) p = Softmax<axis=-1>(n) o = MatMul(p, w)
        r = Transpose<perm=[0,2,1,3]>(o) y = Neg(r) }}""")
    gain = np.full(32, 0.2, np.float32 if kind == "float" else np.float64)
    model.graph.initializer.append(numpy_helper.from_array(gain, "gain"))
    return model


def test_attention_and_its_gradient_round():
    working = lowered(attention())
    assert products(working) == [("Attention", "bfloat16"), ("AttentionGradient", "bfloat16")]
    random = np.random.default_rng(3)
    feeds = {name: random.standard_normal((2, 64, 3, 32)).astype(np.float32) for name in "qkv"}
    exact, close = run(lowered(attention(), compute="float32"), **feeds), run(working, **feeds)
    for one, other in zip(exact, close, strict=True):
        difference = np.abs(one - other).max()
        assert difference < 0.02 * np.abs(one).max()
        assert (difference > 1e-5 * np.abs(one).max()) == multiplies_bfloat16()


def test_attention_in_float64_stays():
    assert {compute for _, compute in products(lowered(attention("double")))} == {"float32"}


def convolution(*, inputs=64, outputs=64, size=28, kernel=3, group=1, kind="float", stride=1):
    """Return y = -(w * (g x)), and its weight."""
    pads = ",".join([str(kernel // 2)] * 4)
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({kind}[2,{inputs},{size},{size}] x) => ({kind}[2,{outputs},{-(-size // stride)},{-(-size // stride)}] y) {{
        h = Mul(x, gain) p = Conv<pads=[{pads}], group={group}, strides=[{stride},{stride}]>(h, w) y = Neg(p) }}""")
    random, dtype = np.random.default_rng(4), np.float32 if kind == "float" else np.float64
    w = random.standard_normal((outputs, inputs // group, kernel, kernel)).astype(dtype)
    gain = np.full((1, inputs, 1, 1), 0.2, dtype)
    model.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(gain, "gain")])
    return model


def rounded_convolutions(of, **sizes):
    """Return y, dx and dw as far as they are computed in bfloat16."""
    names = {"Conv": "y", "ConvInputGradient": "dx", "ConvWeightGradient": "dw"}
    found = products(lowered(convolution(**sizes), of=of))
    assert [kind for kind, _ in found] == ["Conv", "ConvInputGradient" if of == "gain" else "ConvWeightGradient"]
    return {names[kind] for kind, compute in found if compute == "bfloat16"}


@pytest.mark.parametrize("of", ["gain", "w"])
def test_convolutions_and_their_gradients_round(of):
    working = lowered(convolution(), of=of)
    x = np.random.default_rng(3).standard_normal((2, 64, 28, 28)).astype(np.float32)
    exact, close = run(lowered(convolution(), of=of, compute="float32"), x=x), run(working, x=x)
    assert rounded_convolutions(of) == {"y", "dx" if of == "gain" else "dw"}
    for one, other in zip(exact, close, strict=True):
        assert 1e-5 * np.abs(one).max() < np.abs(one - other).max() < 0.02 * np.abs(one).max()


@pytest.mark.parametrize(("of", "found"), [("gain", "Conv"), ("w", "ConvWeightGradient")])
def test_transposed_convolutions_and_their_gradients_round(of, found):
    model = convolution(kernel=2)
    node = next(node for node in model.graph.node if node.op_type == "Conv")
    node.op_type = "ConvTranspose"
    del node.attribute[:]
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    working = lowered(model, of=of)
    assert sorted(products(working)) == sorted([("ConvInputGradient", "bfloat16"), (found, "bfloat16")])


@pytest.mark.parametrize(
    ("sizes", "gaining"),
    [
        ({}, {"y", "dx", "dw"}),
        ({"stride": 2}, {"y", "dx", "dw"}),
        ({"group": 2}, set()),
        ({"group": 64}, set()),
        ({"kind": "double"}, set()),
        ({"inputs": 8, "outputs": 24}, {"y"}),  # 72 terms and 24 rows; 8 rows of dx, 24 outputs
        ({"inputs": 6, "outputs": 32}, {"dw"}),  # 54 terms; 6 rows of dx
        ({"inputs": 16, "outputs": 15}, {"dx"}),  # 15 rows of y; 135 terms of dx
        ({"outputs": 32}, {"y", "dx", "dw"}),
        ({"outputs": 31}, {"y", "dx"}),
        ({"outputs": 32, "size": 27}, {"y", "dx"}),
        ({"size": 4}, {"y", "dx", "dw"}),
        ({"size": 7, "kernel": 1}, {"y", "dx", "dw"}),
        ({"size": 6, "kernel": 1}, set()),
        ({"inputs": 63, "kernel": 1}, {"dx", "dw"}),
        ({"outputs": 63, "kernel": 1}, {"y", "dw"}),
    ],
)
def test_convolutions_round_where_they_gain(sizes, gaining):
    assert rounded_convolutions("gain", **sizes) | rounded_convolutions("w", **sizes) == gaining


@pytest.mark.parametrize("sizes", [{"inputs": NARROW}, {"outputs": NARROW}])
@pytest.mark.parametrize("of", ["gain", "w"])
def test_narrow_weights_stay_in_float32(sizes, of):
    assert {compute for _, compute in products(lowered(product(**sizes)[0], of=of))} == {"float32"}


def test_float64_stays():
    assert {compute for _, compute in products(lowered(product("double", kind="double")[0]))} == {"float32"}


@pytest.mark.parametrize("of", ["gain", "w"])
def test_without_the_option_nothing_changes(of):
    working = lowered(product()[0], of=of, compute="float32")
    assert all("compute" not in node.attributes for node in working.graph)
    assert {node.op_type for node in working.graph} & {"MatMul", "Linear"}


def test_the_entry_is_gone_from_what_is_lowered():
    assert COMPUTE_KEY not in lowered(product()[0]).metadata_props


def test_a_portable_graph_is_refused():
    with raises_sentence("bfloat16_needs_kernels"):
        lowered(product()[0], kernels=False)


def test_an_entry_that_says_something_else_is_refused():
    working = infer_shapes(ir.from_proto(product()[0]))
    working.metadata_props[COMPUTE_KEY] = "float8"
    with raises_sentence("compute_in_metadata", entry="onnxtrain.compute", compute="'float8'"):
        lower_graph(working, kernels=True)
