"""Linear layers as an operator of this project's domain: nodes of its gradient, and values of its body."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from autodiff.case import gradients_alone, normal
from onnxtrain.autodiff.engine import Backward
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime.native import custom_ops_library
from onnxtrain.runtime.testing import check_gradient, projected_gradient

LEADING, FEW, MANY = (2, 3), 4, 5
DOUBLE = onnx.TensorProto.DOUBLE


def feeds(transposed: int = 0) -> dict[str, np.ndarray]:
    w = normal(FEW, MANY, seed=1)
    return {"x": normal(*LEADING, FEW), "w": w.T if transposed else w, "b": normal(MANY, seed=2)}


def one_node(
    operator: str,
    inputs: dict[str, np.ndarray],
    outputs: dict[str, tuple[int, ...]],
    kind: int = DOUBLE,
    **attributes: int | str,
) -> onnx.ModelProto:
    node = helper.make_node(operator, list(inputs), list(outputs), domain=ONNXTRAIN_DOMAIN, **attributes)
    infos = [helper.make_tensor_value_info(name, kind, array.shape) for name, array in inputs.items()]
    results = [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()]
    graph = helper.make_graph([node], "linear", infos, results)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def layer(transposed: int = 0, *, bias: bool = True, kind: int = DOUBLE) -> onnx.ModelProto:
    inputs = feeds(transposed)
    if not bias:
        del inputs["b"]
    return one_node("Linear", inputs, {"y": (*LEADING, MANY)}, kind, transB=transposed)


def with_relu(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.node[0].attribute.append(helper.make_attribute("activation", "Relu"))
    return model


def gradient(model: onnx.ModelProto, names: list[str], *, kernels: bool = True) -> onnx.ModelProto:
    kind = helper.tensor_dtype_to_np_dtype(model.graph.output[0].type.tensor_type.elem_type)
    return projected_gradient(model, names, {"y": normal(*LEADING, MANY, seed=3).astype(kind)}, kernels=kernels)


def emitted(model: onnx.ModelProto) -> list[tuple[str, int, int]]:
    """Operator, number of outputs and transposition of the gradient's fused nodes."""
    nodes = [
        node for node in model.graph.node if node.domain == ONNXTRAIN_DOMAIN and node.name.startswith("gradient of")
    ]
    assert all(node.input[-1] and node.output[-1] for node in nodes)  # what is absent is left out
    fused = [node for node in nodes if node.op_type != "ReduceSum"]
    return sorted((node.op_type, len(node.output), node.attribute[0].i) for node in fused)


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("x", {"Linear"}),
        ("w", {"weight"}),
        ("b", set()),
        ("xw", {"Linear", "weight"}),
        ("xb", {"Linear"}),
        ("wb", {"weight and bias"}),
        ("xwb", {"Linear", "weight and bias"}),
    ],
)
def test_only_what_is_wanted_is_emitted(names, wanted, transposed):
    nodes = {
        "Linear": ("Linear", 1, 1 - transposed),
        "weight": ("LinearWeightGradient", 1, transposed),
        "weight and bias": ("LinearWeightGradient", 2, transposed),
    }
    found = gradient(layer(transposed), list(names))
    assert emitted(found) == sorted(nodes[name] for name in wanted)
    operators = {node.op_type for node in found.graph.node if node.name.startswith("gradient of")}
    assert ("ReduceSum" in operators) == ("b" in names and "w" not in names)
    assert not {"MatMul", "Gemm", "Transpose"} & operators


def test_without_a_bias():
    assert emitted(gradient(layer(bias=False), ["x", "w"])) == [("Linear", 1, 1), ("LinearWeightGradient", 1, 0)]


@pytest.mark.parametrize("first", ["Relu", "Linear"])
@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("xwb", [("LinearGradient", 3)]),
        ("xw", [("LinearGradient", 2)]),
        ("xb", [("Linear", 1)]),
        ("wb", [("LinearWeightGradient", 2)]),
        ("x", [("Linear", 1)]),
    ],
)
@pytest.mark.parametrize("transposed", [0, 1])
def test_behind_relu_both_products_are_of_one_node(first, names, wanted, transposed):
    """The gradient of Relu, and of the linear layer that it is fused into."""
    inputs = {**feeds(transposed), "z": normal(*LEADING, FEW, seed=5), "v": normal(FEW, FEW, seed=6)}
    model = one_node("Linear", inputs, {"y": (*LEADING, MANY)}, transB=transposed)
    model.graph.node[0].input[:] = ["h", "w", "b"]
    relu = helper.make_node("Relu", ["z"], ["h"])
    if first == "Linear":
        relu = helper.make_node("Linear", ["z", "v"], ["h"], domain=ONNXTRAIN_DOMAIN, activation="Relu")
    model.graph.node.insert(0, relu)
    model.graph.value_info.append(helper.make_tensor_value_info("h", DOUBLE, (*LEADING, FEW)))
    made = gradient(model, [{"x": "z"}.get(name, name) for name in names])
    found = [node for node in made.graph.node if node.domain == ONNXTRAIN_DOMAIN and node.name.startswith("gradient")]
    of_layer = [node for node in found if node.op_type not in ("ReluGradient", "ReduceSum") and "v" not in node.input]
    assert [(node.op_type, len(node.output)) for node in of_layer] == wanted
    # The gradient of Relu is part of it where the pass finds both, and where it does not a node of its own.
    apart = sum(node.op_type == "ReluGradient" for node in found)
    assert apart == ("x" in names and wanted[0][0] == "Linear")


