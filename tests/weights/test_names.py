"""Patterns find weights by their modules where exporters renamed them."""

from __future__ import annotations

import re
import warnings

import numpy as np
import onnx
import pytest

import onnxtrain
from sentences import raises_sentence, warns_sentence


def exported(*, newer: bool) -> onnx.ModelProto:
    """Build two linear layers named as by PyTorch's exporters."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
    f (float[n, 2] x) => (float[n, 2] y)
      <float[2, 2] first = {1, 2, 3, 4}, float[2, 2] second = {1, 2, 3, 4}, float[2] b = {1, 2}> {
        h = MatMul(x, first)  r = Relu(h)  i = MatMul(r, second)  y = Add(b, i) }""")
    names = ("val_0", "val_4") if newer else ("onnx::MatMul_24", "onnx::MatMul_25")
    modules = ["layer.0.q", "layer.0", "layer.1.q", "layer.1.q"]
    for tensor, name in zip(model.graph.initializer, (*names, "layer.1.q.bias"), strict=True):
        for node in model.graph.node:
            node.input[:] = [name if other == tensor.name else other for other in node.input]
        tensor.name = name
    for place, (node, module) in enumerate(zip(model.graph.node, modules, strict=True)):
        node.name = f"node_{place}" if newer else f"/{module.replace('.', '/', 0)}/{node.op_type}"
        if newer:
            entry = node.metadata_props.add()
            entry.key, entry.value = "pkg.torch.onnx.name_scopes", str(["", module, f"linear_{place}"])
    return model


def chosen(model: onnx.ModelProto, **options) -> list[str]:
    return list(onnxtrain.Trainer(model, loss="mean_squared_error", **options).parameters)


@pytest.mark.parametrize("newer", [True, False])
def test_patterns_match_module_paths(newer):
    model = exported(newer=newer)
    first, second = (tensor.name for tensor in model.graph.initializer[:2])
    assert chosen(model, train="*layer.1*") == [second, "layer.1.q.bias"]
    assert chosen(model, train="layer.0.q.weight") == [first]
    assert chosen(model, freeze="layer.1.*") == [first]
    assert chosen(model, train=[first, "*.bias"]) == [first, "layer.1.q.bias"]
    rows = {row.name: row.paths for row in onnxtrain.inspect(model).initializers}
    assert rows == {first: ("layer.0.q.weight",), second: ("layer.1.q.weight",), "layer.1.q.bias": ()}


def test_names_of_nodes_match_where_nothing_else_does():
    assert chosen(exported(newer=True), train="node_0") == ["val_0"]
    assert chosen(exported(newer=False), train="/layer.1.q/*") == ["onnx::MatMul_25", "layer.1.q.bias"]
    with raises_sentence(
        "no_match", option="train", pattern="'layer.7.*'", kind="initializer", names="layer.0.q.weight"
    ):
        chosen(exported(newer=True), train="layer.7.*")


@pytest.mark.parametrize("text", ["", "[", "[1, 2]", "['a']", "{}", "(" * 5000])
def test_other_metadata_is_ignored(text):
    model = exported(newer=True)
    for node in model.graph.node:
        node.metadata_props[0].value = text
    assert [row.paths for row in onnxtrain.inspect(model).initializers] == [(), (), ()]


def test_the_command_line_shows_module_paths(tmp_path, capsys):
    from onnxtrain.cli import main

    onnx.save(exported(newer=True), tmp_path / "model.onnx")
    assert main(["inspect", str(tmp_path / "model.onnx")]) == 0
    assert "val_4 (layer.1.q.weight)" in capsys.readouterr().out


@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [True, False])
def test_files_of_both_exporters(dynamo, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    model = torch.nn.Sequential()
    model.add_module("body", torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)))
    model.add_module("head", torch.nn.Linear(4, 3))
    path = tmp_path / "model.onnx"
    options = {"external_data": False} if dynamo else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), (torch.randn(2, 5, 4),), path, dynamo=dynamo, verbose=False, **options)
    found = chosen(onnx.load(path), train="head.*")
    shapes = {tensor.name: list(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    assert sorted(map(tuple, (shapes[name] for name in found))) == [(3,), (4, 3)]
    assert len(chosen(onnx.load(path), train="body.2.*")) == 2


def test_source_lines_stay_in_the_file_only(tmp_path):
    model = exported(newer=True)
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="File model.py, line 7")
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error")
    written = trainer.training_model()
    assert {entry.key for node in written.graph.node for entry in node.metadata_props} == {"pkg.torch.onnx.name_scopes"}
    assert b"model.py" not in onnxtrain.lower(written).SerializeToString()
    trainer.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    assert [list(node.metadata_props) for node in saved.graph.node] == [
        list(node.metadata_props) for node in model.graph.node
    ]


def test_folded_batch_normalization_of_tf2onnx():
    """1 / sqrt(variance + epsilon) is no parameter; times a scale it is one, with a hint that Keras trains another."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 15]> f (float[n, 3] x) => (float[n, 2] y)
        { z = MatMul(x, w) a = Mul(z, r) b = Add(a, s) c = Mul(b, m) y = Add(c, t) }""")
    names = {"w": "dense/MatMul/ReadVariableOp:0", "r": "bn_1/batchnorm/Rsqrt:0", "s": "const_fold_opt__21"}
    names |= {"m": "bn_2_1/batchnorm/mul:0", "t": "bn_2_1/batchnorm/sub:0"}
    random = np.random.default_rng(0)
    for short, name in names.items():
        array = random.normal(size=(3, 2) if short == "w" else 2).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    trainer = onnxtrain.Trainer(model, loss="mse")
    assert set(trainer.parameters) == {*names.values()} - {names["r"]}
    (hint,) = trainer.hints
    assert re.match(r"tf2onnx computed bn_2_1/batchnorm/mul:0 from the scale and the running variance", str(hint))


@pytest.mark.parametrize("added", ["dense/BiasAdd/ReadVariableOp:0", "dense/Add/ReadVariableOp:0", None])
def test_a_file_of_tf2onnx_without_any_bias_gets_a_hint(added: str | None):
    """An untrained Keras network has biases of zeros, which its file lacks; a trained one has some."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 15]> f (float[n, 3] x) => (float[n, 2] y)
        { z = MatMul(x, w) y = Add(z, b) }""")
    names = {"w": "dense/Cast/ReadVariableOp:0", "b": added or "keras_tensor_1"}
    if added is None:
        model.graph.input.append(onnx.helper.make_tensor_value_info("keras_tensor_1", onnx.TensorProto.FLOAT, ["n", 2]))
    for short, shape in {"w": (3, 2), "b": 2}.items():
        if short == "w" or added:
            array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, names[short]))
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    if added:
        assert not onnxtrain.Trainer(model, loss="mse").hints
        return
    with warns_sentence("tensorflow_without_biases"):
        onnxtrain.Trainer(model, loss="mse")
