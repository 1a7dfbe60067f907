"""The data of a file's large initializers: held once, released, and read from the file again."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import ModelError
from onnxtrain.model_file import large_data
from onnxtrain.model_file.file import ModelFile
from onnxtrain.parameters.ties import untied
from sentences import raises_sentence

GONE = r"^The initial values of 'w' are gone: training released them, and '.*m\.onnx' was changed since it was read; "


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


def test_released_data_is_read_again(tmp_path: Path) -> None:
    model = two_weights()
    file = ModelFile.load(saved(model, tmp_path))
    working = file.training_model().graph.initializers["w"].const_value
    before = file.value("w").copy()
    file.release(["w", "small", "unknown"])
    assert not np.shares_memory(file.value("w"), file.value("w"))  # each is read for itself
    for value in (file.value("w"), working.numpy()):
        np.testing.assert_array_equal(value, before)
    assert file.whole() == model


@pytest.mark.parametrize("change", ["other size", "same size", "replaced", "removed"])
def test_released_data_is_lost_with_the_file(change: str, tmp_path: Path) -> None:
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
    # Everything else is there, and the model can be saved with new values for the missing data.
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


@pytest.mark.plugins
def test_sparse_storage_needs_only_what_has_no_new_value(tmp_path: Path) -> None:
    path = saved(two_weights(), tmp_path)
    file = ModelFile.load(path)
    file.release(["w"])
    new = np.eye(40, 50, dtype=np.float32)
    assert onnxtrain.pruning.save_sparse(file, path, {"w": new}) == ["w"]  # over the file itself
    assert onnxtrain.pruning.save_sparse(file, path, {"w": new}) == ["w"]
    np.testing.assert_array_equal(ModelFile.load(path).dense().value("w"), new)


def test_an_untied_model_releases_what_the_file_has(tmp_path: Path) -> None:
    """Two nodes read one vector: the second gets a copy, which the file does not have."""
    shared = numpy_helper.from_array(np.arange(2000, dtype=np.float32), "w")
    model = model_of(shared)
    model.graph.node.extend([helper.make_node("Add", ["x", "w"], [name]) for name in ("a", "b")])
    file = untied(ModelFile.load(saved(model, tmp_path)), True, ModelFile.names)
    assert file.names() == ["w", "w_2"]
    file.release(file.names())
    (tmp_path / "m.onnx").unlink()
    with pytest.raises(ModelError, match=GONE):
        file.value("w")
    np.testing.assert_array_equal(file.value("w_2"), np.arange(2000))


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file is large enough to be mapped, and its large initializers to be read in the background."""
    monkeypatch.setattr("onnxtrain.model_file.file._MAPPED_FROM", 0)


