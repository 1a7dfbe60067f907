"""Linear layers become one node each, with bias and Relu, where a gradient flows and no value inside is needed."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, parser
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from ways import trained_both_ways

import onnxtrain
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rules.attention import fuse_attention
from onnxtrain.lowering.rules.linear import fuse_linear

INPUTS = "float[n, s, 3] x, float[n, 3] r, float[3, 4] w, float[4, 3] v, float[4] b, float[1] one, float[1, 4] wide"
SIZES = {"n": 2, "s": 5}
TRAINING = "ai.onnx.preview.training"

PATTERNS = {
    "product": ("y = MatMul(x, w)", "x w", 0),
    "product of rows": ("y = MatMul(r, w)", "r w", 0),
    "product and bias": ("m = MatMul(x, w) y = Add(m, b)", "x w b", 0),
    "bias first": ("m = MatMul(x, w) y = Add(b, m)", "x w b", 0),
    "transposed": ("t = Transpose<perm=[1,0]>(v) m = MatMul(x, t) y = Add(m, b)", "x v b", 1),
    "transposed by default": ("t = Transpose(v) y = MatMul(x, t)", "x v", 1),
    "transposed and back": ("t = Transpose(w) u = Transpose(t) y = MatMul(x, u)", "x w", 0),
    "Gemm": ("y = Gemm(r, w)", "r w", 0),
    "Gemm with a bias": ("y = Gemm(r, w, b)", "r w b", 0),
    "Gemm, transposed": ("y = Gemm<transB=1>(r, v, b)", "r v b", 1),
    "Gemm, factors of one": ("y = Gemm<alpha=1.0, beta=1.0, transA=0, transB=0>(r, w, b)", "r w b", 0),
    "Gemm without a bias, beta": ("y = Gemm<beta=0.5>(r, w)", "r w", 0),
    "Gemm and a sum": ("m = Gemm(r, w) y = Add(m, b)", "r w b", 0),
    "Gemm, transposed twice": ("t = Transpose(w) y = Gemm<transB=1>(r, t, b)", "r w b", 0),
    "transposition by identity": ("t = Transpose<perm=[0,1]>(w) y = MatMul(x, t)", "x t", 0),
}

APART = {
    "product read": "m = MatMul(x, w) a = Add(m, b) y = Mul(a, m)",
    "added to itself": "m = MatMul(x, w) y = Add(m, m)",
    "one number": "m = MatMul(x, w) y = Add(m, one)",
    "a bias of two axes": "m = MatMul(x, w) y = Add(m, wide)",
    "another sum": "m = MatMul(x, w) c = Mul(m, m) y = Add(c, b)",
}

WITH_RELU = {
    "product": ("m = MatMul(x, w) y = Relu(m)", "x w", 0),
    "product and bias": ("m = MatMul(x, w) k = Add(m, b) y = Relu(k)", "x w b", 0),
    "bias first, transposed": ("t = Transpose(v) m = MatMul(x, t) k = Add(b, m) y = Relu(k)", "x v b", 1),
    "Gemm": ("m = Gemm<transB=1>(r, v, b) y = Relu(m)", "r v b", 1),
}

RELU_APART = {
    "read by others": "m = MatMul(x, w) k = Relu(m) y = Add(k, m)",
    "of a sum": "m = MatMul(x, w) k = Add(m, wide) y = Relu(k)",
    "bias read by others": "m = MatMul(x, w) k = Add(m, b) h = Relu(k) y = Mul(h, k)",
    "twice": "m = MatMul(x, w) k = Relu(m) h = Relu(m) y = Add(k, h)",
}

OTHERS = {
    "factor": "y = Gemm<alpha=0.5>(r, w, b)",
    "factor of the bias": "y = Gemm<beta=0.5>(r, w, b)",
    "rows transposed": "t = Transpose(r) y = Gemm<transA=1>(t, w, b)",
    "a number in Gemm": "y = Gemm(r, w, one)",
    "a matrix in Gemm": "m = Identity(wide) y = Gemm(r, w, m)",
    "a vector": "y = MatMul(x, f)",
    "vector and matrix": "y = MatMul(f, w)",
    "several matrices": "y = MatMul(x, d)",
}


class Linear(OpRun):
    op_domain = "onnxtrain"

    def _run(self, x, w, b=None, transB=0, activation=""):
        y = x @ (w.T if transB else w) + (0 if b is None else b)
        return (np.maximum(y, 0) if activation == "Relu" else y,)


def model(nodes: str, xs: str = "w", more: str = "", kind: str = "float") -> onnx.ModelProto:
    """Return nodes that compute y, its sum, and a gradient of the sum by some xs."""
    given = f"{INPUTS}, float[3] f, float[n, 3, 2] d{more}".replace("float", kind)
    names = xs.split()
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f ({given}) => ({kind} loss) '
        f"{{ {nodes} loss = ReduceSum<keepdims=0>(y) }}"
    )
    node = helper.make_node("Gradient", names, [f"d_{x}" for x in names], domain=TRAINING, xs=names, y="loss")
    proto.opset_import.append(helper.make_opsetid(TRAINING, 1))
    proto.graph.node.append(node)
    element = proto.graph.output[0].type.tensor_type.elem_type
    proto.graph.output.extend(helper.make_tensor_value_info(name, element, None) for name in node.output)
    for index, other in enumerate(proto.graph.node):
        other.name = f"layer/{other.op_type}" if other.op_type != "ReduceSum" else f"sum{index}"
    return proto


def fused(proto: onnx.ModelProto, recompute: tuple[str, ...] = ()) -> ir.Graph:
    working = infer_shapes(ir.from_proto(proto))
    working.metadata_props.update(GradientOptions(recompute=recompute).entries())
    given = [output.name for output in working.graph.outputs]
    fuse_linear(working)
    graph = working.graph
    assert [output.name for output in graph.outputs] == given
    names = [output.name for node in graph for output in node.outputs]
    assert len(set(names)) == len(names)
    seen = {*graph.inputs, *graph.initializers.values()}
    for node in graph:  # sorted
        assert all(value in seen for value in node.inputs if value is not None)
        seen.update(node.outputs)
    assert_same(proto, ir.to_proto(working))
    return graph


def assert_same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Compare the losses of models without their gradients."""
    rng, results = np.random.default_rng(0), []
    feeds = {}
    for value in before.graph.input:
        shape = [size.dim_value or SIZES[size.dim_param] for size in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.normal(size=shape).astype(
            helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        )
    for given in (before, after):
        plain = onnx.ModelProto()
        plain.CopyFrom(given)
        kept = [node for node in plain.graph.node if node.domain != TRAINING]
        del plain.graph.node[:], plain.graph.output[1:]
        plain.graph.node.extend(kept)
        results.append(ReferenceEvaluator(plain, new_ops=[Linear]).run(None, feeds)[0])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-3 if results[0].dtype == np.float16 else 1e-5)


