"""Saving changes the given initializers' data and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_examples import rich_model, small_model
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.protobuf_wire import Template


def full_model(opset: int) -> ModelProto:
    """Metadata, functions, doc strings, sparse initializers, training information; weights in every storage."""
    model = rich_model()
    model.opset_import[0].version = opset
    for holder in (model.graph, *model.functions):
        for node in holder.node:  # operators that are the same at all opsets of the test
            if node.op_type == "ReduceMean":
                node.op_type = "Neg"
                del node.attribute[:]
    branch = model.graph.node[-1].attribute[0].g
    branch.node[1].op_type = "Neg"
    del branch.node[1].attribute[:]
    model.functions[0].opset_import[0].version = opset
    initializers = model.graph.initializer
    initializers.append(numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "raw"))
    initializers.append(numpy_helper.from_array(np.arange(2000, dtype=np.float32), "large_raw"))
    initializers.append(numpy_helper.from_array(np.arange(3, dtype=np.float16), "raw_half"))
    initializers.append(helper.make_tensor("typed", TensorProto.FLOAT, [3], [1, 2, 3]))
    initializers.append(helper.make_tensor("double", TensorProto.DOUBLE, [2], [1, 2]))
    initializers.append(helper.make_tensor("half", TensorProto.FLOAT16, [3], [0, 1, 2]))
    initializers.append(helper.make_tensor("bfloat", TensorProto.BFLOAT16, [2], [0, 1]))
    initializers.append(helper.make_tensor("int32", TensorProto.INT32, [3], [0, 1, -2]))
    initializers.append(helper.make_tensor("int64", TensorProto.INT64, [2], [0, 300]))
    initializers.append(helper.make_tensor("uint64", TensorProto.UINT64, [2], [0, 1]))
    initializers.append(helper.make_tensor("complex", TensorProto.COMPLEX64, [2], [1j, 2]))
    initializers.append(helper.make_tensor("empty", TensorProto.FLOAT, [0], []))
    initializers.append(helper.make_tensor("scalar", TensorProto.FLOAT, [], [4]))
    return model


def new_values(file: ModelFile) -> dict[str, np.ndarray]:
    """Other values, also negative, NaN and infinite ones."""
    rng = np.random.default_rng(0)
    values = {}
    for name in file.names():
        old = file.value(name)
        kind = old.dtype.kind
        drawn = rng.integers(-40000, 40000, old.shape) if kind == "i" else rng.standard_normal(old.shape) * 1000
        if kind == "u":
            drawn = rng.integers(0, 1 << 63, old.shape, dtype=np.uint64) * np.uint64(2)
        new = np.asarray(drawn, old.dtype) if kind != "c" else (drawn + 1j).astype(old.dtype)
        if new.size > 1 and kind in "fV":
            new[(0,) * new.ndim], new[(-1,) * new.ndim] = np.nan, -np.inf
        values[name] = new
    return values


def with_new_data(proto: ModelProto, values: dict[str, np.ndarray]) -> ModelProto:
    """The expected model, made with ONNX's own functions."""
    expected = ModelProto()
    expected.CopyFrom(proto)
    for tensor in expected.graph.initializer:
        if tensor.name not in values:
            continue
        array = values[tensor.name]
        if tensor.HasField("raw_data"):
            tensor.raw_data = array.tobytes()
        else:
            field = helper.tensor_dtype_to_field(tensor.data_type)
            numbers = array.reshape(-1)
            if tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
                numbers = numbers.view(np.uint16)
            elif tensor.data_type == TensorProto.COMPLEX64:
                numbers = numbers.view(np.float32)
            tensor.ClearField(field)
            getattr(tensor, field).extend(numbers.tolist())
    return expected


