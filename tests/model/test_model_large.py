"""The data of a file's large initializers: held once, released, and read from the file again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import ModelError
from onnxtrain.model.file import ModelFile
from onnxtrain.pruning.sparse import save_sparse
from onnxtrain.training.weights.untie import untied

GONE = r"^The first values of 'w' are gone: training released them, and '.*m\.onnx' was changed since it was read; "


def model_of(*tensors: TensorProto) -> ModelProto:
    """y = x, with initializers that nothing reads."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        list(tensors),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def two_weights() -> ModelProto:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((40, 50)).astype(np.float32) for name in ("w", "frozen")}
    model = model_of(*(numpy_helper.from_array(array, name) for name, array in arrays.items()))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "small"))
    return model


def saved(model: ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    "element",
    [
        TensorProto.FLOAT,
        TensorProto.DOUBLE,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.FLOAT8E4M3FN,
        TensorProto.INT8,
        TensorProto.BOOL,
        TensorProto.INT64,
        TensorProto.COMPLEX64,
        TensorProto.INT4,
        TensorProto.UINT4,
    ],
)
def test_values_of_every_type(element: int, tmp_path: Path) -> None:
    packed = element in (TensorProto.INT4, TensorProto.UINT4)
    size = np.dtype(np.uint8 if packed else helper.tensor_dtype_to_np_dtype(element)).itemsize
    data = np.random.default_rng(0).integers(0, 2, 8192 * size // (2 if packed else 1), np.uint8).tobytes()
    tensor = helper.make_tensor("w", element, [64, 128], data, raw=True)
    model = model_of(tensor)
    file = ModelFile.load(saved(model, tmp_path))
    assert not file.proto.graph.initializer[0].HasField("raw_data")
    assert file.tensor("w") == tensor
    assert file.whole() == model
    value = file.value("w")
    np.testing.assert_array_equal(value, numpy_helper.to_array(tensor))
    assert not value.flags.writeable
    working = file.training_model().graph.initializers["w"].const_value
    assert working is not None
    np.testing.assert_array_equal(working.numpy(), value)
    assert working.nbytes == len(data)


def test_values_are_views() -> None:
    """Reading one copies nothing."""
    model = two_weights()
    file = ModelFile.load(model).changed(model)
    assert np.shares_memory(file.value("w"), file.value("w"))


def test_what_was_released_is_read_again(tmp_path: Path) -> None:
    model = two_weights()
    file = ModelFile.load(saved(model, tmp_path))
    working = file.training_model().graph.initializers["w"].const_value
    before = file.value("w").copy()
    file.release(["w", "small", "unknown"])
    assert not np.shares_memory(file.value("w"), file.value("w"))  # each is read for itself
    for value in (file.value("w"), working.numpy(), numpy_helper.to_array(file.tensor("w"))):
        np.testing.assert_array_equal(value, before)
    assert file.whole() == model


@pytest.mark.parametrize("change", ["other size", "same size", "replaced", "removed"])
def test_what_was_released_is_gone_with_the_file(change: str, tmp_path: Path) -> None:
    model = two_weights()
    path = saved(model, tmp_path)
    file = ModelFile.load(path)
    file.release(["w"])
    if change == "other size":
        path.write_bytes(path.read_bytes() + b"\x32\x00")
    elif change == "same size":
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(0, 1))  # a clock that is too coarse to see the change
    elif change == "replaced":
        file.save(path, {"w": np.zeros((40, 50), np.float32)})
    else:
        path.unlink()
    with pytest.raises(ModelError, match=GONE):
        file.value("w")
    # All else is there, and the model can be saved with new values for what is not.
    np.testing.assert_array_equal(file.value("frozen"), numpy_helper.to_array(model.graph.initializer[1]))
    new = np.ones((40, 50), np.float32)
    file.save(tmp_path / "new.onnx", {"w": new})
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(new, "w"))
    assert (tmp_path / "new.onnx").read_bytes()[: model.ByteSize()] == model.SerializeToString()


def test_a_model_in_memory_releases_nothing() -> None:
    file = ModelFile.load(two_weights())
    file.release(["w"])
    np.testing.assert_array_equal(file.value("w"), numpy_helper.to_array(file.proto.graph.initializer[0]))