def operators(graph: ir.Graph) -> list[str]:
    return [node.op_type for node in graph if node.domain != TRAINING and node.outputs[0].name != "loss"]


def linear(graph: ir.Graph) -> ir.Node:
    (node,) = (node for node in graph if node.op_type == "Linear")
    assert node.domain == "onnxtrain"
    return node


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize(("nodes", "inputs", "transposed"), PATTERNS.values(), ids=list(PATTERNS))
def test_pattern_becomes_one_node(nodes, inputs, transposed, kind):
    graph = fused(model(nodes, "v w", kind=kind))
    assert [name for name in operators(graph) if name != "Transpose" or "t" not in inputs] == ["Linear"]
    node = linear(graph)
    assert [value.name for value in node.inputs] == inputs.split()
    assert node.attributes["transB"].as_int() == transposed
    assert node.name in ("layer/MatMul", "layer/Gemm")
    assert node.outputs[0].name == "y"
    assert node.outputs[0].dtype == node.inputs[0].dtype
    assert tuple(node.outputs[0].shape) == (*node.inputs[0].shape[:-1], 4)
    assert graph.opset_imports["onnxtrain"] == 1


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize(("nodes", "inputs", "transposed"), WITH_RELU.values(), ids=list(WITH_RELU))
def test_relu_is_part_of_the_node(nodes, inputs, transposed, kind):
    graph = fused(model(nodes, "v w", kind=kind))
    assert operators(graph) == ["Linear"]
    node = linear(graph)
    assert [value.name for value in node.inputs] == inputs.split()
    assert (node.attributes["transB"].as_int(), node.attributes["activation"].as_string()) == (transposed, "Relu")
    assert node.name in ("layer/MatMul", "layer/Gemm")
    assert node.outputs[0].name == "y"