@pytest.mark.parametrize("opset", [7, 11, 13, 17, 21, 26])
def test_every_other_byte_is_the_same(tmp_path: Path, opset: int) -> None:
    model = full_model(opset)
    path, saved = tmp_path / "a.onnx", tmp_path / "b.onnx"
    path.write_bytes(model.SerializeToString())
    file = ModelFile.load(path)
    values = new_values(file)
    file.save(saved, values)
    assert saved.read_bytes() == with_new_data(model, values).SerializeToString()
    again = ModelFile.load(saved)
    for name, value in values.items():
        assert again.value(name).tobytes() == value.tobytes()
    file.save(saved, {})
    assert saved.read_bytes() == path.read_bytes()


def test_some_values_leave_the_other_initializers(tmp_path: Path) -> None:
    model = full_model(18)
    file = ModelFile.load(model)
    values = {name: value for name, value in new_values(file).items() if name in ("typed", "half")}
    file.save(tmp_path / "m.onnx", values)
    assert (tmp_path / "m.onnx").read_bytes() == with_new_data(model, values).SerializeToString()


def test_views_of_any_layout_are_written(tmp_path: Path) -> None:
    file = ModelFile.load(small_model())
    value = np.arange(12, dtype=np.float32).reshape(2, 6).T[::2]
    file.save(tmp_path / "m.onnx", {"w": value})
    np.testing.assert_array_equal(ModelFile.load(tmp_path / "m.onnx").value("w"), value)


def varint(number: int) -> bytes:
    groups = []
    while True:
        number, low = number >> 7, number & 0x7F
        groups.append(low | (0x80 if number else 0))
        if not number:
            return bytes(groups)


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def test_bytes_that_a_serializer_would_normalize(tmp_path: Path) -> None:
    """Packed dims, unpacked and split lists, a repeated field, unknown fields, fields out of order, long lengths."""
    three = np.array([1, 2, 3], np.float32)
    head = varint(1 << 3) + b"\x03"  # dims = [3]
    tensors = {
        "packed_dims": field(1, b"\x03")
        + varint(2 << 3)
        + b"\x01"
        + field(8, b"packed_dims")
        + field(9, three.tobytes()),
        "out_of_order": field(9, three.tobytes()) + field(8, b"out_of_order") + head + varint(2 << 3) + b"\x01",
        "unpacked": head
        + varint(2 << 3)
        + b"\x01"
        + field(8, b"unpacked")
        + b"".join(varint(4 << 3 | 5) + value.tobytes() for value in three),
        "split": head
        + varint(2 << 3)
        + b"\x01"
        + field(8, b"split")
        + field(4, three[:2].tobytes())
        + varint(4 << 3 | 5)
        + three[2:].tobytes(),
        "twice": head + varint(2 << 3) + b"\x01" + field(8, b"twice") + field(9, b"old") + field(9, three.tobytes()),
        "half": head
        + varint(2 << 3)
        + b"\x0a"
        + field(8, b"half")
        + varint(5 << 3)
        + b"\x00"
        + field(5, varint(0x3C00) + varint(0x4000)),
    }
    value_info = helper.make_tensor_value_info("x", 1, [3]).SerializeToString()
    node = helper.make_node("Neg", ["x"], ["y"]).SerializeToString()
    output = helper.make_tensor_value_info("y", 1, [3]).SerializeToString()
    first, second = list(tensors.values())[:3], list(tensors.values())[3:]
    unknown = field(999, b"what a later version adds") + varint(998 << 3 | 1) + b"12345678"
    graphs = [
        field(12, output) + b"".join(field(5, tensor) for tensor in first) + unknown + field(2, b"g"),
        field(1, node) + b"".join(field(5, tensor) for tensor in second) + field(11, value_info),
    ]
    opset = field(8, helper.make_opsetid("", 18).SerializeToString())
    long_length = varint(7 << 3 | 2) + bytes([len(graphs[0]) & 0x7F | 0x80, len(graphs[0]) >> 7 | 0x80, 0]) + graphs[0]
    data = unknown + varint(1 << 3) + b"\x08" + long_length + opset + field(7, graphs[1])
    path, saved = tmp_path / "a.onnx", tmp_path / "b.onnx"
    path.write_bytes(data)
    assert ModelProto.FromString(data).SerializeToString() != data

    file = ModelFile.load(path)
    assert file.names() == list(tensors)
    file.save(saved, {})
    assert saved.read_bytes() == data

    new = np.array([7, -8, 9], np.float32)
    halves = np.array([-1, 0, 5], np.float16)
    file.save(saved, {name: new for name in tensors if name != "half"} | {"half": halves})
    again = ModelFile.load(saved)
    for name in tensors:
        np.testing.assert_array_equal(again.value(name), halves if name == "half" else new)
    expected = data.replace(three.tobytes(), new.tobytes()).replace(three[:2].tobytes(), new[:2].tobytes())
    for old, value in zip(three, new, strict=True):
        expected = expected.replace(varint(4 << 3 | 5) + old.tobytes(), varint(4 << 3 | 5) + value.tobytes())
    # Of the numbers of variable length, and of the lengths around them, only these change.
    codes = [varint(int(code)) for code in halves.view(np.uint16)]
    half = (
        tensors["half"]
        .replace(varint(5 << 3) + b"\x00", varint(5 << 3) + codes[0])
        .replace(field(5, varint(0x3C00) + varint(0x4000)), field(5, codes[1] + codes[2]))
    )
    grown = len(half) - len(tensors["half"])
    assert grown != 0
    expected = expected.replace(field(5, tensors["half"]), field(5, half))
    expected = expected.replace(
        varint(7 << 3 | 2) + varint(len(graphs[1])) + graphs[1][:4],
        varint(7 << 3 | 2) + varint(len(graphs[1]) + grown) + graphs[1][:4],
    )
    assert saved.read_bytes() == expected


