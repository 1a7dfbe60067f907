"""Adapters' outputs and rows at indices are added by the node that computes them, with the values of an addition."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain import examples
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering import pipeline
from onnxtrain.lowering.rules.linear import fuse_additions
from onnxtrain.runtime.native import custom_ops_library

ROWS, WIDE, RANK = 7, 90, 4
WEIGHTS = {"w": (WIDE, WIDE), "v": (WIDE, WIDE), "a": (WIDE, RANK), "b": (RANK, WIDE), "c": (RANK, WIDE)}
KINDS = {"float": np.float32, "double": np.float64}


def model(nodes: str, kind: str = "float", outputs: str = "") -> onnx.ModelProto:
    weights = ", ".join(f"{kind}{list(shape)} {name}" for name, shape in WEIGHTS.items())
    sizes = f"{kind}[m, {WIDE}]"
    values = ", ".join(f"{sizes} {name}" for name in ("p", "t", "s", "r"))
    text = (
        f'<ir_version: 10, opset_import: ["": 18, "{ONNXTRAIN_DOMAIN}": 1]> f ({sizes} x, {weights}) => '
        f"({sizes} y{outputs}) <{values}, {kind}[m, {RANK}] u> {{ {nodes} }}"
    )
    return parser.parse_model(text.replace("onnxtrain.", f"{ONNXTRAIN_DOMAIN}."))


LAYER = "p = onnxtrain.Linear(x, w) u = onnxtrain.Linear(x, a) t = onnxtrain.Linear(u, b)"


def fused(proto: onnx.ModelProto) -> ir.Model:
    working = ir.from_proto(proto)
    fuse_additions(working)
    onnx.checker.check_model(ir.to_proto(working))
    return working


def run(working: ir.Model, kind: str = "float") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(ROWS, WIDE))} | {name: rng.normal(size=shape) for name, shape in WEIGHTS.items()}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), options)
    return session.run(None, {name: array.astype(KINDS[kind]) for name, array in feeds.items()})


def sums(working: ir.Model) -> list[str]:
    return [node.op_type for node in working.graph if node.op_type in ("Add", "Sum")]


def biases(working: ir.Model) -> list[tuple[str, str]]:
    """Return the results and biases of layers that have a bias."""
    nodes = [node for node in working.graph if node.op_type == "Linear" and len(node.inputs) == 3]
    return [(str(node.outputs[0].name), str(node.inputs[2].name)) for node in nodes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["p, t", "t, p"])
def test_an_adapter_is_added_to_its_layer(kind: str, order: str) -> None:
    proto = model(f"{LAYER} y = Add({order})", kind)
    working = fused(proto)
    assert sums(working) == []
    assert biases(working) in ([("y", "p")], [("y", "t")])
    (found,), (right,) = run(working, kind), run(ir.from_proto(proto), kind)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-4 if kind == "float" else 1e-12)


def test_a_sum_of_layers_and_others_is_a_chain() -> None:
    proto = model(f"{LAYER} s = onnxtrain.Linear(u, c) r = Tanh(x) y = Sum(s, r, p, x, t)")
    working = fused(proto)
    assert sums(working) == ["Sum"]
    assert biases(working) == [("p", "y/others"), ("t", "p"), ("y", "t")]
    np.testing.assert_allclose(run(working)[0], run(ir.from_proto(proto))[0], rtol=1e-5, atol=1e-4)


def test_a_term_that_others_read_keeps_its_value() -> None:
    proto = model(f"{LAYER} y = Add(p, t)", outputs=f", float[m, {WIDE}] p")
    working = fused(proto)
    assert biases(working) == [("y", "p")]
    for found, right in zip(run(working), run(ir.from_proto(proto)), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (f"{LAYER} y = Add(p, t)", f", float[m, {WIDE}] t"),
        (f"{LAYER} s = Mul(t, t) r = Add(p, t) y = Add(s, r)", ""),
        ("p = onnxtrain.Linear(x, w) t = onnxtrain.Linear(x, v) y = Add(p, t)", ""),
        ('u = onnxtrain.Linear(x, a) t = onnxtrain.Linear<activation="Relu">(u, b) y = Add(x, t)', ""),
    ],
    ids=["an output", "read twice", "no adapter", "an activation"],
)
def test_other_sums_stay(nodes: str, outputs: str) -> None:
    working = fused(model(nodes, outputs=outputs))
    assert sums(working)
    assert biases(working) == []


def test_a_term_of_another_shape_stays() -> None:
    proto = model("u = onnxtrain.Linear(x, a) t = onnxtrain.Linear(u, b) y = Add(t, bias)")
    proto.graph.input.append(onnx.helper.make_tensor_value_info("bias", onnx.TensorProto.FLOAT, [WIDE]))
    assert sums(fused(proto)) == ["Add"]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_training_has_fewer_additions_and_the_same_losses(
    monkeypatch: pytest.MonkeyPatch, tmp_path, compute: str
) -> None:
    onnx.save(examples.mlp((100, 96, 80, 5)), tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((24, 100)).astype(np.float32), np.arange(24) % 5

    monkeypatch.setattr(pipeline, "fuse_elementwise", lambda graph: None)  # chains have additions, too

    def losses() -> list[float]:
        lora = onnxtrain.Lora(rank=4, targets="*")
        options = {"loss": "softmax_cross_entropy", "optimizer": "adamw(lr=1e-2)", "precision": compute}
        trainer = onnxtrain.Trainer(tmp_path / "model.onnx", lora=lora, **options)
        found = [trainer.train_step(x, y) for _ in range(8)]
        graph = trainer.executor.session._steps[0].step.model.graph
        counts.append(sum(node.op_type in ("Add", "Sum") for node in graph))
        return found

    counts: list[int] = []
    with_pass = losses()
    monkeypatch.setattr(pipeline, "fuse_additions", lambda graph: None)
    without = losses()
    assert counts[0] <= counts[1] - 3
    np.testing.assert_allclose(with_pass, without, rtol=1e-5)


def test_a_bias_of_another_shape_is_refused() -> None:
    proto = model("u = onnxtrain.Linear(x, a) y = onnxtrain.Linear(x, w, u)")
    infer_shapes(ir.from_proto(proto))
    with pytest.raises(Exception, match=r"input 2 \(b\) has shape \[7, 4\]"):
        run(ir.from_proto(proto))


ADDED_ROWS = """
    e = onnxtrain.GatherGradient<axis=0>(x, i, size) f = onnxtrain.GatherGradient<axis=0>(x, j, size)
    d = MatMul(m, x)