@pytest.fixture
def held_back(mapped: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread that reads waits for this event."""
    go, fill = threading.Event(), large_data._fill

    def late(descriptor: int, run: large_data._Run) -> None:
        assert go.wait(60)
        fill(descriptor, run)

    monkeypatch.setattr(large_data, "_fill", late)
    yield go
    go.set()


@pytest.mark.usefixtures("mapped")
def test_lent_data_is_there_until_the_release(tmp_path: Path) -> None:
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


def test_readers_of_lent_data_wait_for_it(held_back: threading.Event, tmp_path: Path) -> None:
    model = two_weights()
    file = ModelFile.load(saved(model, tmp_path), lent=True)
    working = file.training_model().graph.initializers["w"]  # needs no data
    assert working.shape == (40, 50)
    threading.Timer(0.2, held_back.set).start()
    assert not held_back.is_set()
    np.testing.assert_array_equal(file.value("w"), numpy_helper.to_array(model.graph.initializer[0]))
    assert held_back.is_set()


def test_a_copy_of_the_process_reads_by_itself(held_back: threading.Event, tmp_path: Path) -> None:
    """After fork there is no thread in the copy."""
    model = two_weights()
    file = ModelFile.load(saved(model, tmp_path), lent=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says that fork and threads do not go together
        child = os.fork()
    if not child:
        held_back.set()
        same = np.array_equal(file.value("w"), numpy_helper.to_array(model.graph.initializer[0]))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: os.truncate(path, 5000),
    "empty": lambda path: path.write_bytes(b""),
    "written anew": lambda path: (path.write_bytes(bytes(path.stat().st_size)), os.utime(path, ns=(0, 1))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["after it is mapped", "after it is opened"])
def test_a_file_that_is_written_into_while_it_is_read_is_refused(
    change: str, when: str, mapped: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(onnxtrain.examples.mlp((40, 50, 3)), tmp_path)
    home, name = (large_data.BackgroundRead, "of") if when == "after it is mapped" else (large_data._Work, "_read")
    go_on = getattr(home, name)

    def after_the_change(self: object) -> object:
        CHANGES[change](path)
        return go_on(self)

    monkeypatch.setattr(home, name, after_the_change)
    with raises_sentence("changed_while_read", path=f"'{tmp_path}/m.onnx'"):
        onnxtrain.Trainer(path, loss="softmax_cross_entropy")


@pytest.mark.parametrize("change", ["removed", "replaced"])
@pytest.mark.parametrize("when", ["after it is mapped", "after it is opened"])
def test_a_file_that_is_removed_or_replaced_as_a_whole_is_read_as_it_was(
    change: str, when: str, mapped: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_weights()
    path = saved(model, tmp_path)
    home, name = (large_data.BackgroundRead, "of") if when == "after it is mapped" else (large_data._Work, "_read")
    go_on = getattr(home, name)

    def after_the_change(self: object) -> object:
        path.unlink()
        if change == "replaced":
            path.write_bytes(b"other")
        return go_on(self)

    monkeypatch.setattr(home, name, after_the_change)
    file = ModelFile.load(path, lent=True)
    for _ in range(2):
        np.testing.assert_array_equal(file.value("w"), numpy_helper.to_array(model.graph.initializer[0]))
        file.release([])


def test_what_the_system_says_of_a_file_that_cannot_be_read(
    mapped: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    file = ModelFile.load(saved(two_weights(), tmp_path), lent=True)
    for _ in range(2):
        with raises_sentence("model_cannot_be_read", label="m.onnx'", reason="Input/output error"):
            file.value("w")


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize(("count", "between"), [(3, 0), (1300, 0), (3, 1 << 18), (3, 100)])
@pytest.mark.parametrize("most", [1 << 30, 5000])
def test_all_parts_of_a_file_are_read(
    count: int, between: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges close together or far apart, more than one call reads, and short reads of the system."""
    rng = np.random.default_rng(0)
    tensors = []
    for number in range(count):
        tensors.append(numpy_helper.from_array(rng.standard_normal(1100).astype(np.float32), f"w{number}"))
        tensors[-1].doc_string = "-" * between
    preadv = os.preadv
    calls = []

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        given, left = [], most
        for buffer in buffers:
            given.append(buffer[:left])
            left -= len(given[-1])
            if not left:
                break
        return preadv(descriptor, given, offset)

    monkeypatch.setattr(os, "preadv", short)
    file = ModelFile.load(saved(model_of(*tensors), tmp_path), lent=True)
    for tensor in tensors:
        np.testing.assert_array_equal(file.value(tensor.name), numpy_helper.to_array(tensor))
    assert max(calls) <= 1024
    if most > 5000:
        assert len(calls) == {(1300, 0): 3, (3, 1 << 18): 3}.get((count, between), 1)


@pytest.mark.usefixtures("mapped")
def test_memory_of_an_initializer_is_taken_once(tmp_path: Path) -> None:
    model = two_weights()
    file = ModelFile.load(saved(model, tmp_path), lent=True)
    before = file.value("w").copy()
    assert file.take(before) is None  # an array of somebody's own
    value = file.value("w")
    assert file.take(value[1:]) is None
    assert file.take(value.T) is None
    taken = file.take(value)
    assert taken is not None
    assert taken.ctypes.data == value.ctypes.data
    assert not taken.ctypes.data % 64
    taken += 1
    np.testing.assert_array_equal(taken, before + 1)
    np.testing.assert_array_equal(file.value("w"), before)  # from the file
    assert file.take(file.value("w")) is None


@pytest.mark.usefixtures("mapped")
def test_memory_that_others_look_at_is_not_taken(tmp_path: Path) -> None:
    file = ModelFile.load(saved(two_weights(), tmp_path), lent=True)
    row = file.value("w")[3]
    assert file.take(file.value("w")) is None
    del row
    assert file.take(file.value("w")) is not None


@pytest.mark.usefixtures("mapped")
def test_a_training_continues_with_the_memory_that_was_read(tmp_path: Path) -> None:
    """No copy, the same steps as from a model in memory, and the file's values on request."""
    model = onnxtrain.examples.mlp((20, 64, 64, 3))
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    x, y = np.random.default_rng(0).standard_normal((8, 20)).astype(np.float32), np.arange(8) % 3
    losses = []
    for source in (str(path), model):
        trainer = onnxtrain.Trainer(source, loss="softmax_cross_entropy", optimizer=onnxtrain.SGD(0.1), threads=1)
        losses.append([trainer.train_step(x, y) for _ in range(3)])
        file = trainer.config.model
        if source is not model:
            reading = file._large._background
            assert reading is not None
            large = [name for name, array in trainer.parameters.items() if array.nbytes >= 4096]
            assert len(large) == 2
            assert {reading._names[trainer.parameters[name].ctypes.data] for name in large} == set(large)
        for tensor in model.graph.initializer:
            np.testing.assert_array_equal(file.value(tensor.name), numpy_helper.to_array(tensor))
    assert losses[0] == losses[1]