def test_numbers_of_every_length_are_written(tmp_path: Path) -> None:
    edges = sorted({max(0, (1 << bits) + step) for bits in range(64) for step in (-1, 0, 1)} | {(1 << 64) - 1})
    model = small_model()
    model.graph.initializer.append(helper.make_tensor("u", TensorProto.UINT64, [len(edges)], [0] * len(edges)))
    file = ModelFile.load(model)
    value = np.array(edges, np.uint64)
    file.save(tmp_path / "m.onnx", {"u": value})
    expected = ModelProto()
    expected.CopyFrom(model)
    expected.graph.initializer[2].uint64_data[:] = edges
    assert (tmp_path / "m.onnx").read_bytes() == expected.SerializeToString()


def test_the_template_does_not_keep_large_data() -> None:
    model = small_model()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(100_000, np.float32), "large"))
    template = Template(model.SerializeToString())

    def kept(part: object) -> int:
        if isinstance(part, bytes):
            return len(part)
        inner = getattr(part, "parts", None) or [getattr(part, "payload", b"")]
        return sum(kept(item) for item in inner if isinstance(item, bytes) or hasattr(item, "header"))

    assert kept(template._model) < 1000


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            np.zeros((2, 3), np.float32),
            r"^The new value of 'w' is float32\[2, 3\], but the model has float32\[3, 2\]; ",
        ),
        (
            np.zeros((3, 2), np.float64),
            r"^The new value of 'w' is float64\[3, 2\], but the model has float32\[3, 2\]; ",
        ),
    ],
    ids=["shape", "type"],
)
def test_values_must_fit(tmp_path: Path, value: np.ndarray, message: str) -> None:
    file = ModelFile.load(small_model())
    with pytest.raises(ModelError, match=message + r"type and shape must stay the same\.$"):
        file.save(tmp_path / "m.onnx", {"w": value})
    with pytest.raises(ModelError, match=r"^The model has no initializer named 'v'"):
        file.save(tmp_path / "m.onnx", {"v": value})
    assert list(tmp_path.iterdir()) == []
