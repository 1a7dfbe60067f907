"""Saving a model with external data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_examples import external_model, run_file, small_model
from onnx import TensorProto, helper, numpy_helper, parser

from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
from peak_memory import PEAK
from sentences import raises_sentence


def test_external_data_is_copied_and_overwritten(tmp_path: Path) -> None:
    path = external_model(tmp_path / "a")
    saved = tmp_path / "b" / "tuned.onnx"
    saved.parent.mkdir()
    before = (path.read_bytes(), (tmp_path / "a" / "model.data").read_bytes())
    file = ModelFile.load(path)
    value = np.full((300, 4), 0.25, np.float32)
    file.save(saved, {"w": value})
    assert (path.read_bytes(), (tmp_path / "a" / "model.data").read_bytes()) == before
    info = {entry.key: entry.value for entry in file.declared("w").external_data}
    begin, end = int(info["offset"]), int(info["offset"]) + int(info["length"])
    data = (tmp_path / "b" / "tuned.onnx.data").read_bytes()
    assert data == before[1][:begin] + value.tobytes() + before[1][end:]
    x = np.ones((1, 300), np.float32)
    np.testing.assert_allclose(run_file(saved, x), 2 * (75 + file.value("b").mean()), rtol=1e-5)


def test_saving_over_the_original_keeps_open_maps(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    with (tmp_path / "model.data").open("ab") as stream:
        stream.write(bytes(2 << 20))  # large enough to be mapped
    file = ModelFile.load(path)
    mapped = file.value("w")
    copy = mapped.copy()
    for factor in (2, 4):
        file.save(path, {"w": copy * factor})
        np.testing.assert_array_equal(mapped, copy)
        np.testing.assert_array_equal(file.value("w"), copy * factor)
        np.testing.assert_array_equal(ModelFile.load(path).value("w"), copy * factor)
    names = sorted(item.name for item in tmp_path.iterdir())
    assert names[:2] == ["model.data", "model.onnx"]  # the first one is not onnxtrain's to remove
    assert len(names) == 3
    assert re.fullmatch(r"model\.onnx\.[0-9a-f]{8}\.data", names[2])


def test_data_files_in_folders_and_of_other_tensors_are_copied(tmp_path: Path) -> None:
    """Also those that only a subgraph or a Constant uses."""
    (tmp_path / "a" / "parts" / "deep").mkdir(parents=True)
    value = np.arange(4, dtype=np.float32)
    (tmp_path / "a" / "parts" / "deep" / "w.bin").write_bytes(value.tobytes())
    (tmp_path / "a" / "constant.bin").write_bytes((value + 1).tobytes())
    (tmp_path / "a" / "inner.bin").write_bytes((value + 2).tobytes())

    def external(name: str, location: str) -> TensorProto:
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=location)
        return tensor

    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 13]>
        g (float[4] x) => (float[4] y) { a = Add(x, w) b = Add(a, c) yes = Constant<value = bool {1}>()
            y = If(yes) <then_branch = t () => (float[4] p) { p = Add(b, inner) },
                         else_branch = e () => (float[4] q) { q = Identity(b) }> }
        """)
    model.graph.initializer.append(external("w", "parts/deep/w.bin"))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=external("c", "constant.bin")))
    model.graph.node[-1].attribute[0].g.initializer.append(external("inner", "inner.bin"))
    path = tmp_path / "a" / "m.onnx"
    path.write_bytes(model.SerializeToString())
    file = ModelFile.load(path)
    assert file.training_model().opset_imports[""] == 18
    (tmp_path / "b").mkdir()
    file.save(tmp_path / "b" / "m.onnx", {"w": value * 10})
    stored = {item.read_bytes() for item in (tmp_path / "b").glob("m.onnx*.data")}
    assert stored == {array.tobytes() for array in (value * 10, value + 1, value + 2)}
    saved = ModelFile.load(tmp_path / "b" / "m.onnx")
    np.testing.assert_array_equal(saved.value("w"), value * 10)
    assert sorted(item.name for item in (tmp_path / "b").iterdir())[1:] == [
        "m.onnx.1.data",
        "m.onnx.2.data",
        "m.onnx.data",
    ]


