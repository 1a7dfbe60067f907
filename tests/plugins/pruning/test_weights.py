"""Weights that are pruned and sparsified by default: those that multiply data, of any rank."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.parameters.masks import matmul_weights
from onnxtrain.parameters.readers import LINEAR
from onnxtrain.plugins.pruning.job import fresh_values
from sentences import raises_sentence

# The operator that reads w, the shape of w, and whether it is a weight.
READERS = {
    "MatMul": ("y = MatMul(x, w)", (6, 4), True),
    "MatMul from the left": ("y = MatMul(w, x)", (5, 5), True),
    "Gemm": ("f = Flatten(x)  y = Gemm<transB = 1>(f, w)", (4, 30), True),
    "one output": ("y = MatMul(x, w)", (6, 1), True),
    "Conv": ("y = Conv(x, w)", (4, 5, 3), True),
    "depthwise Conv": ("y = Conv<group = 5>(x, w)", (5, 1, 3), True),
    "Conv of one filter": ("y = Conv<group = 5>(x, w)", (5, 1, 1), True),
    "ConvTranspose": ("y = ConvTranspose(x, w)", (5, 4, 3), True),
    "Einsum": ('y = Einsum<equation = "nsf,fg->nsg">(x, w)', (6, 4), True),
    "embedding": ("y = Gather(w, ids)", (9, 6), True),
    "learned positions": ("p = Gather(w, fixed)  y = Add(x, p)", (5, 6), True),
    "LSTM": ("h, y = LSTM<hidden_size = 3>(x, w, r)", (1, 12, 6), True),
    "recurrent weight of GRU": ("h, y = GRU<hidden_size = 3>(x, v, w)", (1, 9, 3), True),
    "bias of LSTM": ("h, y = LSTM<hidden_size = 3>(x, v, r, w)", (1, 24), False),
    "scale of a normalization": ("y = Mul(x, w)", (1, 5, 1), False),
    "scale [1, 1, C]": ("y = Mul(x, w)", (1, 1, 6), False),
    "scale and bias of the rank of data": ("y = Add(x, w)", (1, 5, 6), False),
    "scale of LayerNormalization": ("y = LayerNormalization<axis = 1>(x, w)", (5, 6), False),
    "bias of Gemm": ("f = Flatten(x)  y = Gemm(f, g, w)", (1, 4), False),
    "bias of skl2onnx": ("h = MatMul(x, m)  y = Add(h, w)", (1, 4), False),
    "slopes of PRelu": ("y = PRelu(x, w)", (5, 1), False),
    "class token": ("y = Concat<axis = 0>(x, w)", (1, 5, 6), False),
    "class token that is multiplied as data": ("c = Concat<axis = 0>(x, w)  y = MatMul(c, m)", (1, 5, 6), False),
    "factor of features": ("h = Mul(x, w)  y = MatMul(h, m)", (1, 1, 6), False),
    "vector": ("y = MatMul(x, w)", (6,), False),
    "behind Identity": ("a = Identity(w)  b = Identity(a)  y = MatMul(x, b)", (6, 4), True),
    "behind Transpose": ("a = Transpose(w)  y = MatMul(x, a)", (4, 6), True),
    "packed": ("a, b = Split<axis = 1>(w, halves)  h = MatMul(x, a)  y = Mul(h, h)", (6, 8), True),
    "stacked": ("a = Gather(w, one)  y = MatMul(x, a)", (3, 6, 4), True),
    "scale from a stack": ("a = Gather(w, one)  y = Mul(x, a)", (3, 1, 6), False),
    "quantized on the way": ("q = Round(w)  d = Mul(q, s)  y = MatMul(x, d)", (6, 4), True),
    "masked on the way": ("a = Mul(w, m)  y = MatMul(x, a)", (6, 4), True),
    "normalized on the way": ("n = ReduceL2<keepdims = 1>(w)  d = Div(w, n)  y = MatMul(x, d)", (6, 4), True),
    "gain of weight normalization": ("a = Mul(m, w)  y = MatMul(x, a)", (6, 1), False),
    "low rank": ("a = MatMul(w, r2)  b = Add(m, a)  y = MatMul(x, b)", (6, 2), True),
    "function": ("y = my.linear(x, w, offset)", (4, 6), True),
    "bias of a function": ("y = my.linear(x, t, w)", (1, 4), False),
    "branch": (
        "y = If (cond) < then_branch = p () => (float[N,5,4] u) { u = MatMul(x, w) },"
        " else_branch = q () => (float[N,5,4] v2) { v2 = MatMul(x, m) } >",
        (6, 4),
        True,
    ),
    "state of a loop": (
        "e, y = Loop (count, cond, w, x) < body = l (int64 i, bool g, float[6,6] k, float[N,5,6] h) =>"
        " (bool o, float[6,6] k2, float[N,5,6] h2) { o = Identity(g)  k2 = Identity(k)  h2 = MatMul(h, k) } >",
        (6, 6),
        True,
    ),
    "unknown operator": ("y = other.Secret(x, w)", (6, 4), True),
    "scale of an unknown operator": ("y = other.Secret(x, w)", (1, 5, 1), False),
}


def model(text: str, shape: tuple[int, ...]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w": shape, "v": (1, 9, 6), "r": (1, 12, 3), "m": (6, 4), "g": (30, 4), "offset": (1, 4), "t": (4, 6)}
    arrays = {name: rng.normal(size=size).astype(np.float32) for name, size in (shapes | {"r2": (2, 4)}).items()}
    arrays |= {"one": np.array(1), "fixed": np.arange(5), "halves": np.array([4, 4]), "count": np.array(2)}
    arrays |= {"cond": np.array(True), "s": np.float32(0.1)}
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "my": 1, "other": 1]> m (float[N,5,6] x, int64[N,3] ids) =>'
        f' (float[] y) {{ {text} }} <domain: "my", opset_import: ["": 17]> linear (a, k, o) => (z)'
        " { t = Transpose(k)  h = MatMul(a, t)  z = Add(h, o) }"
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    used = {name for name in arrays if f" {name}" in text.replace("(", " ").replace(",", " ")}
    for name in sorted(used):
        made.graph.initializer.append(numpy_helper.from_array(arrays[name], name))
    return made


@pytest.mark.parametrize("reader", READERS)
def test_the_operator_decides(reader):
    text, shape, expected = READERS[reader]
    working = infer_shapes(ir.from_proto(model(text, shape)))
    assert matmul_weights(working, ["w"]) == (["w"] if expected else [])


def test_products_are_operators_of_their_domains():
    for (domain, operator), inputs in LINEAR.items():
        assert inputs
        if not domain:
            schema = onnx.defs.get_schema(operator)
            assert max(inputs) < len(schema.inputs)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "lenet5_caffe", "lenet_300_100", "digits_cnn", "small_resnet"])
def test_ordinary_models_keep_their_defaults(name):
    build = getattr(onnxtrain.examples, name)
    made = build((4, 8, 3)) if name == "mlp" else build()
    trainer = onnxtrain.Trainer(made, loss="softmax_cross_entropy", optimizer=onnxtrain.SSGD(0.01))
    assert trainer.objective.sparsified(trainer.config.sparsify) == [
        name for name, array in trainer.parameters.items() if array.ndim >= 2
    ]


def scaled() -> onnx.ModelProto:
    """A layer normalization over channels, [1, C, 1], between two convolutions, as speech models write it."""
    text = """c = Conv(x, w1)  h = Mul(c, scale)  a = Add(h, shift)  t = Relu(a)  d = Conv(t, w2)
        m = ReduceMean<axes = [2], keepdims = 0>(d)  y = Add(m, intercepts)"""
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> m (float[N,4,12] x) => (float[N,3] y) {{ {text} }}'
    )
    rng = np.random.default_rng(0)
    arrays = {
        "w1": rng.normal(size=(6, 4, 3)),
        "scale": 0.01 * (1 + rng.random((1, 6, 1))),
        "shift": 0.01 * rng.random((1, 6, 1)),
        "w2": rng.normal(size=(3, 6, 3)),
        "intercepts": 0.01 * rng.random((1, 3)),
    }
    made.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()
    )
    return made


X = np.random.default_rng(1).normal(size=(24, 4, 12)).astype(np.float32)
Y = np.arange(24) % 3


def test_scales_and_biases_are_not_pruned():
    result = onnxtrain.prune(scaled(), (X, Y), loss="softmax_cross_entropy", sparsity=0.9, epochs=2, fine_tune_epochs=1)
    assert [row.name for row in result.layers] == ["w1", "w2"]
    assert set(result.masks) == {"w1", "w2"}
    for name in ("scale", "shift", "intercepts"):
        assert np.all(result.values[name] != 0)
    named = onnxtrain.prune(
        scaled(), (X, Y), loss="softmax_cross_entropy", sparsity=0.5, tensors="scale", epochs=1, fine_tune_epochs=0
    )
    assert [row.name for row in named.layers] == ["scale"]


def test_scales_and_biases_are_not_sparsified():
    settings = {"loss": "softmax_cross_entropy", "optimizer": onnxtrain.SSGD(0.01)}
    trainer = onnxtrain.Trainer(scaled(), **settings)
    assert trainer.objective.sparsified(trainer.config.sparsify) == ["w1", "w2"]
    written = onnxtrain.training_model(scaled(), **settings)
    nodes = [set(node.input) for node in written.training_info[0].algorithm.node if node.op_type == "SSGD"]
    assert len(nodes) == 2  # the promoted parameters, and those that take plain steps
    assert [inputs & {"w1", "w2", "scale", "shift", "intercepts"} for inputs in nodes if "w1" in inputs] == [
        {"w1", "w2"}
    ]


def test_a_model_without_weights_has_nothing_to_prune():
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> m (float[N,2,3] x) => (float[N,2,3] y)
        <float[1,2,1] scale = {1, 2}> { y = Mul(x, scale) }""")
    x = np.ones((4, 2, 3), np.float32)
    with raises_sentence("nothing_to_prune"):
        onnxtrain.prune(made, (x, x), loss="mean_squared_error", sparsity=0.5)


