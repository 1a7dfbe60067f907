"""Sizes, text and locations in a model are checked before memory is allocated: each mistake is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_examples import small_model
from onnx import ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper, parser

import onnxtrain
from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.inference.forward import predict_all as predict
from peak_memory import PEAK
from sentences import raises_sentence

HUGE = 2**40


def sparse(dims: list[int], indices: list[int] | list[list[int]], values: int | None = None) -> SparseTensorProto:
    places = numpy_helper.from_array(np.array(indices, np.int64))
    weights = np.ones(len(indices) if values is None else values, np.float32)
    return SparseTensorProto(values=numpy_helper.from_array(weights, "s"), indices=places, dims=dims)


def with_sparse(*arguments: object, **options: object) -> ModelProto:
    model = small_model()
    model.graph.sparse_initializer.append(sparse(*arguments, **options))  # type: ignore[arg-type]
    return model


def with_constant(**fields: object) -> ModelProto:
    model = small_model()
    tensor = TensorProto(name="c", data_type=TensorProto.FLOAT, **fields)  # type: ignore[arg-type]
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))
    return model


def changed(change: Callable[[ModelProto], object]) -> ModelProto:
    model = small_model()
    change(model)
    return model


def branches(change: Callable[[ModelProto], object]) -> ModelProto:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        f (float[N] x, bool c) => (float[N] y)
        { [choice] y = If(c)<then_branch = t () => (float[N] a) { a = Neg(x) },
                             else_branch = e () => (float[N] b) { b = Abs(x) }> }
        """)
    change(model)
    return model