def test_the_data_of_another_model_is_not_replaced(tmp_path: Path) -> None:
    file = ModelFile.load(external_model(tmp_path / "a"))
    before = (tmp_path / "a" / "model.data").read_bytes()
    file.save(tmp_path / "a" / "tuned.onnx", {})
    assert (tmp_path / "a" / "tuned.onnx.data").read_bytes() == before
    (tmp_path / "b").mkdir()
    for name in ("model.data", "tuned.onnx.data"):
        (tmp_path / "b" / name).write_bytes(b"another model's")
    file.check_writable(tmp_path / "b" / "tuned.onnx")
    file.save(tmp_path / "b" / "tuned.onnx", {})
    assert (tmp_path / "a" / "model.data").read_bytes() == before
    assert all((tmp_path / "b" / name).read_bytes() == b"another model's" for name in ("model.data", "tuned.onnx.data"))
    assert (tmp_path / "b" / "tuned.onnx.00000000.data").read_bytes() == before
    onnx.load(tmp_path / "b" / "tuned.onnx")
    (tmp_path / "b" / "tuned.onnx").unlink()
    (tmp_path / "b" / "model.data").unlink()
    file.save(tmp_path / "b" / "tuned.onnx", {})
    file.save(tmp_path / "b" / "tuned.onnx", {})  # one's own result may be replaced


def shared_model(folder: Path, ranges: list[tuple[int, int]]) -> ModelFile:
    model = small_model()
    (folder / "d").write_bytes(bytes(64))
    for index, (offset, count) in enumerate(ranges):
        tensor = model.graph.initializer.add(
            name=f"s{index}", data_type=TensorProto.FLOAT, dims=[count], data_location=TensorProto.EXTERNAL
        )
        for key, value in (("location", "d"), ("offset", str(offset)), ("length", str(4 * count))):
            tensor.external_data.add(key=key, value=value)
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return ModelFile.load(path)


def test_initializers_that_share_external_bytes(tmp_path: Path) -> None:
    file = shared_model(tmp_path, [(0, 2), (0, 2), (8, 2)])
    one, two = np.ones(2, np.float32), np.full(2, 2, np.float32)
    file.save(file.path or "", {"s0": one, "s1": one, "s2": two})
    (data,) = tmp_path.glob("m.onnx.*.data")
    assert data.read_bytes()[:16] == one.tobytes() + two.tobytes()
    for values in ({"s0": one, "s1": two}, {"s1": two}):
        with raises_sentence("initializers_share_bytes", what="d", got=["s0", "s1"], widest="'s0'", name="'s1'"):
            file.save(file.path or "", values)
    assert data.read_bytes()[:16] == one.tobytes() + two.tobytes()
    assert list(tmp_path.glob("*.data")) == [data]


def test_overlapping_external_bytes(tmp_path: Path) -> None:
    file = shared_model(tmp_path, [(0, 8), (4, 1), (16, 2), (32, 1)])
    file.save(file.path or "", {"s3": np.ones(1, np.float32)})
    with pytest.raises(ModelError, match="'s0' and 's2' share bytes"):
        file.save(file.path or "", {"s2": np.ones(2, np.float32)})


_LARGE_SAVE = f"""{PEAK}
import sys
import numpy as np
from onnxtrain.model_file.file import ModelFile

source, target = sys.argv[1:]
file = ModelFile.load(source)
before = peak()
training = file.training_model()
assert training.graph.initializers["small"].const_value.numpy()[0] == 0
file.save(target, {{"small": np.full(1000, 3, np.float32)}})
print(peak() - before)
"""