def test_fresh_scales_are_one():
    trainer = onnxtrain.Trainer(scaled(), loss="softmax_cross_entropy")
    values = fresh_values(trainer.objective.model.clone(), trainer.parameters, 0)
    assert np.all(values["scale"] == 1)
    assert np.all(values["shift"] == 0)
    assert np.all(values["intercepts"] == 0)
    assert values["w1"].std() == pytest.approx(np.sqrt(2 / 12), rel=0.3)


def tied() -> onnx.ModelProto:
    """An embedding, and the output projection as its transposed copy."""
    table = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> m (int64[N] ids) => (float[N,12] y)
        { h = Gather(wte, ids)  t = Tanh(h)  y = MatMul(t, head) }""")
    for name, array in {"wte": table, "head": np.ascontiguousarray(table.T)}.items():
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


IDS = np.random.default_rng(1).integers(0, 12, 48)
NEXT = (IDS, (IDS + 1) % 12)


def test_tied_weights_are_pruned_as_one(tmp_path):
    settings = {"loss": "softmax_cross_entropy", "sparsity": 0.5, "epochs": 2, "fine_tune_epochs": 1}
    result = onnxtrain.prune(tied(), NEXT, tie=True, **settings)
    assert [row.name for row in result.layers] == ["wte"]
    result.save(tmp_path / "pruned.onnx")
    saved = {item.name: numpy_helper.to_array(item) for item in onnx.load(tmp_path / "pruned.onnx").graph.initializer}
    np.testing.assert_array_equal(saved["head"].T, saved["wte"])
    assert np.count_nonzero(saved["head"]) == 48


def test_the_best_epoch_of_tied_weights_is_restored():
    trainer = onnxtrain.Trainer(tied(), loss="softmax_cross_entropy", tie=True, optimizer=onnxtrain.Momentum(50.0))
    stop = onnxtrain.callbacks.EarlyStopping(patience=1)
    history = trainer.fit(NEXT, validation=NEXT, epochs=5, callbacks=[stop])
    best = min(row["val_loss"] for row in history.rows)
    assert trainer.evaluate(NEXT)["loss"] == pytest.approx(best, rel=1e-5)
    assert set(trainer.initializers()) == {"wte", "head"}
