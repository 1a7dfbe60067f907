"""Reading a model's values, and the working copy for training."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from model_examples import external_model, run_file, small_model
from onnx import TensorProto, helper, numpy_helper, parser

from onnxtrain.model_file.file import ModelFile
from sentences import raises_sentence


def test_names_tensors_and_values() -> None:
    model = small_model()
    file = ModelFile.load(model)
    assert file.path is None
    assert file.proto is model
    assert file.opset == 18
    assert file.names() == ["w", "b"]
    assert file.declared("b") == model.graph.initializer[1]
    np.testing.assert_array_equal(file.value("w"), [[1, 2], [3, 4], [5, 6]])
    assert not file.value("w").flags.writeable
    with raises_sentence("no_initializer", what="v"):
        file.declared("v")


def test_opset_of_the_other_spelling_of_the_domain() -> None:
    model = small_model()
    model.opset_import[0].domain = "ai.onnx"
    file = ModelFile.load(model)
    assert file.opset == 18
    assert dict(file.training_model().opset_imports) == {"": 18}


def test_external_values_are_mapped(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    file = ModelFile.load(path)
    loaded = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    for name in file.names():
        np.testing.assert_array_equal(file.value(name), loaded[name])
        assert not file.value(name).flags.writeable
    assert not any(tensor.HasField("raw_data") for tensor in file.proto.graph.initializer if tensor.name == "w")
    assert file.value("w").base is not None  # a view of the file


def test_large_data_files_are_not_read_into_memory(tmp_path: Path) -> None:
    path = external_model(tmp_path, rows=300)
    data = tmp_path / "model.data"
    with data.open("ab") as stream:
        stream.truncate(1 << 34)  # 16 GiB, sparse: reading it would fail
    np.testing.assert_array_equal(ModelFile.load(path).value("w").shape, (300, 4))


def test_small_integers_in_external_data(tmp_path: Path) -> None:
    model = small_model(21)
    model.ir_version = 10
    packed = helper.make_tensor("q", TensorProto.INT4, [3], bytes([0x21, 0x0F]), raw=True)
    model.graph.initializer.append(packed)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="d", size_threshold=0)
    np.testing.assert_array_equal(ModelFile.load(path).value("q").astype(int), [1, 2, -1])


def test_training_model_is_upgraded_and_leaves_the_file_alone(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    file = ModelFile.load(path)
    before = file.proto.SerializeToString()
    model = file.training_model()
    assert file.proto.SerializeToString() == before
    assert model.opset_imports[""] == 18
    assert list(model.graph.initializers) == ["scale", "w", "b"]
    assert [value.name for value in model.graph.inputs] == ["x"]
    weight = model.graph.initializers["w"].const_value
    assert isinstance(weight, ir.ExternalTensor)
    np.testing.assert_array_equal(weight.numpy(), file.value("w"))
    # It runs, and computes the same.
    ir.save(model, tmp_path / "training.onnx")
    x = np.random.default_rng(1).standard_normal((5, 300)).astype(np.float32)
    np.testing.assert_array_equal(run_file(path, x), run_file(tmp_path / "training.onnx", x))


def test_training_model_does_not_copy_large_weights() -> None:
    model = small_model()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1000, np.float32), "large"))
    file = ModelFile.load(model)
    value = file.training_model().graph.initializers["large"].const_value
    assert isinstance(value, ir.LazyTensor)
    assert value.raw().raw is model.graph.initializer[2]
    value.name = "another"
    assert model.graph.initializer[2].name == "large"  # the working copy has a new name
    np.testing.assert_array_equal(value.numpy(), 1)


def test_training_model_has_initializers_that_are_not_inputs() -> None:
    model = parser.parse_model("""
        <ir_version: 3, opset_import: ["": 7]>
        g (float[n,3] x, float[3] b) => (float[n,3] y) <float[3] b = {1,2,3}> { y = Add(x, b) }
        """)
    made = ModelFile.load(model).training_model()
    assert [value.name for value in made.graph.inputs] == ["x"]
    assert list(made.graph.initializers) == ["b"]
    assert (made.ir_version, made.opset_imports[""]) == (8, 18)
    assert [value.name for value in model.graph.input] == ["x", "b"]


def test_training_model_keeps_functions_and_higher_versions() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["ai.onnx": 20, "local": 1]>
        g (float[n,3] x) => (float[n,3] y) { y = local.f(x) }
        <domain: "local", opset_import: ["ai.onnx": 20]> f (x) => (y) { y = ai.onnx.Neg(x) }
        """)
    made = ModelFile.load(model).training_model()
    assert (made.ir_version, dict(made.opset_imports)) == (10, {"": 20, "local": 1})
    (function,) = made.functions.values()
    assert function.name == "f"
    assert dict(function.opset_imports) == {"": 20}
    assert [node.domain for node in function] == [""]


@pytest.mark.parametrize("indices", [[1, 4], [[0, 1], [1, 1]]], ids=["linear", "coordinates"])
def test_sparse_initializers_become_dense(indices: list[object]) -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[2,3] x) => (float[2,3] y) { y = Add(x, s) }
        """)
    sparse = model.graph.sparse_initializer.add(dims=[2, 3])
    sparse.values.CopyFrom(numpy_helper.from_array(np.array([5, 7], np.float32), "s"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array(indices, np.int64)))
    file = ModelFile.load(model)
    assert file.names() == []
    dense = file.training_model().graph.initializers["s"].const_value
    assert dense is not None
    np.testing.assert_array_equal(dense.numpy(), [[0, 5, 0], [0, 7, 0]])


def test_external_data_of_a_model_in_memory(tmp_path: Path) -> None:
    model = onnx.load(external_model(tmp_path), load_external_data=False)
    file = ModelFile.load(model, folder=tmp_path)
    assert file.value("w").shape == (300, 4)
    with raises_sentence("model_cannot_be_used", reason="give the path of the model instead"):
        ModelFile.load(model)


@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_models_of_torch(tmp_path: Path, dynamo: bool) -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own deprecations
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).eval()
        path = tmp_path / "m.onnx"
        torch.onnx.export(module, (torch.zeros(1, 64),), path, dynamo=dynamo, verbose=False)
    file = ModelFile.load(path)
    assert file.training_model().opset_imports[""] >= 18
    saved = tmp_path / "saved"
    saved.mkdir()
    file.save(saved / "m.onnx", {})
    for written in tmp_path.glob("m.onnx*"):
        assert (saved / written.name).read_bytes() == written.read_bytes()