@pytest.mark.parametrize("nodes", RELU_APART.values(), ids=list(RELU_APART))
def test_relu_stays_where_others_read_what_it_gets(nodes):
    graph = fused(model(nodes))
    assert "activation" not in linear(graph).attributes
    assert "Relu" in operators(graph)


@pytest.mark.parametrize("activation", ["LeakyRelu", "Tanh", "ThresholdedRelu"])
def test_other_activations_stay(activation):
    assert operators(fused(model(f"m = MatMul(x, w) y = {activation}(m)"))) == ["Linear", activation]


@pytest.mark.parametrize(("name", "stays"), [("m", True), ("k", True), ("y", False)])
@pytest.mark.parametrize("way", ["output", "y", "zs"])
def test_relu_stays_where_what_it_gets_has_a_name(name, stays, way):
    proto = model("m = MatMul(x, w) k = Add(m, b) y = Relu(k)")
    if way == "output":
        proto.graph.output.append(helper.make_tensor_value_info(name, 1, None))
    else:
        node = proto.graph.node[-1]
        if way == "y":
            del node.attribute[1:]
        node.attribute.append(helper.make_attribute(way, name if way == "y" else [name]))
    graph = fused(proto)
    assert ("Relu" in operators(graph)) == stays
    assert name in {output.name for node in graph for output in node.outputs}


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (("layer/*",), ["Linear"]),
        (("layer/Relu",), ["Linear", "Relu"]),
        (("layer/[MA]*",), ["Linear", "Relu"]),
        (("layer/Add",), ["Linear", "Add", "Relu"]),
    ],
)
def test_relu_that_is_recomputed_apart_stays_apart(patterns, wanted):
    assert operators(fused(model("m = MatMul(x, w) k = Add(m, b) y = Relu(k)"), patterns)) == wanted


def test_relu_in_a_body_stays():
    nodes = (
        "m = MatMul(x, w) y = If(on) <then_branch = a () => (float[n, s, 4] p) { p = Relu(m) }, "
        "else_branch = c () => (float[n, s, 4] q) { q = Neg(w) }>"
    )
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "{TRAINING}": 1]> f ({INPUTS}, bool on) => (float loss, float dw) '
        f'{{ {nodes} loss = ReduceSum<keepdims=0>(y) dw = {TRAINING}.Gradient<xs = ["w"], y = "loss">(w) }}'
    )
    working = infer_shapes(ir.from_proto(proto))
    fuse_linear(working)
    assert operators(working.graph) == ["Linear", "If"]
    assert "activation" not in linear(working.graph).attributes


@pytest.mark.parametrize("nodes", APART.values(), ids=list(APART))
def test_an_addition_that_is_not_a_bias_stays_behind_the_matmul(nodes):
    graph = fused(model(nodes))
    assert len(linear(graph).inputs) == 2
    assert "Add" in operators(graph)


@pytest.mark.parametrize("nodes", OTHERS.values(), ids=list(OTHERS))
def test_others_stay(nodes):
    assert "Linear" not in operators(fused(model(nodes, "r w x f")))


def test_other_types_stay():
    assert "Linear" not in operators(fused(model("y = MatMul(x, w)", kind="float16")))


@pytest.mark.parametrize("shape", ["float", "float[c]"])
def test_what_has_no_known_shape_stays(shape):
    """Keep an x of unknown rank, which may be a vector, and a vector of unknown length, which may be one number."""
    declared = model("m = MatMul(x, w) y = Add(m, q)", more=", float[n] q")
    unknown = next(value for value in declared.graph.input if value.name == ("x" if shape == "float" else "q"))
    unknown.type.tensor_type.shape.Clear()
    if shape == "float":
        unknown.type.tensor_type.ClearField("shape")
    else:
        unknown.type.tensor_type.shape.dim.add().dim_param = "c"
    working = infer_shapes(ir.from_proto(declared))
    fuse_linear(working)
    assert operators(working.graph) == (["MatMul", "Add"] if shape == "float" else ["Linear", "Add"])


