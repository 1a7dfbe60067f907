"""Heads, appended layers and cuts: the results are valid, keep the old weights, and train."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain import examples
from onnxtrain.editing.layers import Activation, Dropout, Flatten, GlobalAveragePool, Linear, Softmax
from onnxtrain.errors import ModelError, OptionError
from sentences import raises_sentence

RANDOM = np.random.default_rng(0)


def run(model: onnx.ModelProto, **feeds):
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def parsed(body: str, opset: int = 18, **weights) -> onnx.ModelProto:
    """Parse a model, with weights of these shapes or values."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{body}')
    for name, given in weights.items():
        array = RANDOM.normal(size=given).astype(np.float32) if isinstance(given, tuple) else np.asarray(given)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def feed(value: onnx.ValueInfoProto, symbol: int = 12) -> np.ndarray:
    """Return an array for an input."""
    kind = value.type.tensor_type
    shape = [d.dim_value or symbol for d in kind.shape.dim]
    drawn = RANDOM.normal(size=shape) if kind.elem_type == onnx.TensorProto.FLOAT else RANDOM.integers(0, 2, shape)
    return drawn.astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))


HEADS = {
    "gemm": parsed(
        "f (float[n, 4] x) => (float[n, 10] y) { h = Gemm<transB=1>(x, w, b)  r = Relu(h)  y = Gemm(r, v, c) }",
        w=(8, 4), b=(8,), v=(8, 10), c=(10,),
    ),
    "scaled gemm": parsed(
        "f (float[n, 4] x) => (float[n, 10] y) { y = Gemm<alpha=0.5, beta=2.0>(x, w, b) }", w=(4, 10), b=(10,)
    ),
    "no bias": parsed("f (float[n, 4] x) => (float[n, 10] y) { y = MatMul(x, w) }", w=(4, 10)),
    "product and sum": parsed(
        "f (float[n, 3, 4] x) => (float[n, 3, 10] y) { h = MatMul(x, w)  y = Add(b, h) }", w=(4, 10), b=(10,)
    ),
    "probabilities": parsed(
        "f (float[n, 4] x) => (float[n, 10] y, int64[n] label) "
        "{ h = MatMul(x, w)  s = Add(h, b)  y = Softmax(s)  label = ArgMax<axis=1, keepdims=0>(y) }",
        w=(4, 10), b=(10,),
    ),
    "tied": parsed(
        "f (int64[n, t] x) => (float[n, t, 10] y) "
        "{ e = Gather(w, x)  v = Transpose<perm=[1, 0]>(w)  y = MatMul(e, v) }",
        w=(10, 4),
    ),
    "convolution": parsed(
        "f (float[n, 4, 5, 5] x) => (float[n, 10] y) "
        "{ h = Conv(x, w, b)  r = Relu(h)  p = GlobalAveragePool(r)  y = Reshape(p, s) }",
        w=(10, 4, 1, 1), b=(10,), s=np.int64([-1, 10]),
    ),
    "segmentation": parsed(
        "f (float[1, 4, 5, 5] x) => (float[1, 10, 20, 20] y) { h = Conv(x, w)  y = Resize(h, , , s) }",
        w=(10, 4, 1, 1), s=np.int64([1, 10, 20, 20]),
    ),
    "quantized": parsed(
        "f (float[n, 4] x) => (float[n, 10] y) { v = DequantizeLinear(w, s)  y = MatMul(x, v) }",
        w=np.int8(RANDOM.integers(-9, 9, (4, 10))), s=np.float32(0.1),
    ),
    "in a constant": parsed(
        "f (float[n, 2] x) => (float[n, 3] y) "
        "{ w = Constant <value = float[2, 3] {1, 2, 3, 4, 5, 6}> ()  y = MatMul(x, w) }"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_a_new_head_gives_as_many_classes_as_asked_for(kind):
    model = HEADS[kind]
    before = model.SerializeToString()
    changed = onnxtrain.replace_head(model, classes=7)
    assert model.SerializeToString() == before
    x = feed(model.graph.input[0], 2)
    old, new = run(model, x=x), run(changed, x=x)
    axis = 1 if kind in ("convolution", "segmentation") else old[0].ndim - 1
    assert new[0].shape == (*old[0].shape[:axis], 7, *old[0].shape[axis + 1 :])
    assert [output.name for output in changed.graph.output] == [output.name for output in model.graph.output]
    kept = weights(changed)
    assert kept["head.weight"].size
    assert ("head.bias" in kept) == ("b" in weights(model) or "c" in weights(model))
    for name, array in weights(model).items():
        if name in kept:
            np.testing.assert_array_equal(kept[name], array)


def test_the_head_is_what_a_linear_layer_of_pytorch_begins_with():
    head = weights(onnxtrain.replace_head(examples.mlp((4, 100, 3)), classes=500, seed=3))
    for name in ("head.weight", "head.bias"):
        assert np.abs(head[name]).max() <= 0.1
        assert abs(head[name].mean()) < 0.01
        assert abs(head[name].std() - 0.1 / np.sqrt(3)) < 0.005
    again = weights(onnxtrain.replace_head(examples.mlp((4, 100, 3)), classes=500, seed=3))
    np.testing.assert_array_equal(head["head.weight"], again["head.weight"])
    other = weights(onnxtrain.replace_head(examples.mlp((4, 100, 3)), classes=500, seed=4))
    assert not np.array_equal(head["head.weight"], other["head.weight"])


@pytest.mark.parametrize("at", ["last", "r", "w"])
def test_the_head_is_named_by_node_value_or_weight(at):
    model = parsed(
        "f (float[n, 4] x) => (float[n, 5] y) { h = Gemm<transB=1>(x, w, b)  r = Identity(h)  y = Softmax(h) }",
        w=(5, 4), b=(5,),
    )  # fmt: skip
    model.graph.node[0].name = "last"
    if at == "r":
        with raises_sentence("head_operator", at="'r'", kind="a Identity", operators="Gemm, MatMul", last="Conv"):
            onnxtrain.replace_head(model, classes=2, at=at)
        at = "h"
    assert run(onnxtrain.replace_head(model, classes=2, at=at), x=np.zeros((1, 4), np.float32))[0].shape == (1, 2)


def test_names_that_are_taken_get_a_number():
    model = onnxtrain.replace_head(onnxtrain.replace_head(examples.mlp((4, 3)), classes=5), classes=6)
    assert sorted(weights(model)) == ["head2.bias", "head2.weight"]


@pytest.mark.parametrize(
    ("body", "given", "sentence"),
    [
        ("y = Relu(x)", {}, "depends on no Gemm, MatMul or Conv with a weight of its own"),
        ("h = MatMul(x, w)  y = Mul(h, v)", {"w": (4, 3), "v": (3,)}, "Behind the head stands Mul .* its 3 classes"),
        ("h = MatMul(x, w)  y = Reshape(h, s)", {"w": (4, 3), "s": np.int64([3, 3])}, "not clear which one counts"),
        ("h = MatMul(x, w)  y = Slice(h, s, e, a)", {"w": (4, 3), "s": [0], "e": [2], "a": [1]}, "stands Slice"),
    ],
)
def test_nodes_for_the_old_classes_are_named(body, given, sentence):
    with pytest.raises(OptionError, match=sentence):
        onnxtrain.replace_head(parsed(f"f (float[n, 4] x) => (float[n, m] y) {{ {body} }}", **given), classes=2)


@pytest.mark.parametrize("classes", [0, -1, 2.5, True, "7"])
def test_classes_are_an_integer(classes):
    with raises_sentence("head_classes", what="classes"):
        onnxtrain.replace_head(examples.mlp((4, 3)), classes=classes)


@pytest.mark.parametrize("name", ["lenet5", "small_resnet", "small_transformer", "digits_cnn"])
def test_a_new_head_is_trained_and_then_the_whole(name, tmp_path):
    model = onnxtrain.replace_head(getattr(examples, name)(), classes=3)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    x = {value.name: feed(value) for value in model.graph.input}
    y = np.arange(12) % 3
    trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(0.01), train="head.*")
    assert sorted(trainer.parameters) == ["head.bias", "head.weight"]
    start = trainer.train_step(x, y)
    for _ in range(10):
        tuned = trainer.train_step(x, y)
    assert tuned < start
    trainer.save(path)
    whole = onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-3))
    assert len(whole.parameters) > 2
    np.testing.assert_allclose(whole.train_step(x, y), trainer.train_step(x, y), rtol=1e-4)


