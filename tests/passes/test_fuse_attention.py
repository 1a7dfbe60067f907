"""Attention as exporters write it becomes one node, unless a value inside is needed."""

from __future__ import annotations

import io

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, parser
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from ways import operators, passed, recomputed, trained_both_ways

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.rules.attention import fuse_attention

INPUTS = "float[b, s, 2, 3] q, float[b, t, 2, 3] k, float[b, t, 2, 4] v, float[b, 1, 1, t] bias, bool[s, t] mask"
SIZES = {"b": 3, "s": 5, "t": 6}
CONSTANTS = (
    "float c = {0.5}, float root = {0.7}, float[1] two = {2}, float zero = {0}, float many = {-1e9}, float inf = {0}, "
    "bool yes = {1}, int64[1] first = {0}, float[1,1,1,1,1] deep = {0.5}, float[2, 1, 1] scales = {0.5, 2}"
)
BEFORE = "a = Transpose<perm=[0,2,1,3]>(q) j = Transpose<perm=[0,2,3,1]>(k) w = Transpose<perm=[0,2,1,3]>(v) "
SOFTMAX = "p = Softmax<axis=-1>(n) "
AFTER = "o = MatMul(p, w) y = Transpose<perm=[0,2,1,3]>(o)"
CLEANED = "p0 = Softmax<axis=3>(n) e = IsNaN(p0) p = Where(e, zero, p0) "

PATTERNS = {
    "nothing but products": ("n = MatMul(a, j) ", SOFTMAX, 1),
    "last axis by its number": ("n = MatMul(a, j) ", "p = Softmax<axis=3>(n) ", 1),
    "scaled by a product": ("m = MatMul(a, j) n = Mul(m, c) ", SOFTMAX, 0.5),
    "scaled from the left": ("m = MatMul(a, j) n = Mul(c, m) ", SOFTMAX, 0.5),
    "scaled by a division": ("m = MatMul(a, j) n = Div(m, two) ", SOFTMAX, 0.5),
    "factors scaled": ("l = Mul(a, root) r = Mul(j, root) n = MatMul(l, r) ", SOFTMAX, 0.49),
    "queries divided": ("l = Div(a, two) n = MatMul(l, j) ", SOFTMAX, 0.5),
    "scaled before and after": ("l = Div(a, two) m = MatMul(l, j) n = Mul(m, c) ", SOFTMAX, 0.25),
    "bias": ("m = MatMul(a, j) n = Add(m, bias) ", SOFTMAX, 1),
    "bias first": ("m = MatMul(a, j) l = Mul(m, c) n = Add(bias, l) ", SOFTMAX, 0.5),
    "two biases": ("m = MatMul(a, j) l = Add(m, bias) n = Add(l, c) ", SOFTMAX, 1),
    "chosen bias": ("g = Where(mask, zero, inf) m = MatMul(a, j) n = Add(m, g) ", CLEANED, 1),
    "masked": ("m = MatMul(a, j) n = Where(mask, m, inf) ", CLEANED, 1),
    "masked the other way": ("g = Not(mask) m = MatMul(a, j) n = Where(g, inf, m) ", CLEANED, 1),
    "masked and bias": ("m = MatMul(a, j) l = Add(m, bias) n = Where(mask, l, inf) ", CLEANED, 1),
    "NaN replaced": ("n = MatMul(a, j) ", CLEANED, 1),
}