@pytest.mark.parametrize(("xs", "fuses"), [("w", True), ("x", True), ("x w b", True), ("b", False), ("v", False)])
def test_only_where_a_gradient_flows(xs, fuses):
    graph = fused(model("m = MatMul(x, w) y = Add(m, b)", xs))
    assert operators(graph) == (["Linear"] if fuses else ["MatMul", "Add"])


def test_layers_behind_one_another():
    graph = fused(model("m = MatMul(x, w) h = Add(m, b) k = MatMul(h, v) t = Transpose(v) y = MatMul(k, t)"))
    assert operators(graph) == ["Linear", "Linear", "Linear"]


def test_transposition_that_others_read_stays():
    graph = fused(model("t = Transpose(v) m = MatMul(x, t) z = ReduceMax<keepdims=0>(t) y = Add(m, z)", "v"))
    assert operators(graph) == ["Transpose", "Linear", "ReduceMax", "Add"]
    assert linear(graph).attributes["transB"].as_int() == 1


@pytest.mark.parametrize("name", ["m", "y"])
def test_outputs_keep_their_names(name):
    proto = model("m = MatMul(x, w) y = Add(m, b)")
    proto.graph.output.append(helper.make_tensor_value_info(name, 1, None))
    assert operators(fused(proto)) == (["Linear"] if name == "y" else ["Linear", "Add"])


@pytest.mark.parametrize("attribute", ["y", "zs"])
@pytest.mark.parametrize(("name", "apart"), [("m", True), ("y", False), ("h", False)])
def test_values_that_a_gradient_names_stay(name, apart, attribute):
    """Keep values that a Gradient node names without reading them, as y or as zs."""
    proto = model("h = Identity(x) t = Transpose(v) m = MatMul(h, t) y = Add(m, b)", "v")
    node = proto.graph.node[-1]
    if attribute == "y":
        del node.attribute[1:]
    node.attribute.append(helper.make_attribute(attribute, name if attribute == "y" else [name]))
    found = fused(proto)
    assert operators(found) == ["Identity", "Linear", *["Add"] * apart]
    assert name in {output.name for node in found for output in node.outputs}


def test_named_transposition_is_the_weight():
    graph = fused(model("t = Transpose(v) y = MatMul(x, t)", "t"))
    assert operators(graph) == ["Transpose", "Linear"]
    assert [value.name for value in linear(graph).inputs] == ["x", "t"]


def test_gradient_at_another_point_knows_the_shapes():
    """Keep shapes of copies of the operator, which ONNX's inference does not know."""
    proto = model("m = MatMul(x, w) a = Add(m, b) y = LayerNormalization(a, b)", more=", float[3, 4] other")
    proto.graph.node[-1].input[0] = "other"
    working = infer_shapes(ir.from_proto(proto))
    fuse_linear(working)
    lower_graph(working, kernels=True)
    assert {"LayerNormalizationGradient", "LinearWeightGradient"} <= set(operators(working.graph))


def test_addition_in_a_body_stays():
    nodes = (
        "m = MatMul(x, w) y = If(on) <then_branch = a () => (float[n, s, 4] p) { p = Add(m, b) }, "
        "else_branch = c () => (float[n, s, 4] q) { q = Identity(m) }>"
    )
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "{TRAINING}": 1]> f ({INPUTS}, bool on) => (float loss, float dw) '
        f'{{ {nodes} loss = ReduceSum<keepdims=0>(y) dw = {TRAINING}.Gradient<xs = ["w"], y = "loss">(w) }}'
    )
    working = infer_shapes(ir.from_proto(proto))
    fuse_linear(working)
    assert operators(working.graph) == ["Linear", "If"]
    assert len(linear(working.graph).inputs) == 2


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        ((), ["Linear"]),
        (("layer/*",), ["Linear"]),
        (("layer/MatMul",), ["Transpose", "Linear", "Add"]),
        (("layer/MatMul", "layer/Add"), ["Transpose", "Linear", "Add"]),
        (("*/[MT]*",), ["Linear", "Add"]),
    ],
)
def test_nodes_that_are_recomputed_apart_stay_apart(patterns, wanted):
    nodes = "t = Transpose(v) m = MatMul(x, t) y = Add(m, b)"
    assert operators(fused(model(nodes, "v"), patterns)) == wanted