REFUSED = {
    "a huge sparse weight": (with_sparse([HUGE, 3], [0]), r"of shape \[1099511627776, 3\], which takes 13194139533312"),
    "a size that overflows": (with_sparse([2**62, 4, 12], [0]), r"which takes \d{21} bytes dense, as ONNX Run"),
    "a negative size": (with_sparse([-4, 3], [0]), r"The tensor 's' has the shape \[-4, 3\]; dimensions must not be"),
    "an index outside": (with_sparse([4, 3], [0, 12]), r"'s' of shape \[4, 3\] with the index 12, which is out of"),
    "a negative index": (with_sparse([4, 3], [-1]), r"with the index -1, which is out of range; export the"),
    "an index outside an axis": (with_sparse([4, 3], [[0, 3]]), r"with the index 3, which is out of range"),
    "fewer values than indices": (
        with_sparse([4, 3], [0, 1], values=1),
        r"with 1 values, but indices of shape \[2\]; it needs \[1\] or \[1, 2\]: export the model again\.$",
    ),
    "indices that are no integers": (
        changed(lambda model: model.graph.sparse_initializer.append(
            SparseTensorProto(values=numpy_helper.from_array(np.ones(1, np.float32), "s"),
                              indices=numpy_helper.from_array(np.zeros(1, np.float32)), dims=[3]))),
        r"whose values are not a list or whose indices are not integers; export the model again\.$",
    ),
    "a constant without its data": (with_constant(dims=[HUGE]), r"has 0 values for 'c', but its type and shape"),
    "a constant of another size": (
        with_constant(dims=[HUGE], raw_data=bytes(12)),
        r"has 12 bytes of data for 'c', but its type and shape \[1099511627776\] need 4398046511104; export it",
    ),
    "an output twice": (
        changed(lambda model: model.graph.output.append(model.graph.output[0])),
        r"has several outputs named 'y'; names must be unique: export the model again\.$",
    ),
    "an input of no type": (
        changed(lambda model: model.graph.input[0].type.tensor_type.ClearField("elem_type")),
        r"has the input 'x' without an element type, which ONNX Runtime needs; export the model again\.$",
    ),
    "an output of no type": (
        changed(lambda model: model.graph.output[0].type.tensor_type.ClearField("elem_type")),
        r"has the output 'y' without an element type, which ONNX Runtime needs; export the model again\.$",
    ),
    "a branch without outputs": (
        branches(lambda model: model.graph.node[0].attribute[0].g.ClearField("output")),
        r"has the If node 'choice' \(output 'y'\), whose then_branch has 0 outputs where the node has 1; export it",
    ),
    "a missing branch": (
        branches(lambda model: model.graph.node[0].attribute.pop()),
        r"is not valid ONNX: Required attribute 'else_branch' is missing; export it again\.$",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(model: ModelProto, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    for given in (model, tmp_path / "m.onnx"):
        with pytest.raises(ModelError, match=message):
            ModelFile.load(given)


@pytest.mark.parametrize("where", ["graph", "node", "initializer", "value", "dimension", "metadata", "attribute"])
def test_invalid_text(tmp_path: Path, where: str) -> None:
    model = small_model()
    made = {
        "graph": lambda: setattr(model.graph, "name", "QQQQ"),
        "node": lambda: setattr(model.graph.node[0], "doc_string", "QQQQ"),
        "initializer": lambda: setattr(model.graph.initializer[0], "doc_string", "QQQQ"),
        "value": lambda: model.graph.value_info.append(helper.make_tensor_value_info("QQQQ", 1, [])),
        "dimension": lambda: setattr(model.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "QQQQ"),
        "metadata": lambda: model.metadata_props.add(key="QQQQ"),
        "attribute": lambda: model.graph.node[0].attribute.add(name="QQQQ", type=2),
    }
    made[where]()
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString().replace(b"QQQQ", b"\xff\xfe\xfd\xfc"))
    with raises_sentence("name_not_utf8", what=f"'{tmp_path}/m.onnx'"):
        ModelFile.load(tmp_path / "m.onnx")


def test_text_of_all_languages(tmp_path: Path) -> None:
    model = small_model()
    model.doc_string = "Größe 大きさ \U0001f642"
    file = ModelFile.load(model)
    file.save(tmp_path / "ä.onnx", {})
    assert (tmp_path / "ä.onnx").read_bytes() == model.SerializeToString()


def external(folder: Path, **entries: str) -> Path:
    model = small_model()
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(TensorProto(name="w", dims=[3, 2], data_type=1, data_location=TensorProto.EXTERNAL))
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "data").write_bytes(bytes(24))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"location": "a\0b"},
            r"is in 'a\\x00b', which is not a valid path: .*embedded null .*; export the model again\.$",
        ),
        ({"location": "loop"}, r"is in 'loop', which is not a valid path: .*; export the model again\.$"),
        ({"location": "loop/data"}, r"is in 'loop/data', which is not a valid path: "),
        (
            {"location": "d" * 5000},
            r"is in 'd{97}\.\.\.', which is not a valid path: File name too long; export the model ag",
        ),
        ({"location": "pipe"}, r"is in 'pipe', but there is no such file in"),
        ({"location": "data", "offset": "9" * 30}, r"has the offset or length '9{30}', not a number\.$"),
        ({"location": "data", "length": "9" * 9000}, r"has the offset or length '9{97}\.\.\.', not a number\.$"),
        ({"location": "data", "offset": "1_0"}, r"has the offset or length '1_0', not a number\.$"),
        (
            {"location": "data", "offset": str(2**62)},
            r"ends at byte 4611686018427387928, but the file 'data' has 24 bytes",
        ),
    ],
    ids=["nul", "loop", "below_loop", "long", "pipe", "overflow", "digits", "underscore", "far"],
)
def test_invalid_paths(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    path = external(tmp_path, **entries)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match=message):
        ModelFile.load(path)


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "zero"):
        with raises_sentence("device_as_model", what=tmp_path / name):
            ModelFile.load(tmp_path / name)
    with raises_sentence("model_cannot_be_read", label="loop'", reason="Too many levels of symbolic links; its"):
        ModelFile.load(tmp_path / "loop")
    with raises_sentence("impossible_file_name", what=f"'{tmp_path}/a\\x00b'"):
        ModelFile.load(tmp_path / "a\0b")


def test_what_says_to_be_empty_and_is_not() -> None:
    """Files of /proc have no size and may have no end."""
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("needs /proc")
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"is not an ONNX model|cannot be read"):
        ModelFile.load("/proc/self/pagemap")
    assert time.monotonic() - began < 60  # it has no end


_MEASURED = f"""{PEAK}
import sys, time
from onnxtrain.errors import OnnxTrainError
from onnxtrain.model_file.file import ModelFile
if "--inspect" in sys.argv:
    import onnxtrain.training.advice.inspection
before, began = peak(), time.process_time()
try:
    file = ModelFile.load(sys.argv[1])
    if "--inspect" in sys.argv:
        onnxtrain.inspect(sys.argv[1])
    print("loaded")
except OnnxTrainError as error:
    print(error)
print(peak() - before, time.process_time() - began)
"""