def test_half_precision_and_sessions_without_kernels_get_bodies():
    half = gradient(layer(kind=onnx.TensorProto.FLOAT16), ["x", "w", "b"])
    plain = gradient(layer(), ["x", "w", "b"], kernels=False)
    for found in (half, plain):
        assert ONNXTRAIN_DOMAIN not in {entry.domain for entry in found.opset_import}
        onnx.checker.check_model(found, full_check=True)


@pytest.mark.parametrize("transposed", [0, 1])
def test_second_derivative(transposed):
    """Through the body of the weight's gradient, and by the rule where the gradient of x is differentiated."""
    first = gradient(layer(transposed), ["x", "w", "b"])
    assert emitted(first) == [("Linear", 1, 1 - transposed), ("LinearWeightGradient", 2, transposed)]
    check_gradient(gradients_alone(first), feeds(transposed), wrt=["x", "w"])


def in_standard_operators(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    working = infer_shapes(ir.from_proto(model))
    resolve_fused(working, Backward(), kernels=False)
    written = ir.to_proto(working)
    onnx.checker.check_model(written, full_check=True)
    return ReferenceEvaluator(written).run(None, inputs)


@pytest.mark.parametrize("transposed", [0, 1])
def test_the_bodies(transposed):
    inputs = feeds(transposed)
    x, w, b = inputs.values()
    (y,) = in_standard_operators(layer(transposed), inputs)
    np.testing.assert_allclose(y, np.einsum("abk,nk->abn" if transposed else "abk,kn->abn", x, w) + b, atol=1e-14)
    dy = normal(*LEADING, MANY, seed=4)
    (positive,) = in_standard_operators(with_relu(layer(transposed)), inputs)
    np.testing.assert_array_equal(positive, np.maximum(y, 0))
    gradients = one_node("LinearWeightGradient", {"dy": dy, "x": x}, {"dw": w.shape, "db": b.shape}, transB=transposed)
    dw, db = in_standard_operators(gradients, {"dy": dy, "x": x})
    np.testing.assert_allclose(dw, np.einsum("abn,abk->nk" if transposed else "abn,abk->kn", dy, x), atol=1e-14)
    np.testing.assert_allclose(db, dy.sum((0, 1)), atol=1e-14)
    given = {"dy": dy, "w": w, "x": np.maximum(x, 0)}
    whole = one_node(
        "LinearGradient", given, {"dx": x.shape, "dw": w.shape, "db": b.shape}, transB=transposed, activation="Relu"
    )
    dz, dw, db = in_standard_operators(whole, given)
    dx = np.einsum("abn,nk->abk" if transposed else "abn,kn->abk", dy, w)
    np.testing.assert_allclose(dz, np.where(x > 0, dx, 0), atol=1e-14)
    path = "abn,abk->nk" if transposed else "abn,abk->kn"
    np.testing.assert_allclose(dw, np.einsum(path, dy, np.maximum(x, 0)), atol=1e-14)
    np.testing.assert_allclose(db, dy.sum((0, 1)), atol=1e-14)


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(("inputs", "outputs"), [(70, 8), (8, 70), (130, 1), (37, 16), (37, 17)])
def test_gradients_of_narrow_weights(inputs, outputs, transposed):
    """The kernel swaps the matrices where the second is narrow, as in an adapter."""
    feeds = {"dy": normal(3, 211, outputs), "x": normal(3, 211, inputs, seed=1)}
    shape = (outputs, inputs) if transposed else (inputs, outputs)
    given = one_node("LinearWeightGradient", feeds, {"dw": shape, "db": (outputs,)}, transB=transposed)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(given.SerializeToString(), options)
    dw, db = session.run(None, feeds)
    path = "abn,abk->nk" if transposed else "abn,abk->kn"
    np.testing.assert_allclose(dw, np.einsum(path, feeds["dy"], feeds["x"]), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(db, feeds["dy"].sum((0, 1)), rtol=1e-11, atol=1e-11)