def test_products_inside_attention_are_not_taken():
    proto = model(
        "a = Transpose<perm=[0,2,1,3]>(q) j = Transpose<perm=[0,2,3,1]>(k) u = Transpose<perm=[0,2,1,3]>(k) "
        "g = MatMul(a, j) p = Softmax(g) o = MatMul(p, u) h = Transpose<perm=[0,2,1,3]>(o) y = MatMul(h, w)",
        "q k w",
        ", float[n, s, 2, 3] q, float[n, s, 2, 3] k",
    )
    working = infer_shapes(ir.from_proto(proto))
    fuse_attention(working)
    fuse_linear(working)
    assert operators(working.graph) == ["Attention", "Linear"]


WEIGHTS = {"w1": (6, 5), "b1": (6,), "w2": (6, 5), "b2": (5,), "w3": (5, 4)}
NET = (
    '["layer1"] a = Gemm<transB=1>(x, w1, b1) h = Tanh(a) ["layer2"] m = MatMul(h, w2) ["layer2/bias"] k = Add(m, b2) '
    'g = Sin(k) c = Add(g, x) ["layer3"] y = MatMul(c, w3)'
)


def net() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f (float[n, 5] x) => (float[n, 4] y) {{ {NET} }}'
    )
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(rng.normal(0, 0.4, shape).astype(np.float32), name)
        for name, shape in WEIGHTS.items()
    )
    return proto


def lowered(trainer: onnxtrain.Trainer, *, kernels: bool = True) -> list[str]:
    return [node.op_type for node in onnxtrain.lower(trainer.training_model(), kernels=kernels).graph.node]


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.normal(size=(7, 5)).astype(np.float32), rng.normal(size=(7, 4)).astype(np.float32)


@pytest.mark.parametrize("trained", [list(WEIGHTS), ["w1", "b1"], ["b2", "w3"], ["b1"]], ids="-".join)
def test_training_is_the_same(trained):
    (plain_losses, plain), (losses, trainer) = trained_both_ways(net(), trained, *batch())
    found = lowered(trainer)
    assert "LinearWeightGradient" in found or trained == ["b1"]
    assert found.count("Linear") >= 1
    assert not {"Linear", "LinearWeightGradient"} & set(lowered(trainer, kernels=False))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    for name in trained:
        np.testing.assert_allclose(trainer.parameters[name], plain.parameters[name], atol=1e-5)


def test_only_wanted_gradients_are_computed():
    trainer = onnxtrain.Trainer(net(), loss="mean_squared_error", train=list(WEIGHTS))
    found = lowered(trainer)
    assert found.count("Linear") == 3 + 2  # none to the input
    assert found.count("LinearWeightGradient") == 3
    assert not {"MatMul", "Gemm"} & set(found)


@pytest.mark.parametrize(("patterns", "exactly"), [(["layer2*"], True), (["layer*"], True), (["layer2/bias"], False)])
def test_recomputed_layers_train_the_same(patterns, exactly):
    """Compare bit by bit where the patterns do not separate a matmul from its bias."""
    losses = []
    for recompute in ((), patterns):
        trainer = onnxtrain.Trainer(net(), loss="mean_squared_error", recompute=recompute, threads=1)
        losses.append([trainer.train_step(*batch()) for _ in range(4)])
    again = [node.name for node in onnxtrain.lower(trainer.training_model(), kernels=True).graph.node]
    assert any(name.startswith("again/layer2") for name in again)
    np.testing.assert_allclose(losses[1], losses[0], rtol=0 if exactly else 1e-6)