def measured(path: Path, *flags: str) -> tuple[str, float, float]:
    """The message of loading a file, and the bytes and seconds that it takes."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(path), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said, numbers = done.stdout.splitlines()
    return said, *map(float, numbers.split())  # type: ignore[return-value]


def test_large_files_that_are_not_models(tmp_path: Path) -> None:
    """A hole of 2 GiB costs nothing, nor does one inside a graph."""
    for head in (b"", b"\x08\x08", b"\x08\x08\x3a\xf0\xff\xff\xff\x07"):
        with (tmp_path / "m.onnx").open("wb") as file:
            file.write(head)
            file.truncate(2**31 - 16 + (8 if len(head) > 2 else 0))
        said, memory, seconds = measured(tmp_path / "m.onnx")
        assert "is not an ONNX model" in said or "is cut off" in said
        assert memory < 50e6
        assert seconds < 10


@pytest.mark.thorough
@pytest.mark.parametrize("unit", [b"\x08\x08", b"\x4a\x00", b"\x3a\x00"], ids=["numbers", "bytes", "graphs"])
def test_files_of_nothing_but_small_fields(tmp_path: Path, unit: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08" + unit * 3_000_000)
    said, memory, seconds = measured(tmp_path / "m.onnx")
    assert said.startswith(
        f"'{tmp_path / 'm.onnx'}' has more fields than any model, probably since its values are stored"
    )
    assert memory < 1.5e9
    assert seconds < 10


def test_numbers_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """As few exporters did: a run of them is one part of the template."""
    count = 200_000
    value = np.arange(count, dtype=np.float32)
    tagged = np.hstack([np.full((count, 1), 0x25, np.uint8), value.view(np.uint8).reshape(count, 4)]).tobytes()
    model = small_model()
    head = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[count]).SerializeToString()
    tensor = head + tagged
    graph = helper.make_graph([], "more", [], [])

    def field(number: int, payload: bytes) -> bytes:
        size, length = len(payload), b""
        while size > 0x7F:
            length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + payload

    assert graph.name
    data = model.SerializeToString() + field(7, field(5, tensor))
    (tmp_path / "m.onnx").write_bytes(data)
    file = ModelFile.load(tmp_path / "m.onnx")
    np.testing.assert_array_equal(file.value("v"), value)
    file.save(tmp_path / "same.onnx", {})
    assert (tmp_path / "same.onnx").read_bytes() == data
    file.save(tmp_path / "new.onnx", {"v": -value})
    np.testing.assert_array_equal(ModelFile.load(tmp_path / "new.onnx").value("v"), -value)
    assert (tmp_path / "new.onnx").stat().st_size == len(data)
    said, memory, _ = measured(tmp_path / "m.onnx")
    assert said == "loaded"
    assert memory < 40 * count + 5e6


def test_a_large_sparse_weight_is_dense_only_while_it_is_read(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[N,10] x) => (float[N,4000000] y) { y = MatMul(x, s) }""")
    indices = [*range(0, 39_000_000, 39_000), 39_999_999]
    model.graph.sparse_initializer.append(sparse([10, 4_000_000], indices))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    said, memory, _ = measured(tmp_path / "m.onnx")
    assert said == "loaded"
    assert memory < 20e6
    said, memory, seconds = measured(tmp_path / "m.onnx", "--inspect")
    assert said == "loaded"
    assert memory < 2.5 * 160e6
    assert seconds < 10
    weight = ModelFile.load(tmp_path / "m.onnx").training_model().graph.initializers["s"].const_value
    assert weight is not None
    array = weight.numpy()
    assert array.shape == (10, 4_000_000)
    assert np.flatnonzero(array).tolist() == indices


def test_an_output_that_is_a_weight(tmp_path: Path) -> None:
    model = small_model()
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 2]))
    found = predict(model, np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(found["w"], [[1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_a_convolution_without_kernel_shape(operator: str) -> None:
    """The checker accepts it, and the runtime takes the size from the weights."""
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18]>
        f (float[N,1,4,4] x) => (float[N,1,a,b] y) <float[1,1,2,2] w = {{1,2,3,4}}> {{ y = {operator}(x, w) }}""")
    x = np.ones((2, 1, 4, 4), np.float32)
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error")
    y = trainer.predict(x)
    assert trainer.train_step(x, np.zeros_like(y)) == pytest.approx(float(np.mean(np.square(y))))
    assert trainer.train_step(x, np.zeros_like(y)) < float(np.mean(np.square(y)))
