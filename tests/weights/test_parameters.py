"""Parameters and constants among initializers, with reasons."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper, parser

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.parameters.trainable import parameter_table
from sentences import raises_sentence

HEADER = '<ir_version: 8, opset_import: ["": 18]>'


def reasons(text: str, **options: object) -> dict[str, str]:
    model = infer_shapes(ir.from_proto(parser.parse_model(f"{HEADER} {text}")))
    return {row.name: row.reason for row in parameter_table(model, None, **options)}


def test_weights_and_biases_are_parameters() -> None:
    found = reasons(
        """m (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1, 2}, float[1] b = {0}>
        { h = MatMul(x, w)  y = Add(h, b) }"""
    )
    assert found == {"w": "", "b": ""}


def test_scalars_of_the_computation_are_constants() -> None:
    found = reasons(
        """m (float[N,2] x) => (float[N,2] y) <float epsilon = {0.1}, float[1] scale = {2}, float[2] w = {1, 2}>
        { a = Add(x, epsilon)  b = Mul(a, scale)  y = Mul(b, w) }"""
    )
    assert found == {"epsilon": "a scalar of the computation", "scale": "a scalar of the computation", "w": ""}


def test_settings_are_constants() -> None:
    found = reasons(
        """m (float[1,1,2,2] x) => (float[1,1,4,4] y) <float low = {0}, float high = {6}, float[4] s = {1, 1, 2, 2}>
        { c = Clip(x, low, high)  y = Resize(c, , s) }"""
    )
    assert found["low"] == "bound of Clip"
    assert found["high"] == "bound of Clip"
    assert found["s"] == "scales of Resize"


def test_integers_and_tensors_without_a_path_to_the_loss() -> None:
    found = reasons(
        """m (float[N,4] x) => (float[N,2,2] y) <int64[3] shape = {0, 2, 2}, float[4] unused = {1, 1, 1, 1},
        float[4] w = {1, 1, 1, 1}, float16[4] half = {1, 1, 1, 1}>
        { a = Mul(x, w)  q = ArgMax(unused)  h = Cast<to = 1>(half)  b = Add(a, h)  y = Reshape(b, shape) }"""
    )
    assert found["shape"] == "int64, not a floating tensor"
    assert found["unused"] == "the loss does not depend on it through a differentiable path"
    assert found["half"] == "float16; the optimizers take float and double"
    assert found["w"] == ""


def test_statistics_of_batch_normalization_are_constants() -> None:
    found = reasons(
        """m (float[N,2,3] x) => (float[N,2,3] y) <float[2] scale = {1, 1}, float[2] bias = {0, 0},
        float[2] mean = {0, 0}, float[2] var = {1, 1}> { y = BatchNormalization(x, scale, bias, mean, var) }"""
    )
    assert found == {
        "scale": "",
        "bias": "",
        "mean": "running mean of batch normalization",
        "var": "running variance of batch normalization",
    }


def test_masks_are_constants() -> None:
    model = parser.parse_model(
        f"{HEADER} m (float[N,2] x) => (float[N,2] y) {{ a = Add(x, mask)  b = Mul(a, w)  y = Add(b, large) }}"
    )
    for name, array in {"mask": [0, -np.inf], "w": [1, 2], "large": [0, np.finfo(np.float32).min]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
    table = parameter_table(infer_shapes(ir.from_proto(model)), None)
    found = {row.name: row.reason for row in table}
    assert found == {"mask": (m := "a mask: it holds infinite or huge values"), "w": "", "large": m}


def test_train_and_freeze() -> None:
    text = """m (float[2] x) => (float[2] y) <float[2] a_w = {1, 2}, float[2] b_w = {1, 2}, float s = {1}>
        { p = Mul(x, a_w)  q = Mul(p, b_w)  y = Mul(q, s) }"""
    assert reasons(text, train="a*") == {"a_w": "", "b_w": "not named by train=", "s": "not named by train="}
    assert reasons(text, freeze=["a*"]) == {
        "a_w": "frozen",
        "b_w": "",
        "s": "a scalar of the computation",
    }
    assert reasons(text, train=["a_w", "s"]) == {"a_w": "", "b_w": "not named by train=", "s": ""}
    assert reasons(text, train="*", freeze="b_w") == {"a_w": "", "b_w": "frozen", "s": "a scalar of the computation"}
    with raises_sentence("no_match", option="freeze", pattern="'c*'", kind="initializer", names="a_w, b_w, s"):
        reasons(text, freeze="c*")


def shared_scale() -> onnx.ModelProto:
    """Build two batch normalizations with untrained scales and statistics merged by an exporter, one by Identity."""
    nodes = [
        helper.make_node("Identity", ["one"], ["scale2"]),
        helper.make_node("BatchNormalization", ["x", "one", "zero", "zero", "one_var"], ["h"], "first"),
        helper.make_node("BatchNormalization", ["h", "scale2", "zero", "mean", "var"], ["y"], "second"),
    ]
    arrays = {"one": 1, "zero": 0, "one_var": 1, "mean": 0, "var": 1}
    weights = [numpy_helper.from_array(np.full(2, value, np.float32), name) for name, value in arrays.items()]
    infos = [helper.make_tensor_value_info(name, 1, ["N", 2, 3]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "shared", infos[:1], infos[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_inspect_reports_shared_tensors() -> None:
    hints = " ".join(onnxtrain.inspect(shared_scale()).hints)
    assert "one is shared by 2 nodes (first, second)" in hints
    assert "untie=True gives each its own" in hints
    assert 'batch_norm="train"' in hints


def test_untie_gives_each_reader_its_own() -> None:
    options = {"loss": "mean_squared_error", "optimizer": onnxtrain.Momentum(0.1)}
    tied = onnxtrain.Trainer(shared_scale(), **options)
    untied = onnxtrain.Trainer(shared_scale(), untie=True, **options)
    assert set(untied.parameters) == {*tied.parameters, "one_2", "zero_2"}
    assert not any("shared" in hint for hint in untied.hints)
    x = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    np.testing.assert_array_equal(tied.predict(x), untied.predict(x))
    untied.parameters["one"][...] = 2
    untied.train_step(x, 3 * x)
    assert not np.allclose(untied.parameters["one"] - 2, untied.parameters["one_2"] - 1)
    with raises_sentence("no_match", option="untie", pattern="'w'", kind="initializer that several nodes share"):
        onnxtrain.Trainer(shared_scale(), untie="w", **options)


def test_training_shared_statistics_asks_for_untie(tmp_path) -> None:
    options = {"loss": "mean_squared_error", "optimizer": onnxtrain.Momentum(0.1), "batch_norm": "train"}
    model = shared_scale()
    model.graph.node[1].input[3] = "mean"
    with raises_sentence("shared_statistics", statistics="share the running mean 'mean'"):
        onnxtrain.Trainer(model, **options)
    subject = onnxtrain.Trainer(model, untie=True, **options)
    x = np.random.default_rng(0).normal(size=(40, 2, 3)).astype(np.float32) * 2 + 1
    subject.train_step(x, x)
    np.testing.assert_allclose(subject.executor.session.state["mean"], 0.1 * x.mean(axis=(0, 2)), rtol=1e-4)
    subject.save(tmp_path / "out.onnx")
    saved = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    np.testing.assert_array_equal(saved["mean"], subject.executor.session.state["mean"])


def test_texts_beside_the_weights_stay():
    """Classifiers of scikit-learn keep the names of classes in an initializer, which only a label output reads."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] y, string[n] label)'
        ' <float[2, 2] w = {1, 2, 3, 4}, string[2] names = {"no", "yes"}>'
        " { y = MatMul(x, w) k = ArgMax<axis = 1, keepdims = 0>(y) label = Gather(names, k) }"
    )
    trainer = onnxtrain.Trainer(model, loss={"y": "cross_entropy"})
    trainer.train_step(np.ones((4, 2), np.float32), np.array([0, 1, 1, 0]))
    assert set(trainer.parameters) == {"w"}
