"""Sparse files: smaller, equivalent in ONNX Runtime, and otherwise unchanged."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.errors import ModelError
from onnxtrain.plugins.pruning import save_sparse
from sentences import raises_sentence

X = np.random.default_rng(1).normal(size=(7, 1, 28, 28)).astype(np.float32)


def values(model, density=0.1):
    generator = np.random.default_rng(0)
    found = {}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        found[tensor.name] = np.where(generator.random(array.shape) < density, array, 0).astype(array.dtype)
    return found


def run(path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: X})


def test_runs_identically_and_keeps_everything_else(tmp_path):
    model = onnxtrain.examples.lenet5_caffe()
    model.metadata_props.add(key="author", value="someone")
    model.graph.initializer[0].doc_string = "the first"
    new = values(model)
    onnxtrain.model_file.file.ModelFile.load(model).save(tmp_path / "dense.onnx", new)
    names = save_sparse(model, tmp_path / "sparse.onnx", new)
    assert names == [tensor.name for tensor in model.graph.initializer if len(tensor.dims) >= 2]
    for left, right in zip(run(tmp_path / "dense.onnx"), run(tmp_path / "sparse.onnx"), strict=True):
        np.testing.assert_array_equal(left, right)
    onnx.checker.check_model(str(tmp_path / "sparse.onnx"))
    written, dense = onnx.load(tmp_path / "sparse.onnx"), onnx.load(tmp_path / "dense.onnx")
    for sparse in written.graph.sparse_initializer:
        indices, array = numpy_helper.to_array(sparse.indices), new[sparse.values.name]
        assert indices.dtype == np.int64
        assert indices.ndim == 1
        np.testing.assert_array_equal(array.ravel()[indices], numpy_helper.to_array(sparse.values))
        assert list(sparse.dims) == list(array.shape)
    assert written.graph.sparse_initializer[0].values.doc_string == "the first"
    order = [tensor.name for tensor in dense.graph.initializer if tensor.name not in names]
    assert [tensor.name for tensor in written.graph.initializer] == order
    del written.graph.sparse_initializer[:], written.graph.initializer[:], dense.graph.initializer[:]
    assert written.SerializeToString(deterministic=True) == dense.SerializeToString(deterministic=True)
    assert (tmp_path / "sparse.onnx").stat().st_size < 0.35 * (tmp_path / "dense.onnx").stat().st_size


@pytest.mark.parametrize("density", [0.0, 0.32, 0.35])
def test_only_where_it_pays(tmp_path, density):
    model = onnxtrain.examples.lenet_300_100()
    name = model.graph.initializer[0].name
    flat = np.zeros(300 * 784, np.float32)
    flat[: round(density * flat.size)] = 1
    shape = tuple(model.graph.initializer[0].dims)
    names = save_sparse(model, tmp_path / "sparse.onnx", {name: flat.reshape(shape)})
    assert names == ([name] if density < 1 / 3 else [])
    run(tmp_path / "sparse.onnx")


def test_external_data_comes_inside(tmp_path):
    model = onnxtrain.examples.lenet_300_100()
    new = values(model)
    (tmp_path / "external").mkdir()
    path = tmp_path / "external" / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=16)
    save_sparse(path, tmp_path / "sparse.onnx", new)
    assert [item.name for item in tmp_path.iterdir() if item.is_file()] == ["sparse.onnx"]
    onnxtrain.model_file.file.ModelFile.load(onnxtrain.examples.lenet_300_100()).save(tmp_path / "dense.onnx", new)
    np.testing.assert_array_equal(run(tmp_path / "sparse.onnx")[0], run(tmp_path / "dense.onnx")[0])


def test_errors(tmp_path):
    model = onnxtrain.examples.lenet_300_100()
    name = model.graph.initializer[0].name
    with raises_sentence("new_value_shape", what="fc1.weight", got=(3,), wanted=(300, 784)):
        save_sparse(model, tmp_path / "sparse.onnx", {name: np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match="cannot be written: there is no folder"):
        save_sparse(model, tmp_path / "nowhere" / "sparse.onnx")


@pytest.mark.parametrize("element", [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE])
@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("zeros", [0.5, 1.0], ids=["dense", "sparse"])
def test_the_types_stay_the_models(tmp_path, element, given, zeros):
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", element, ["N", 6])],
        [onnx.helper.make_tensor_value_info("y", element, ["N", 4])],
        [numpy_helper.from_array(np.ones((6, 4), dtype), "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    value = np.ones((6, 4), given)
    value[: round(6 * zeros)] = 0
    assert save_sparse(model, tmp_path / "m.onnx", {"w": value}) == (["w"] if zeros == 1 else [])
    written = onnx.load(tmp_path / "m.onnx").graph
    tensors = [*written.initializer, *(sparse.values for sparse in written.sparse_initializer)]
    assert [tensor.data_type for tensor in tensors] == [element]
    assert all(sparse.indices.data_type == onnx.TensorProto.INT64 for sparse in written.sparse_initializer)
    onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])


def test_values_that_do_not_fit(tmp_path):
    model = onnxtrain.examples.mlp((4, 8, 3))
    with raises_sentence("new_value_type", what="layer1.weight", got="complex64", wanted="float32"):
        save_sparse(model, tmp_path / "m.onnx", {"layer1.weight": np.zeros((8, 4), np.complex64)})
    with pytest.raises(ModelError, match=r"no initializer named 'layer9'"):
        save_sparse(model, tmp_path / "m.onnx", {"layer9": np.zeros(1)})
    assert not list(tmp_path.iterdir())


def test_data_files_come_inside(tmp_path):
    """Of the model's own, when it is written onto itself, they stay: its owner reads on."""
    model = onnxtrain.examples.mlp((4, 8, 3))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    file = onnxtrain.model_file.file.ModelFile.load(tmp_path / "m.onnx")
    zeros = np.zeros((8, 4), np.float32)
    assert save_sparse(file, tmp_path / "m.onnx", {"layer1.weight": zeros}) == ["layer1.weight"]
    onnxruntime.InferenceSession((tmp_path / "m.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    assert file.value("layer2.weight").any()