OTHERS = {
    "softmax over heads": "n = MatMul(a, j) p = Softmax<axis=1>(n) " + AFTER,
    "dropout between": "n = MatMul(a, j) p0 = Softmax(n) p = Dropout(p0, c, yes) " + AFTER,
    "finite mask": "m = MatMul(a, j) n = Where(mask, m, many) " + SOFTMAX + AFTER,
    "scale per head": "m = MatMul(a, j) n = Mul(m, scales) " + SOFTMAX + AFTER,
    "scaled after the bias": "m = MatMul(a, j) l = Add(m, bias) n = Mul(l, c) " + SOFTMAX + AFTER,
    "a fifth axis": "m = MatMul(a, j) n = Mul(m, deep) " + SOFTMAX + "o = MatMul(p, w) y = ReduceSum(o, first)",
    "NaN replaced by a half": "n = MatMul(a, j) p0 = Softmax(n) e = IsNaN(p0) p = Where(e, c, p0) " + AFTER,
    "probabilities from the right": "n = MatMul(a, j) p = Softmax(n) r = Transpose<perm=[0,1,3,2]>(p) "
    "u = Transpose<perm=[0,1,3,2]>(w) o = MatMul(u, r) y = Transpose<perm=[0,3,1,2]>(o)",
    "probabilities read": "n = MatMul(a, j) p = Softmax(n) o = MatMul(p, w) h = ReduceMax(p) g = Add(o, h) "
    "y = Transpose<perm=[0,2,1,3]>(g)",
    "scores read": "n = MatMul(a, j) p = Softmax(n) o = MatMul(p, w) h = ReduceMax(n) g = Add(o, h) "
    "y = Transpose<perm=[0,2,1,3]>(g)",
    "tested and not replaced": "n = MatMul(a, j) p = Softmax(n) e = IsNaN(p) h = Cast<to=1>(e) u = MatMul(p, w) "
    "g = ReduceMax(h) o = Add(u, g) y = Transpose<perm=[0,2,1,3]>(o)",
}


class Attention(OpRun):
    op_domain = "onnxtrain"

    def _run(self, q, k, v, bias=None, scale=None, zero_empty_rows=None, **others):  # the standard's names
        scores = scale * np.einsum("bshd,bthd->bhst", q, k) + (0 if bias is None else bias)
        with np.errstate(invalid="ignore", divide="ignore"):
            log_sum = np.log(np.exp(scores).sum(axis=-1))
            p = np.exp(scores - log_sum[..., None])
        if zero_empty_rows:
            p = np.where(np.isnan(p), 0, p)
        return np.einsum("bhst,bthe->bshe", p, v).astype(q.dtype), log_sum.astype(q.dtype)


def model(nodes, outputs="float[b, s, 2, 4] y", inputs=INPUTS, *, before=BEFORE, opset=18):
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> f ({inputs}) => ({outputs}) <{CONSTANTS}> {{ {before} {nodes} }}'
    )
    infinite = next(tensor for tensor in proto.graph.initializer if tensor.name == "inf")
    infinite.CopyFrom(onnx.numpy_helper.from_array(np.asarray(-np.inf, np.float32), "inf"))
    return proto


def in_double(proto):
    """Return the same model of type double."""
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return proto


def fused(proto):
    return passed(proto, fuse_attention)


def feeds(proto):
    rng = np.random.default_rng(0)
    found = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [size.dim_value or SIZES[size.dim_param] for size in kind.shape.dim]
        array = rng.normal(size=shape)
        found[value.name] = array.astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if value.name == "mask":
            found["mask"] = array > 0
            found["mask"][1] = False
    return found


def assert_same(before, after, tolerance=1e-6):
    inputs = feeds(before)
    with np.errstate(invalid="ignore"):
        wanted = ReferenceEvaluator(before).run(None, inputs)
    found = ReferenceEvaluator(after, new_ops=[Attention]).run(None, inputs)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("scores", "softmax", "scale"), PATTERNS.values(), ids=list(PATTERNS))
def test_pattern_becomes_one_node(scores, softmax, scale):
    given = model(scores + softmax + AFTER)
    found = fused(given)
    assert set(operators(found)) - {"Where", "Not", "Add"} == {"Attention"}
    node = next(node for node in found.graph.node if node.op_type == "Attention")
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert attributes["scale"] == pytest.approx(scale)
    assert attributes["zero_empty_rows"] == (softmax is CLEANED)
    assert list(node.input[:3]) == ["q", "k", "v"]
    assert node.output[0] == "y"
    assert_same(given, found)