def test_a_model_with_sparse_initializers_releases_nothing(tmp_path: Path) -> None:
    """Saving new values for a sparse one serialises all the others again."""
    model = two_weights()
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(
            numpy_helper.from_array(np.ones(1, np.float32), "s"), numpy_helper.from_array(np.array([3])), [8]
        )
    )
    path = saved(model, tmp_path)
    file = ModelFile.load(path)
    file.release(["w"])
    path.unlink()
    file.save(path, {"s": np.ones(8, np.float32)})
    for name in ("w", "frozen"):
        np.testing.assert_array_equal(ModelFile.load(path).value(name), file.value(name))


def test_sparse_storage_needs_only_what_has_no_new_value(tmp_path: Path) -> None:
    path = saved(two_weights(), tmp_path)
    file = ModelFile.load(path)
    file.release(["w"])
    new = np.eye(40, 50, dtype=np.float32)
    assert save_sparse(file, path, {"w": new}) == ["w"]  # over the file itself
    assert save_sparse(file, path, {"w": new}) == ["w"]
    np.testing.assert_array_equal(ModelFile.load(path).dense().value("w"), new)


def test_an_untied_model_releases_what_the_file_has(tmp_path: Path) -> None:
    """Two nodes read one vector: the second gets a copy, which the file does not have."""
    shared = numpy_helper.from_array(np.arange(2000, dtype=np.float32), "w")
    model = model_of(shared)
    model.graph.node.extend([helper.make_node("Add", ["x", "w"], [name]) for name in ("a", "b")])
    file = untied(ModelFile.load(saved(model, tmp_path)), True)
    assert file.names() == ["w", "w_2"]
    file.release(file.names())
    (tmp_path / "m.onnx").unlink()
    with pytest.raises(ModelError, match=GONE):
        file.value("w")
    np.testing.assert_array_equal(file.value("w_2"), np.arange(2000))


def test_lent_data_is_looked_at_in_the_file_until_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.model.reading._MAPPED_FROM", 0)
    model = two_weights()
    path = saved(model, tmp_path)
    file = ModelFile.load(path, lent=True)
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert all(np.array_equal(file.value(name), array) for name, array in expected.items())
    file.release(["w"])
    path.write_bytes(bytes(path.stat().st_size))  # in place: a mapping would have the new content
    np.testing.assert_array_equal(file.value("frozen"), expected["frozen"])
    with pytest.raises(ModelError, match=GONE):
        file.value("w")


CHANGES = {
    "cut off": lambda path: os.truncate(path, 100),
    "empty": lambda path: path.write_bytes(b""),
    "written anew": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


USES = {
    "read": lambda path: ModelFile.load(path, lent=True).value("layer1.weight"),
    "release": lambda path: ModelFile.load(path, lent=True).release([]),
    "train": lambda path: onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_written_into_while_it_is_lent_is_refused(
    change: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ModelFile.load

    def load_and_change(*arguments: object, **options: object) -> ModelFile:
        file = load(*arguments, **options)
        CHANGES[change](path)
        return file

    monkeypatch.setattr("onnxtrain.model.reading._MAPPED_FROM", 0)
    monkeypatch.setattr(ModelFile, "load", load_and_change)
    path = saved(onnxtrain.examples.mlp((40, 50, 3)), tmp_path)
    with pytest.raises(ModelError, match=r"^'.*m\.onnx' was changed while it was read; load the model from a file "):
        USES[use](path)


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_file_that_is_removed_or_replaced_as_a_whole_stays_lent(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxtrain.model.reading._MAPPED_FROM", 0)
    model = two_weights()
    path = saved(model, tmp_path)
    file = ModelFile.load(path, lent=True)
    if change == "removed":
        path.unlink()
    else:
        (tmp_path / "other").write_bytes(b"other")
        (tmp_path / "other").replace(path)
    np.testing.assert_array_equal(file.value("w"), numpy_helper.to_array(model.graph.initializer[0]))
    file.release([])
    np.testing.assert_array_equal(file.value("w"), numpy_helper.to_array(model.graph.initializer[0]))
