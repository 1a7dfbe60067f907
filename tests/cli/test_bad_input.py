"""Invalid models and data: one sentence names the file, the value and the accepted ones; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_files import examples
from mistakes import Mistake, fit, nodes
from onnx import helper


def model(**changes: object) -> Callable[[Path], None]:
    """Change fields of the model file."""

    def spoil(folder: Path) -> None:
        proto = onnx.load(folder / "model.onnx")
        for name, value in changes.items():
            setattr(proto, name, value)
        (folder / "model.onnx").write_bytes(proto.SerializeToString())

    return spoil


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the bytes of the model file."""

    def spoil(folder: Path) -> None:
        path = folder / "model.onnx"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def opset(version: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        proto = onnx.load(folder / "model.onnx")
        proto.opset_import[0].version = version
        (folder / "model.onnx").write_bytes(proto.SerializeToString())

    return spoil


def external(location: str) -> Callable[[Path], None]:
    """Let the first weight lie in a data file that is not there, or that may not be read."""

    def spoil(folder: Path) -> None:
        proto = onnx.load(folder / "model.onnx")
        tensor = proto.graph.initializer[0]
        (folder.parent / "secret.bin").write_bytes(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, location)
        tensor.ClearField("raw_data")
        (folder / "model.onnx").write_bytes(proto.SerializeToString())

    return spoil


def data(**changes: np.ndarray | None) -> Callable[[Path], None]:
    """Replace arrays of the data file; None takes one out."""

    def spoil(folder: Path) -> None:
        arrays = examples() | changes
        np.savez(folder / "train.npz", **{name: array for name, array in arrays.items() if array is not None})

    return spoil


def with_value(name: str, value: float) -> np.ndarray:
    """An array of the data with one value replaced, in example 7."""
    array = examples()[name].copy()
    array[7] = value
    return array


def linear(**attributes: str) -> tuple[onnx.NodeProto, ...]:
    return (
        helper.make_node("MatMul", ["input", "weight"], ["product"]),
        helper.make_node("Mystery", ["product"], ["logits"], name="riddle", domain="my.domain", **attributes),
    )


MODELS = [
    Mistake("no model file", r"no file 'missing\.onnx'; check the path", ("inspect", "missing.onnx")),
    Mistake("not ONNX", r"'model\.onnx' is not an ONNX model", spoil=content(lambda _: b"PK\3\4 a zip file")),
    Mistake("empty model", r"'model\.onnx' is empty", spoil=content(lambda _: b"")),
    Mistake("truncated", r"'model\.onnx' is cut off: it has \d+ bytes", spoil=content(lambda b: b[: len(b) // 2])),
    Mistake("missing external data", r"'model\.onnx' .*weights\.bin", spoil=external("weights.bin")),
    Mistake("escaping external data", r"'model\.onnx' .*'\.\./secret\.bin'", spoil=external("../secret.bin")),
    Mistake("unknown opset", r"opset 28, but opsets 7 to \d+ are supported", spoil=opset(28)),
    Mistake("unknown IR", r"IR version 99, but ONNX Runtime supports 3 to \d+", spoil=model(ir_version=99)),
    Mistake(
        "no parameter",
        "no trainable parameter: it has no initializers",
        spoil=nodes(helper.make_node("Softmax", ["input"], ["logits"]), weights=False),
    ),
    Mistake("all frozen", "no trainable parameter: .*: frozen", fit("--freeze", "*")),
    Mistake(
        "no gradient",
        r"No gradient rule for 1 operator .*my\.domain::Mystery.*'riddle'.*register_gradient",
        spoil=nodes(*linear()),
    ),
]

DATA = [
    Mistake("no data file", r"'missing\.npz' does not exist", fit("--data", "missing.npz")),
    Mistake(
        "data is text",
        r"'train\.npz' starts with .* neither a \.npz nor a \.npy",
        spoil=lambda folder: ((folder / "train.npz").write_text("hello world"), None)[1],
    ),
    Mistake(
        "input missing",
        r"no array for input 'input': it holds 'label' and 'x'",
        spoil=data(input=None, x=np.zeros((3, 4))),
    ),
    Mistake("no target", r"holds only the input 'input': add an array of targets", spoil=data(label=None)),
    Mistake(
        "two targets",
        r"has 'label' and 'other' besides.* --target|has 'label' and 'other' besides",
        spoil=data(other=np.zeros(60)),
    ),
    Mistake("unknown target", r"no target 'labels': it holds 'input' and 'label'", fit("--target", "labels")),
    Mistake(
        "wrong size",
        r"shape \(60, 5\), but the model needs \(batch, 4\): axis 1 is 5 instead of 4",
        spoil=data(input=np.zeros((60, 5), np.float32)),
    ),
    Mistake(
        "wrong rank",
        r"rank 3 \(shape \(60, 2, 2\)\), but the model needs rank 2",
        spoil=data(input=np.zeros((60, 2, 2), np.float32)),
    ),
    Mistake(
        "wrong type", r"type complex128, but the model needs float32", spoil=data(input=np.zeros((60, 4), complex))
    ),
    Mistake(
        "lengths differ",
        r"different lengths: input 'input' has 60 examples, .* has 59",
        spoil=data(label=np.zeros(59, np.int64)),
    ),
    Mistake(
        "label too large",
        r"label 3 at example 7, but labels must be 0 to 2 \(3 classes\)",
        spoil=data(label=with_value("label", 3)),
    ),
    Mistake(
        "negative label", r"label -1 at example 7, but labels must be 0 to 2", spoil=data(label=with_value("label", -1))
    ),
    Mistake("fractional labels", r"the target array", spoil=data(label=np.linspace(0, 1, 60))),
    Mistake(
        "empty",
        r"'train\.npz' is empty: input 'input' has shape \(0, 4\)",
        spoil=data(input=np.zeros((0, 4), np.float32), label=np.zeros(0, np.int64)),
    ),
    Mistake("NaN", r"input 'input' holds nan at example 7: remove", spoil=data(input=with_value("input", np.nan))),
    Mistake("infinity", r"input 'input' holds inf at example 7", spoil=data(input=with_value("input", np.inf))),
]


@pytest.mark.parametrize("mistake", [*MODELS, *DATA], ids=str)
def test_ends_in_one_sentence(mistake, ends_in_one_sentence):
    ends_in_one_sentence(mistake)