@pytest.mark.parametrize("nodes", OTHERS.values(), ids=list(OTHERS))
def test_others_stay(nodes):
    assert "Attention" not in operators(fused(model(nodes)))


@pytest.mark.parametrize("name", ["n", "p", "m"])
def test_output_inside_stays(name):
    nodes = "m = MatMul(a, j) n = Mul(m, c) " + SOFTMAX + AFTER
    assert "Softmax" in operators(fused(model(nodes, f"float[b, s, 2, 4] y, float[b, 2, s, t] {name}")))


@pytest.mark.parametrize("opset", [11, 13])
def test_default_axis_is_that_of_the_version(opset):
    found = fused(model("n = MatMul(a, j) p = Softmax(n) " + AFTER, opset=opset))
    assert ("Attention" in operators(found)) == (opset == 13)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float[b, t, 2, 3] k", "float[1, t, 2, 3] k"),
        ("float[b, t, 2, 3] k", "float[b, t, 1, 3] k"),
        ("float[b, t, 2, 3] k", "float[other, t, 2, 3] k"),
        ("float[b, t, 2, 4] v", "float[b, t, 1, 4] v"),
        ("float[b, s, 2, 3] q", "float[b, s, 1, 3] q"),
        ("float[b, 1, 1, t] bias", "float[c0, 1, 1, t] bias"),
        ("float[b, 1, 1, t] bias", "float[b, 1, u, t] bias"),
        ("float[b, 1, 1, t] bias", "float[5, b, 1, 1, t] bias"),
    ],
)
def test_what_may_be_broadcast_stays(old, new):
    nodes = "m = MatMul(a, j) n = Add(m, bias) " + SOFTMAX + "o = MatMul(p, w) y = Identity(o)"
    found = fused(model(nodes, outputs="float[w0, x0, y0, z0] y", inputs=INPUTS.replace(old, new)))
    assert "Attention" not in operators(found)


@pytest.mark.parametrize(
    "factors",
    [
        "r = Sqrt(h) m = MatMul(a, j) n = Mul(m, r) ",
        "r = Sqrt(h) m = MatMul(a, j) n = Div(m, r) ",
        "r = Sqrt(h) l = Mul(r, a) u = Div(j, r) m = MatMul(l, u) n = Mul(m, h) ",
    ],
)
def test_computed_scalars_multiply_queries(factors):
    size = "g = Shape<start=3>(q) h = Cast<to=1>(g) "
    given = model(size + factors + SOFTMAX + AFTER)
    found = fused(given)
    assert not {"Transpose", "Softmax", "MatMul"} & set(operators(found))
    assert_same(given, found)


@pytest.mark.parametrize(
    "size",
    [
        "g = Shape(q) e = Slice(g, last, far) h = Cast<to=1>(e) r = Sqrt(h) ",
        "g = Shape(q) e = Gather(g, three) h = Cast<to=1>(e) r = Sqrt(h) ",
    ],
)
def test_the_root_of_a_known_size_is_a_constant_scale(size):
    given = model(size + "l = Mul(a, r) m = MatMul(l, j) n = Div(m, r) " + SOFTMAX + AFTER)
    given.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(value, np.int64), name)
        for name, value in (("last", [-1]), ("far", [2**62]), ("three", 3))
    )
    found = fused(given)
    (attention,) = (node for node in found.graph.node if node.op_type == "Attention")
    assert attention.attribute[0].f == pytest.approx(1)
    assert "Mul" not in operators(found)
    assert_same(given, found)


def test_scale_of_double_is_not_rounded():
    given = in_double(model("m = MatMul(a, j) l = Mul(m, root) n = Mul(l, root) " + SOFTMAX + AFTER))
    found = fused(given)
    assert operators(found) == ["Mul", "Attention"]
    assert_same(given, found, 1e-14)


