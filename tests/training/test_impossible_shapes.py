"""Impossible shapes: sizes larger than any array next to a size of 0, so that no data is missing."""

from __future__ import annotations

import io
import json
import struct
import zipfile

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxtrain
from onnxtrain.data.files import read_arrays
from onnxtrain.errors import DataError, ModelError

SHAPE = (1 << 40, 0, 1 << 40)


def npy():
    header = str({"descr": "<f4", "fortran_order": False, "shape": SHAPE}).ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def npz(compression):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        archive.writestr("x.npy", npy())
    return content.getvalue()


def safetensors():
    header = json.dumps({"x": {"dtype": "F32", "shape": SHAPE, "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.npy", npy()),
        ("x.npz", npz(zipfile.ZIP_STORED)),
        ("x.npz", npz(zipfile.ZIP_DEFLATED)),
        ("x.safetensors", safetensors()),
    ],
    ids=["npy", "npz", "compressed", "safetensors"],
)
def test_data(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"which no array can have|cannot be read as a safetensors file"):
        np.array(read_arrays(tmp_path if name == "x.npy" else path)["x"])


@pytest.mark.parametrize("place", ["initializer", "constant", "external"])
def test_models(place, tmp_path):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=SHAPE)
    nodes = [helper.make_node("Identity", ["w"], ["y"])]
    if place == "constant":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    if place == "external":
        (tmp_path / "data.bin").touch()
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "data.bin"), ("length", "0")):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [], [output], [] if place == "constant" else [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for ask in (onnxtrain.gradient, lambda given: onnxtrain.Trainer(given, loss="mse")):
        with pytest.raises(ModelError, match="which is too large for any tensor"):
            ask(path)
    assert onnx.load(path, load_external_data=False) == model