"""


def rows_model(nodes: str, kind: str = "float", outputs: str = "") -> onnx.ModelProto:
    table, rows = f"{kind}[50, {WIDE}]", f"{kind}[{ROWS}, {WIDE}]"
    text = (
        f'<ir_version: 10, opset_import: ["": 18, "{ONNXTRAIN_DOMAIN}": 1]> f ({rows} x, {kind}[50, {ROWS}] m, '
        f"int64[{ROWS}] i, int64[{ROWS}] j) => ({table} y{outputs}) <int64[2] size = {{50, {WIDE}}}, "
        f"{table} d, {table} e, {table} f> {{ {nodes} }}"
    )
    return parser.parse_model(text.replace("onnxtrain.", f"{ONNXTRAIN_DOMAIN}."))


def run_rows(working: ir.Model, kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    feeds = {"x": rng.normal(size=(ROWS, WIDE)), "m": rng.normal(size=(50, ROWS))}
    feeds = {name: array.astype(KINDS[kind]) for name, array in feeds.items()}
    indices = {"i": np.array([3, 0, 3, 49, 7, 3, 0]), "j": np.array([8, 8, 1, 49, 8, 3, 2])}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), options)
    return session.run(None, feeds | indices)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sum_", ["y = Add(d, e)", "y = Add(e, d)", "y = Sum(e, d, f)", "y = Add(e, f)"], ids=["dense", "rows", "all", "two"]
)
def test_rows_are_added_to_the_other_terms_bit_by_bit(kind: str, sum_: str) -> None:
    proto = rows_model(ADDED_ROWS + sum_, kind)
    working = fused(proto)
    assert sums(working) == []
    (found,), (right,) = run_rows(working, kind), run_rows(ir.from_proto(proto), kind)
    if "Sum" in sum_:  # of three terms, in another order
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, right)


def test_rows_that_others_read_stay() -> None:
    proto = rows_model(f"{ADDED_ROWS} y = Add(d, e)", outputs=f", float[50, {WIDE}] e")
    assert sums(fused(proto)) == ["Add"]


CHANNELS = 'n, ds, db = onnxtrain.BatchNormalizationGradient<training_mode = 1, activation = "Relu">(p, x, g, m, m, h) '
OWN_STATISTICS = "n, ds, db = onnxtrain.BatchNormalizationGradient(p, x, g) "
SPLIT = "c, rest = Split<axis = 1>(d, sizes) z = Neg(rest) "


def channel_model(nodes: str) -> onnx.ModelProto:
    images = "float[2, 6, 5, 5]"
    text = (
        f'<ir_version: 10, opset_import: ["": 18, "{ONNXTRAIN_DOMAIN}": 1]> f ({images} x, float[2, 9, 5, 5] d, '
        f"float[6] g, float[6] h, float[2, 6] m) => ({images} y, float[2, 3, 5, 5] z, float[6] ds) "
        f"<{images} c, {images} n, {images} p, float[2, 3, 5, 5] rest, int64[2] sizes = {{6, 3}}> "
        f"{{ p = Neg(x) {nodes} }}"
    )
    return parser.parse_model(text.replace("onnxtrain.", f"{ONNXTRAIN_DOMAIN}."))


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        (f"{SPLIT} {CHANNELS} y = Add(c, n)", ["Neg", "Slice", "Neg", "BatchNormalizationGradient"]),
        (
            f"{SPLIT} {CHANNELS} e = Neg(c) y = Sum(c, n, e)",
            ["Neg", "Split", "Neg", "Neg", "Sum", "BatchNormalizationGradient"],
        ),
        (f"{CHANNELS} {SPLIT} y = Add(c, n)", ["Neg", "Split", "Neg", "Add", "BatchNormalizationGradient"]),
        (f"{SPLIT} {OWN_STATISTICS} y = Add(c, n)", ["Neg", "Split", "Neg", "Add", "BatchNormalizationGradient"]),
    ],
    ids=["joined", "read twice", "the other term comes later", "an input is left out"],
)
def test_the_gradient_by_channels_adds_a_part_where_it_lies(nodes: str, left: list[str]) -> None:
    proto = channel_model(nodes)
    working = fused(proto)
    assert sorted(node.op_type for node in working.graph) == sorted(left)
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 6, 5, 5), "d": (2, 9, 5, 5), "g": 6, "h": 6, "m": (2, 6)}
    feeds = {name: rng.random(shape).astype(np.float32) for name, shape in shapes.items()}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    found, right = (
        onnxruntime.InferenceSession(each.SerializeToString(), options).run(None, feeds)
        for each in (ir.to_proto(working), proto)
    )
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_tied_embedding_has_one_gradient_and_the_same_losses(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    vocabulary, width = 40, 12
    weight = np.random.default_rng(0).standard_normal((vocabulary, width)).astype(np.float32)
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> f (int64[N, 6] tokens) => (float[N, 6, {vocabulary}] logits) '
        f"<float[{vocabulary}, {width}] embedding> {{ e = Gather(embedding, tokens) t = Tanh(e) "
        "w = Transpose(embedding) logits = MatMul(t, w) }"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "embedding"))
    onnx.save(proto, tmp_path / "model.onnx")
    tokens = np.random.default_rng(1).integers(0, vocabulary, (5, 6))

    def losses() -> list[float]:
        trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="softmax_cross_entropy", optimizer="adam(lr=1e-2)")
        found = [trainer.train_step(tokens, tokens) for _ in range(5)]
        graph = trainer.executor.session._steps[0].step.model.graph
        places.append([len(node.inputs) for node in graph if node.op_type == "GatherGradient"])
        return found

    places: list[list[int]] = []
    with_pass = losses()
    monkeypatch.setattr(pipeline, "fuse_additions", lambda graph: None)
    assert losses() == with_pass
    assert places == [[4], [3]]