def test_other_transpositions_are_composed():
    given = model(
        "a1 = Transpose<perm=[1,0,2,3]>(a) a2 = Transpose<perm=[1,0,2,3]>(a1) n = MatMul(a2, j) " + SOFTMAX
        + "o = MatMul(p, w) y = Transpose<perm=[2,0,1,3]>(o)",
        "float[s, b, 2, 4] y",
    )  # fmt: skip
    found = fused(given)
    assert operators(found) == ["Attention", "Transpose"]
    assert_same(given, found)


def test_heads_that_come_first_are_transposed():
    inputs = "float[b, 2, s, 3] a, float[b, 2, 3, t] j, float[b, 2, t, 4] w"
    given = model("n = MatMul(a, j) " + SOFTMAX + "y = MatMul(p, w)", "float[b, 2, s, 4] y", inputs, before="")
    found = fused(given)
    assert operators(found) == ["Transpose"] * 3 + ["Attention", "Transpose"]
    assert_same(given, found)


def test_reshape_to_the_same_shape_is_passed():
    size = "sizes = Shape(o) h = Reshape(o, sizes) y = Transpose<perm=[0,2,1,3]>(h)"
    given = model("n = MatMul(a, j) " + SOFTMAX + "o = MatMul(p, w) " + size)
    found = fused(given)
    assert operators(found) == ["Attention"]
    assert_same(given, found)


def test_split_after_transposition():
    """Split the transposed [t, b * heads, d] as nn.MultiheadAttention does."""
    inputs = "float[7, 6, 3] q, float[7, 6, 3] k, float[7, 6, 4] v"
    nodes = (
        "a0 = Transpose<perm=[1,0,2]>(q) a = Reshape(a0, sizes) j0 = Transpose<perm=[1,2,0]>(k) "
        "j = Reshape(j0, turned) w0 = Transpose<perm=[1,0,2]>(v) w = Reshape(w0, others) n = MatMul(a, j) "
        + SOFTMAX
        + "o = MatMul(p, w) y = Transpose<perm=[2,0,1,3]>(o)"
    )
    given = model(nodes, "float[7, 3, 2, 4] y", inputs, before="")
    for name, sizes in {"sizes": (3, 2, 7, 3), "turned": (3, 2, 3, 7), "others": (3, 2, 7, 4)}.items():
        given.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(sizes), name))
    found = fused(given)
    assert operators(found).count("Transpose") == 4
    assert_same(given, found)


def test_shared_factors_and_results_stay():
    """Keep scaled keys that others read, and the result with heads first where something reads it."""
    given = model(
        "r = Mul(j, c) n = MatMul(a, r) " + SOFTMAX + "o = MatMul(p, w) y = Transpose<perm=[0,2,1,3]>(o) "
        "x = ReduceSum(r) z = Transpose<perm=[0,2,1,3]>(o)",
        "float[b, s, 2, 4] y, float x, float[b, 2, s, 4] o, float[b, s, 2, 4] z",
    )
    found = fused(given)
    assert "Attention" in operators(found)
    assert "Softmax" not in operators(found)
    assert_same(given, found)


def gradient(proto, xs, y="loss"):
    proto.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    outputs = [f"d_{x}" for x in xs]
    node = helper.make_node("Gradient", xs, outputs, domain="ai.onnx.preview.training", xs=xs, y=y)
    proto.graph.node.append(node)
    proto.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in outputs)
    return proto


def after_fusion(proto):
    working = infer_shapes(ir.from_proto(proto))
    fuse_attention(working)
    return working.graph


@pytest.mark.parametrize("name", ["m", "n", "p"])
def test_value_inside_that_a_gradient_names_stays(name):
    nodes = "m = MatMul(a, j) n = Mul(m, c) " + SOFTMAX + AFTER + " loss = ReduceSum(y)"
    graph = after_fusion(gradient(model(nodes, "float loss"), [name]))
    assert "Attention" not in [node.op_type for node in graph]