def test_layers_are_appended():
    model = examples.lenet5()
    features = onnxtrain.cut(model, at=model.graph.node[3].output[0])
    layers = [GlobalAveragePool(), Linear(16), Activation("Relu"), Dropout(0.1), Linear(4, bias=False), Softmax()]
    longer = onnxtrain.append(features, *layers)
    x = RANDOM.normal(size=(2, 1, 28, 28)).astype(np.float32)
    (y,) = run(longer, **{model.graph.input[0].name: x})
    hidden = run(features, **{model.graph.input[0].name: x})[0].mean(axis=(2, 3))
    new = weights(longer)
    hidden = np.maximum(hidden @ new["head.weight"].T + new["head.bias"], 0) @ new["head2.weight"].T
    np.testing.assert_allclose(y, np.exp(hidden) / np.exp(hidden).sum(1, keepdims=True), rtol=1e-4)


def test_a_linear_layer_over_more_axes():
    model = parsed("f (float[n, 3, 4] x) => (float[n, 3, 4] y) { y = Tanh(x) }")
    x = RANDOM.normal(size=(2, 3, 4)).astype(np.float32)
    longer = onnxtrain.append(model, Linear(5))
    new = weights(longer)
    np.testing.assert_allclose(run(longer, x=x)[0], np.tanh(x) @ new["head.weight"] + new["head.bias"], rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda m: onnxtrain.append(m), "append was given no layer"),
        (lambda m: onnxtrain.append(m, "relu"), "append was given 'relu'; it takes layers"),
        (lambda m: onnxtrain.append(m, Linear(3)), "whose last axis has no fixed size"),
        (lambda m: onnxtrain.append(m, GlobalAveragePool()), "it needs at least three axes"),
        (lambda m: onnxtrain.append(m, Activation("Gelu")), "Gelu came with opset 20, and the model has opset 18"),
        (lambda m: onnxtrain.append(m, Flatten(), output="z"), "output='z', but the outputs are 'y'"),
        (
            lambda m: onnxtrain.cut(m, at="z"),
            "at='z' is neither a node of the model nor an output of one; the last outputs are 'y'",
        ),
        (lambda m: onnxtrain.cut(m, at=[]), "at= is empty"),
        (lambda m: Linear(0), "units of Linear is 0"),
        (lambda m: Activation("Conv"), r"Activation\('Conv'\) is none of Elu"),
        (lambda m: Dropout(1.0), "ratio of Dropout is 1.0"),
    ],
)
def test_mistakes_are_reported_in_a_sentence(make, sentence):
    model = parsed("f (float[n, m] x) => (float[n, m] y) { y = Relu(x) }")
    with pytest.raises(OptionError, match=sentence):
        make(model)


