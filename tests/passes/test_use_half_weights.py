"""Linear layers with 16-bit weights: selection, and unchanged bits."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.build_gradients import Derivative
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rules.linear import use_half_weights
from onnxtrain.runtime.native import custom_ops_library

INPUTS, OUTPUTS, ROWS = 20, 12, 5
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

NODES = {
    "MatMul": "p = MatMul(h, v)",
    "Gemm": "p = Gemm(h, v, b)",
    "transposed": "t = Transpose<perm=[1, 0]>(v) p = Gemm<transB=1>(h, t, b)",
    "MatMul and bias": "q = MatMul(h, v) p = Add(q, b)",
    "result": "p = MatMul(h, v)",
}


def product(nodes, stored="bfloat16", kind="float", seed=0):
    """Return y = tanh(g x w) with a weight w stored in 16 bits and a gain g."""
    to = 1 if kind == "float" else 11
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({kind}[n,{INPUTS}] x) => ({kind}[n,{OUTPUTS}] y) {{
        v = Cast<to={to}>(w) h = Mul(x, gain) {nodes} y = Tanh(p) }}""")
    random = np.random.default_rng(seed)
    array = random.standard_normal((INPUTS, OUTPUTS)).astype(TYPES[stored])
    element = helper.np_dtype_to_tensor_dtype(array.dtype)
    weight = helper.make_tensor("w", element, array.shape, array.tobytes(), raw=True)
    dtype = np.float32 if kind == "float" else np.float64
    others = {"gain": random.standard_normal(INPUTS), "b": random.standard_normal(OUTPUTS)}
    model.graph.initializer.append(weight)
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(dtype), name) for name, a in others.items())
    return model


def lowered(proto, *, gradient=True, kernels=True):
    working = infer_shapes(ir.from_proto(proto))
    derivative = Derivative(working.graph.outputs[0], [working.graph.initializers["gain"]]) if gradient else None
    return lower_graph(working, kernels=kernels, derivative=derivative)


def run(working, **feeds):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), options)
    return session.run(None, feeds)


def linears(working):
    return [node for node in working.graph if node.op_type == "Linear"]


X = np.random.default_rng(1).standard_normal((ROWS, INPUTS)).astype(np.float32)


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_forward_and_gradient_have_the_bits_of_a_converted_weight(nodes, stored):
    working = lowered(product(nodes, stored))
    assert {node.inputs[1].name for node in linears(working)} == {"w"}
    assert len(linears(working)) == 2, "the product and dx"
    assert all(node.op_type not in ("Cast", "MatMul", "Gemm") for node in working.graph)
    found = run(working, x=X)
    for node in linears(working):  # the order that a whole weight in float32 would give
        cast = ir.Node("", "Cast", [node.inputs[1]], [ir.AttrInt64("to", int(ir.DataType.FLOAT))])
        working.graph.insert_before(node, cast)
        node.replace_input_with(1, cast.outputs[0])
    for one, other in zip(found, run(working, x=X), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_products_through_which_no_gradient_flows(nodes):
    working = lowered(product(nodes), gradient=False)
    (node,) = linears(working)
    assert node.inputs[1].name == "w"
    portable = lowered(product(nodes), gradient=False, kernels=False)
    assert not linears(portable)
    np.testing.assert_allclose(run(working, x=X)[0], run(portable, x=X)[0], atol=1e-6)


def test_float64_stays():
    working = lowered(product(NODES["Gemm"], kind="double"))
    assert all(node.inputs[1].dtype == ir.DataType.DOUBLE for node in linears(working))


def test_a_factor_that_is_no_matrix_stays():
    working = infer_shapes(ir.from_proto(product("u = Unsqueeze(v, zero) p = MatMul(h, u)".replace("zero", "axis"))))
    working.graph.register_initializer(
        ir.Value(name="axis", const_value=ir.tensor(np.array([0]), name="axis"), shape=ir.Shape([1]))
    )
    use_half_weights(working)
    assert "MatMul" in {node.op_type for node in working.graph}


def test_a_product_in_the_body_of_an_operator():
    body = parser.parse_graph(f"""body (float[3,{INPUTS}] rows) => (float[3,{OUTPUTS}] out) {{
        v = Cast<to=1>(w) out = MatMul(rows, v) }}""")
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,3,{INPUTS}] x) => (float[n,3,{OUTPUTS}] y) {{ y = Identity(x) }}""")
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Scan", ["x"], ["y"], body=body, num_scan_inputs=1))
    array = np.random.default_rng(2).standard_normal((INPUTS, OUTPUTS)).astype(np.float16)
    model.graph.initializer.append(numpy_helper.from_array(array, "w"))
    working = lowered(model, gradient=False)
    (inner,) = working.graph.subgraphs()
    assert [node.op_type for node in inner] == ["Linear"]
    x = np.stack([X[:3], X[2:]])
    np.testing.assert_allclose(run(working, x=x)[0], x @ array.astype(np.float32), atol=1e-4)