@pytest.mark.parametrize("name", ["a", "j", "w", "o", "y"])
def test_value_around_that_a_gradient_names_is_still_read(name):
    nodes = "m = MatMul(a, j) n = Mul(m, c) " + SOFTMAX + AFTER + " loss = ReduceSum(y)"
    graph = after_fusion(gradient(model(nodes, "float loss"), [name]))
    values = {output.name: output for node in graph for output in node.outputs}
    assert "Attention" in [node.op_type for node in graph]
    pending, seen = [values["loss"]], set()
    while pending:
        value = pending.pop()
        seen.add(value.name)
        pending += [] if value.producer() is None else [item for item in value.producer().inputs if item is not None]
    assert name in seen


@pytest.mark.parametrize("trained", ["bias", "q"])
def test_trained_bias_is_fused(trained):
    nodes = "m = MatMul(a, j) g = Mul(bias, c) n = Add(m, g) " + SOFTMAX + AFTER + " loss = ReduceSum(y)"
    graph = after_fusion(gradient(model(nodes, "float loss"), [trained]))
    assert "Softmax" not in [node.op_type for node in graph]


WEIGHTS = {"wq": (6, 6), "wk": (6, 6), "wv": (6, 6)}
LAYER = (
    "x0 = MatMul(x, wq) x1 = Reshape(x0, heads) a = Transpose<perm=[0,2,1,3]>(x1) "
    "k0 = MatMul(x, wk) k1 = Reshape(k0, heads) j = Transpose<perm=[0,2,3,1]>(k1) "
    "v0 = MatMul(x, wv) v1 = Reshape(v0, heads) w = Transpose<perm=[0,2,1,3]>(v1) "
    "m = MatMul(a, j) l = Mul(m, c) n = Where(mask, l, inf) p0 = Softmax<axis=-1>(n) e = IsNaN(p0) "
    "p = Where(e, zero, p0) o = MatMul(p, w) o1 = Transpose<perm=[0,2,1,3]>(o) y = Reshape(o1, merged)"
)


