"""Files that each target one weakness: data and models at invalid paths, bytes, training_info."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto

from reliability.crafting import CRAFTED, base, crafted, write

# Places that are no files.


def _external(
    name: str, location: str, prepare: Callable[[Path], object] = lambda folder: None, **entries: str
) -> None:
    def make(folder: Path) -> None:
        model = base()
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **entries}.items():
            tensor.external_data.add(key=key, value=value)
        (folder / "data.bin").write_bytes(bytes(48))
        prepare(folder)
        write(folder, model)

    CRAFTED[name] = make


_external("data in a pipe", "pipe", lambda folder: os.mkfifo(folder / "pipe"))
_external("data behind a link out", "link", lambda folder: (folder / "link").symlink_to("/etc/hostname"))
_external("data behind a link to a device", "link", lambda folder: (folder / "link").symlink_to("/dev/zero"))
_external("data behind a link to itself", "link", lambda folder: (folder / "link").symlink_to("link"))
_external("data in a link to itself", "link/d", lambda folder: (folder / "link").symlink_to("link"))
_external("data in a folder", "folder", lambda folder: (folder / "folder").mkdir())
_external("data in the folder itself", ".")
_external("data in the model", "model.onnx")
_external("data at an absolute path", "/etc/hostname")
_external("data above", "../model.onnx")
_external("data behind the end", "data.bin", offset="40")
_external("data far behind the end", "data.bin", offset=str(2**62), length="48")
_external("data of a negative offset", "data.bin", offset="-8")
_external("data of another length", "data.bin", length="12")
_external("data of a length that is no number", "data.bin", length="many")
_external("data of an empty name", "")
_external("data of a name with an end", "data.bin\0x")
_external("data of a name that is too long", "d" * 5000)


@crafted("a pipe")
def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "model.onnx")


@crafted("a link to itself")
def _link(folder: Path) -> None:
    (folder / "model.onnx").symlink_to(folder / "model.onnx")


@crafted("a device that never ends")
def _device(folder: Path) -> None:
    (folder / "model.onnx").symlink_to("/dev/zero")


@crafted("a folder")
def _folder(folder: Path) -> None:
    (folder / "model.onnx").mkdir()


for _name, _content in {
    "nothing": b"",
    "zeros": bytes(1000),
    "text": b"import os\n",
    "a field of all lengths": b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    "a number without end": b"\x08" + b"\xff" * 100,
    "groups": b"\x0b" * 5000,
}.items():
    CRAFTED[f"bytes: {_name}"] = lambda folder, content=_content: write(folder, content)

# Training that is written down.


def _training(name: str, change: Callable[[ModelProto], object]) -> None:
    def make(folder: Path) -> None:
        import onnxtrain

        optimizer = onnxtrain.Momentum(0.1)
        model = onnxtrain.training_model(base(), loss="mean_squared_error", optimizer=optimizer)
        change(model)
        write(folder, model)

    CRAFTED[f"training: {name}"] = make


def _gradient(model: ModelProto) -> onnx.NodeProto:
    return next(node for node in model.training_info[0].algorithm.node if node.op_type == "Gradient")


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(attribute for attribute in node.attribute if attribute.name == name)


_training("no algorithm", lambda model: model.training_info[0].ClearField("algorithm"))
_training("no bindings", lambda model: model.training_info[0].ClearField("update_binding"))
_training("a state of no name", lambda model: setattr(model.training_info[0].update_binding[0], "key", "nobody"))
_training("a value of no name", lambda model: setattr(model.training_info[0].update_binding[0], "value", "nobody"))
_training(
    "a state twice",
    lambda model: model.training_info[0].update_binding.append(model.training_info[0].update_binding[0]),
)
_training("the gradient of nothing", lambda model: setattr(_attribute(_gradient(model), "y"), "s", b"nobody"))
_training(
    "the gradient of itself",
    lambda model: setattr(_attribute(_gradient(model), "y"), "s", _gradient(model).output[0].encode()),
)
_training("a name that is no text", lambda model: setattr(_attribute(_gradient(model), "y"), "s", b"\xff\xfe"))
_training("the same training twice", lambda model: model.training_info.append(model.training_info[0]))
_training("100 trainings", lambda model: model.training_info.extend([model.training_info[0]] * 100))
_training("an empty training", lambda model: model.training_info.add())