@pytest.mark.slow
def test_a_model_of_more_than_two_gigabytes(tmp_path: Path) -> None:
    """Loaded, upgraded and saved with little memory; the data is a sparse file, made in no time."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 13]>
        g (float[n,1000] x) => (float[n] y)
        { a = Mul(x, small) b = MatMul(a, large) y = ReduceSum<keepdims = 0>(b, axes) }
        """)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "axes"))
    columns = 625_000  # 1000 rows of float32: 2.5e9 bytes
    for name, dims, offset in (("large", [1000, columns], 0), ("small", [1000], 4000 * columns)):
        tensor = model.graph.initializer.add(
            name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL
        )
        length = 4 * int(np.prod(dims))
        for key, value in (("location", "weights.data"), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source, target = tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx"
    source.write_bytes(model.SerializeToString())
    size = 4000 * columns + 4000
    with (tmp_path / "a" / "weights.data").open("wb") as stream:
        stream.truncate(size)
        stream.seek(123_456_789)
        stream.write(b"a mark")
    process = subprocess.run(
        [sys.executable, "-c", _LARGE_SAVE, str(source), str(target)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 300e6
    copied = np.memmap(tmp_path / "b" / "m.onnx.data", np.uint8, "r")
    assert len(copied) == size
    assert bytes(copied[123_456_789:][:6]) == b"a mark"
    assert np.count_nonzero(copied[: 4000 * columns]) == 6
    np.testing.assert_array_equal(ModelFile.load(target).value("small"), 3)


@pytest.mark.parametrize(
    ("locations", "expected"),
    [
        (["model.onnx.data"], ["tuned.onnx.data"]),
        (["model.onnx_data"], ["tuned.onnx_data"]),
        (["model.onnx.data", "model.onnx.1.data"], ["tuned.onnx.data", "tuned.onnx.1.data"]),
        (["weights.bin"], ["tuned.onnx.data"]),
        (["model.onnx_data", "model.onnx_data_1"], ["tuned.onnx_data", "tuned.onnx_data_1"]),
        (["one", "two"], ["tuned.onnx.data", "tuned.onnx.1.data"]),
        (["parts/model.onnx.data"], ["tuned.onnx.data"]),
        (["numpy.py"], ["tuned.onnx.data"]),
        (["x/conftest.py", "hooks/pre-commit"], ["tuned.onnx.data", "tuned.onnx.1.data"]),
    ],
)
@pytest.mark.parametrize("as_object", [False, True])
def test_a_model_is_saved_beside_itself(
    tmp_path: Path, locations: list[str], expected: list[str], as_object: bool
) -> None:
    """A new output gets new data files, named after it; the original's stay unchanged."""
    model = small_model()
    value = np.arange(4, dtype=np.float32)
    for index, location in enumerate(locations):
        (tmp_path / location).parent.mkdir(exist_ok=True)
        (tmp_path / location).write_bytes((value + index).tobytes())
        tensor = model.graph.initializer.add(
            name=f"s{index}", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL
        )
        tensor.external_data.add(key="location", value=location)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    file = (
        ModelFile.load(onnx.load(path, load_external_data=False), folder=tmp_path)
        if as_object
        else ModelFile.load(path)
    )
    target = tmp_path / "tuned.onnx"
    file.check_writable(target)
    for factor in (10, 20):  # also over the saved model
        file.save(target, {"s0": value * factor})
        assert {each: each.read_bytes() for each in before} == before
        saved = ModelFile.load(target)
        np.testing.assert_array_equal(saved.value("s0"), value * factor)
        for index in range(1, len(locations)):
            np.testing.assert_array_equal(saved.value(f"s{index}"), value + index)
        made = {each.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*") if each.is_file()}
        made -= {each.relative_to(tmp_path).as_posix() for each in before} | {"tuned.onnx"}
        if factor == 10 and not as_object:
            assert made == set(expected)
        assert len(made) == len(locations)
        assert as_object or all(Path(name).name.startswith("tuned.") for name in made)


@pytest.mark.parametrize(
    ("location", "folder"),
    [("model.onnx", "."), ("model.onnx", "away"), ("saved.onnx", "away"), ("./saved.onnx", "away")],
)
def test_data_are_never_written_onto_the_model(tmp_path: Path, location: str, folder: str) -> None:
    """The location of the data may be the name of the model itself, or of the new one."""
    model = small_model()
    tensor = model.graph.initializer.add(
        name="s", data_type=TensorProto.UINT8, dims=[16], data_location=TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value=location)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    if location != "model.onnx":
        (tmp_path / location).write_bytes(bytes(range(16)))
    expected = (tmp_path / location).read_bytes()[:16]
    if location == "model.onnx":
        tensor.external_data.add(key="length", value="16")
        path.write_bytes(model.SerializeToString())
        expected = path.read_bytes()[:16]
    (tmp_path / folder).mkdir(exist_ok=True)
    file = ModelFile.load(path)
    file.save(tmp_path / folder / "saved.onnx", {})
    saved = onnx.load(tmp_path / folder / "saved.onnx")
    assert {each.name: each.raw_data for each in saved.graph.initializer}["s"] == expected
