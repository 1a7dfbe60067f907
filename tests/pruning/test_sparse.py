"""Sparse files: smaller, the same to ONNX Runtime, and otherwise unchanged."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.errors import ModelError
from onnxtrain.pruning import save_sparse

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
    onnxtrain.model.file.ModelFile.load(model).save(tmp_path / "dense.onnx", new)
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
    onnxtrain.model.file.ModelFile.load(onnxtrain.examples.lenet_300_100()).save(tmp_path / "dense.onnx", new)
    np.testing.assert_array_equal(run(tmp_path / "sparse.onnx")[0], run(tmp_path / "dense.onnx")[0])


def test_errors(tmp_path):
    model = onnxtrain.examples.lenet_300_100()
    name = model.graph.initializer[0].name
    with pytest.raises(ModelError, match=r"has shape \(300, 784\), but its new value \(3,\)"):
        save_sparse(model, tmp_path / "sparse.onnx", {name: np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match="cannot be written: there is no folder"):
        save_sparse(model, tmp_path / "nowhere" / "sparse.onnx")