def test_a_cut_keeps_what_is_needed_and_no_more(tmp_path):
    model = parsed(
        "f (float[n, 4] x, float[n, 4] z, float[n] unread) => (float[n, 4] y) "
        "{ h = Mul(x, w)  two = Add(h, z)  y = Mul(two, v) }",
        w=(4,), v=(4,),
    )  # fmt: skip
    helper.set_model_props(model, {"author": "somebody"})
    path = tmp_path / "model.onnx"
    copy = onnx.ModelProto.FromString(model.SerializeToString())  # onnx.save changes its argument
    onnx.save(copy, path, save_as_external_data=True, size_threshold=0, location="model.data")
    part = onnxtrain.cut(path, at="h")
    assert [value.name for value in part.graph.input] == ["x", "unread"]
    assert list(weights(part)) == ["w"]
    assert {p.key: p.value for p in part.metadata_props} == {"author": "somebody"}
    x = RANDOM.normal(size=(2, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(part, x=x, unread=x[:, 0])[0], x * weights(model)["w"])
    two = onnxtrain.cut(model, at=["two", "h"])
    assert [value.name for value in two.graph.output] == ["two", "h"]


def test_an_argument_that_is_not_a_model_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_text("hello")
    for edit in (lambda p: onnxtrain.cut(p, at="h"), lambda p: onnxtrain.replace_head(p, 3)):
        with pytest.raises(ModelError, match="is not an ONNX model"):
            edit(tmp_path / "model.onnx")


def test_a_deep_model_is_searched_for_its_head():
    """Search deeper than Python's recursion limit, past a matmul of two inputs."""
    layers = "".join(f"h{i + 1} = Relu(h{i})  " for i in range(3000))
    body = f"h0 = MatMul(x, w)  {layers} t = Transpose(h3000)  p = MatMul(h3000, t)  y = Softmax(p)"
    model = parsed(f"f (float[3, 4] x) => (float[3, 3] y) {{ {body} }}", w=(4, 5))
    with raises_sentence("layer_behind_head", node="MatMul 'p'", old=5):
        onnxtrain.replace_head(model, classes=7)
    changed = onnxtrain.replace_head(onnxtrain.cut(model, at="h3000"), classes=7)
    assert weights(changed)["head.weight"].shape == (4, 7)


def with_initializer_inputs(ir_version: int) -> onnx.ModelProto:
    """Return a model whose initializers are inputs, too, as IR version 3 demands and later ones allow."""
    model = parsed(
        "f (float[n, 4] x, float[4, 8] w, float[8] b, float[8, 5] v, float[5] c) => (float[n, 5] y) "
        "{ h = MatMul(x, w) a = Add(h, b) s = Add(a, b) r = Relu(s) g = MatMul(r, v) y = Add(g, c) }",
        8, w=(4, 8), b=(8,), v=(8, 5), c=(5,),
    )  # fmt: skip
    model.ir_version = ir_version
    return model


def saved(model: onnx.ModelProto, **options) -> onnx.ModelProto:
    return onnxtrain.Trainer(model, loss="mse", **options).model()


EDITS = {
    "replace_head": lambda model, x: onnxtrain.replace_head(model, classes=3),
    "cut": lambda model, x: onnxtrain.cut(model, at="r"),
    "append": lambda model, x: onnxtrain.append(model, Linear(2)),
    "quantize": lambda model, x: onnxtrain.quantize(model, {"x": x}),
    "quantize to 4 bits": lambda model, x: onnxtrain.quantize(model, {"x": x}, bits=4),
    "untie": lambda model, x: saved(model, untie="b"),
    "lora": lambda model, x: saved(model, lora=onnxtrain.Lora(rank=2)),
    "gradient": lambda model, x: onnxtrain.gradient(model),
}


@pytest.mark.parametrize("ir_version", [3, 8])
@pytest.mark.parametrize("edit", EDITS)
def test_initializers_that_are_inputs(edit, ir_version):
    model, x = with_initializer_inputs(ir_version), RANDOM.normal(size=(20, 4)).astype(np.float32)
    made = EDITS[edit](model, x)
    first = run(made, x=x)[0]
    if edit in ("untie", "lora", "gradient"):
        np.testing.assert_allclose(first, run(model, x=x)[0], rtol=1e-5, atol=1e-6)
    if edit == "cut":
        np.testing.assert_array_equal(first, run(onnxtrain.cut(with_values(model), at="r"), x=x)[0])


def with_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose initializers are no inputs."""
    made = onnx.ModelProto.FromString(model.SerializeToString())
    made.ir_version = 8
    del made.graph.input[1:]
    return made