def layer():
    rng = np.random.default_rng(1)
    constants = {name: rng.normal(size=shape).astype(np.float32) for name, shape in WEIGHTS.items()}
    constants |= {"heads": np.asarray([0, 0, 2, 3]), "merged": np.asarray([0, 0, 6])}
    constants |= {name: np.float32(value) for name, value in (("c", 0.5), ("inf", -np.inf), ("zero", 0.0))}
    constants["mask"] = np.tri(4, 4, -1, dtype=bool)  # the first row is fully masked
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f (float[n, 4, 6] x) => (float[n, 4, 6] y) {{ {LAYER} }}'
    )
    tensors = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    proto.graph.initializer.extend(tensors)
    return proto, [rng.normal(size=(3, 4, 6)).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize(("pattern", "again"), [("o", ["Attention"]), ("p*", [])])
def test_attention_is_recomputed_where_its_result_is(pattern, again):
    proto, batch = layer()
    found = recomputed(proto, pattern, list(WEIGHTS), *batch)
    assert [operator for operator in found if operator in ("Attention", "Softmax")] == again


def test_training_is_the_same():
    proto, (inputs, targets) = layer()
    (plain_losses, plain), (losses, trainer) = trained_both_ways(proto, list(WEIGHTS), inputs, targets)
    lowered = onnxtrain.lower(trainer.training_model(), kernels=True)  # the batch size is dynamic
    operators = {node.op_type for node in lowered.graph.node}
    assert {"Attention", "AttentionGradient"} <= operators
    assert not {"Softmax", "SoftmaxGradient", "IsNaN"} & operators
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    for name in WEIGHTS:
        np.testing.assert_allclose(trainer.parameters[name], plain.parameters[name], atol=1e-5)


def test_training_of_positions_is_the_same():
    """A bias of each head, by relative position, that is a trained table read at constant distances."""
    proto, (inputs, targets) = layer()
    for name, array in {
        "table": np.random.default_rng(2).normal(size=(7, 2)).astype(np.float32),
        "distances": 3 + np.arange(4)[:, None] - np.arange(4),
    }.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    scaled = next(node for node in proto.graph.node if node.output[0] == "l")
    scaled.output[0] = "l0"
    at = list(proto.graph.node).index(scaled) + 1
    for offset, node in enumerate(
        [
            helper.make_node("Gather", ["table", "distances"], ["rows"]),
            helper.make_node("Transpose", ["rows"], ["positions"], perm=[2, 0, 1]),
            helper.make_node("Add", ["l0", "positions"], ["l"]),
        ]
    ):
        proto.graph.node.insert(at + offset, node)
    trained = [*WEIGHTS, "table"]
    (plain_losses, plain), (losses, trainer) = trained_both_ways(proto, trained, inputs, targets)
    lowered = onnxtrain.lower(trainer.training_model(), kernels=True)
    node = next(node for node in lowered.graph.node if node.op_type == "AttentionGradient")
    assert len(node.output) == 4
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    for name in trained:
        np.testing.assert_allclose(trainer.parameters[name], plain.parameters[name], atol=1e-5)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
@pytest.mark.parametrize("module", ["attention", "multihead"])
def test_exported_module_is_recognised(module, dynamo, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript" if dynamo else "onnx")

    class Causal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(8, 24)

        def forward(self, x):
            parts = self.projection(x).chunk(3, -1)
            q, k, v = (part.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2) for part in parts)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8)

    class Multihead(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    net = (Causal() if module == "attention" else Multihead()).eval()
    x, path = torch.randn(3, 5, 8), tmp_path / "model.onnx"
    if dynamo:
        batch = torch.export.Dim("batch", min=2, max=64)
        shapes = {"x": {0: batch}}
        torch.onnx.export(net, (x,), dynamo=True, opset_version=18, dynamic_shapes=shapes, verbose=False).save(path)
    else:
        buffer = io.BytesIO()
        axes = {"x": {0: "batch"}}
        torch.onnx.export(net, (x,), buffer, opset_version=18, dynamo=False, input_names=["x"], dynamic_axes=axes)
        path.write_bytes(buffer.getvalue())
    found = after_fusion(onnx.load(path))
    assert "Attention" in [node.op_type for node in found]
    assert "Softmax" not in [node.op_type for node in found]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_trained_positions_in_windows_are_pytorchs(tmp_path):
    """Attention within windows with a learned bias of the distance: one node, and a step of training as PyTorch's."""
    torch = pytest.importorskip("torch")

    class Windows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection, self.table = torch.nn.Linear(8, 24), torch.nn.Embedding(7, 2)
            self.register_buffer("distances", 3 + torch.arange(4)[:, None] - torch.arange(4))

        def forward(self, x):
            parts = self.projection(x.reshape(-1, 4, 8)).chunk(3, -1)
            q, k, v = (part.reshape(-1, 4, 2, 4).transpose(1, 2) for part in parts)
            bias = self.table(self.distances).permute(2, 0, 1)[None]
            y = torch.softmax(q @ k.transpose(-1, -2) / 2 + bias, -1) @ v
            return y.transpose(1, 2).reshape(x.shape)

    torch.manual_seed(0)
    net, x, target = Windows(), torch.randn(20, 8, 8), torch.randn(20, 8, 8)
    axes = {"x": {0: "batch"}}
    path = tmp_path / "model.onnx"
    torch.onnx.export(net, (x,), str(path), opset_version=18, dynamo=False, input_names=["x"], dynamic_axes=axes)
    trainer = onnxtrain.Trainer(path, loss="mse", optimizer=onnxtrain.Momentum(10.0, momentum=0.0))
    lowered = onnxtrain.lower(trainer.training_model(), kernels=True)
    assert {"PackedAttention", "PackedAttentionGradient"} <= {node.op_type for node in lowered.graph.node}
    optimizer = torch.optim.SGD(net.parameters(), lr=10.0)
    for _ in range(2):
        loss = trainer.train_step({"x": x.numpy()}, target.numpy())
        wanted = torch.nn.functional.mse_loss(net(x), target)
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
    moved = trainer.parameters["table.weight"]
    np.testing.assert_allclose(moved, net.table.weight.detach().numpy(), atol=1e-4)
