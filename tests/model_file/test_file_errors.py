"""Unusable model files: one sentence each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_examples import external_model, small_model
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import newest_opset
from sentences import raises_sentence

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def refuse(model: str | os.PathLike[str] | ModelProto, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ModelFile.load(model)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_no_such_file(tmp_path: Path) -> None:
    refuse(tmp_path / "m.onnx", r"^There is no file '.*m\.onnx'; check the path\.$")


def test_a_folder(tmp_path: Path) -> None:
    refuse(tmp_path, r"is a folder; give the model file in it\.$")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small_model().SerializeToString())
    path.chmod(0)
    refuse(path, r"cannot be read: Permission denied; check the file\.$")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    refuse(tmp_path / "m.onnx", r"m\.onnx' is empty; an ONNX model is needed\.$")


def test_a_file_above_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "m.onnx").open("wb") as stream:
        stream.truncate(1 << 31)
    refuse(tmp_path / "m.onnx", r"is larger than 2 GiB, which an ONNX file cannot be; large weights must be external")


@pytest.mark.parametrize(
    "data",
    [
        b"This is a text.\nNot a model.\n",
        b'{"json": [1, 2, 3]}',
        PNG,
        b"PK\x03\x04" + bytes(100),
        bytes(100),
        b"\x93NUMPY\x01\x00v\x00" + bytes(100),
        *(np.random.default_rng(seed).bytes(1000) for seed in range(20)),
    ],
    ids=lambda data: repr(data[:4]),
)
def test_other_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    refuse(tmp_path / "m.onnx", r"is not an ONNX model: it starts with b.*; give a file that an ONNX exporter wrote\.$")


def test_a_model_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    """No length gives a traceback or a model with something missing."""
    model = small_model()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(50, np.float32), "more"))
    data = model.SerializeToString()
    path = tmp_path / "m.onnx"
    reasons = set()
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError) as caught:
            ModelFile.load(path)
        reasons.add(str(caught.value).split("'")[2].split(":")[0].split(",")[0])
    # Between two fields the rest is a valid message, without graph or opset.
    assert reasons <= {
        " is not an ONNX model",  # the first byte alone
        " is cut off",
        " has no graph; export the model again.",
        " does not import ONNX",
    }
    assert " is cut off" in reasons


def test_cut_off_message(tmp_path: Path) -> None:
    data = small_model().SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data[: len(data) // 2])
    refuse(
        tmp_path / "m.onnx", rf"is cut off: it has {len(data) // 2} bytes and the model in it is longer; copy it again"
    )


@pytest.mark.parametrize("seed", range(200))
def test_damaged_models_end_in_a_sentence_or_load(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(small_model().SerializeToString())
    for position in rng.integers(0, len(data), 3):
        data[position] = rng.integers(256)
    (tmp_path / "m.onnx").write_bytes(bytes(data))
    try:
        ModelFile.load(tmp_path / "m.onnx")
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 - loading is allowed too


def test_names_that_are_not_text(tmp_path: Path) -> None:
    data = small_model().SerializeToString().replace(b"MatMul", b"Mat\xfful")
    (tmp_path / "m.onnx").write_bytes(data)
    refuse(tmp_path / "m.onnx", r"m\.onnx' is damaged: it has a name that is not UTF-8 text; copy it again\.$")


def changed(change: Callable[[ModelProto], object]) -> ModelProto:
    model = small_model()
    change(model)
    return model


def set_opset(version: int) -> Callable[[ModelProto], object]:
    return lambda model: setattr(model.opset_import[0], "version", version)


def set_ir(version: int) -> Callable[[ModelProto], object]:
    return lambda model: setattr(model, "ir_version", version)


def cut_typed_data(model: ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("v", TensorProto.FLOAT, [3], [1, 2, 3]))
    del model.graph.initializer[-1].float_data[2]


def cut_raw_data(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "v"))
    model.graph.initializer[-1].raw_data = bytes(10)


def add_negative_size(model: ModelProto) -> None:
    model.graph.initializer.add(name="v", data_type=TensorProto.FLOAT, dims=[-1])


def add_undefined_type(model: ModelProto) -> None:
    model.graph.initializer.add(name="v", dims=[1], raw_data=b"1234")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.ClearField("graph"), r"^The model has no graph; export the model again\.$"),
        (lambda model: model.graph.ClearField("output"), r"^The model has a graph without outputs; export"),
        (set_opset(90), r"^The model has opset 90, but opsets 7 to \d+ are supported; export it at an opset in that"),
        (set_opset(6), r"^The model has opset 6, but opsets 7 to \d+ are supported; "),
        (set_ir(90), r"^The model has IR version 90, but ONNX Runtime supports 3 to \d+; export it for a version in"),
        (set_ir(2), r"^The model has IR version 2, but ONNX Runtime supports 3 to \d+; "),
        (lambda model: model.ClearField("opset_import"), r"^The model does not import ONNX's own operators \(domain "),
        (
            lambda model: setattr(model.graph.initializer[1], "name", "w"),
            r"^The model has several initializers named 'w'; names must be unique\.$",
        ),
        (
            lambda model: setattr(model.graph.node[0], "op_type", "MatMull"),
            r"^The model is not valid ONNX: No Op registered for MatMull with domain_version of 18; export it again\.$",
        ),
        (
            lambda model: model.graph.node[1].input.__setitem__(0, "absent"),
            r"^The model is not valid ONNX: .*absent.*; export it again\.$",
        ),
        (cut_typed_data, r"^The model has 2 values for 'v', but its type and shape \[3\] need 3; export it again\.$"),
        (cut_raw_data, r"^The model has 10 bytes of data for 'v', but its type and shape \[3\] need 12; export it"),
        (add_negative_size, r"^The tensor 'v' has the shape \[-1\]; dimensions must not be negative\.$"),
        (add_undefined_type, r"^The tensor 'v' has the element type 0, whose size is unknown; raw data needs a "),
    ],
    ids=[
        "no_graph",
        "no_outputs",
        "opset_too_new",
        "opset_too_old",
        "ir_too_new",
        "ir_too_old",
        "no_opset",
        "duplicate_initializers",
        "unknown_operator",
        "unknown_value",
        "typed_data",
        "raw_data",
        "negative_size",
        "undefined_type",
    ],
)
def test_invalid_models(change: Callable[[ModelProto], object], message: str) -> None:
    refuse(changed(change), message)


def test_what_only_the_conversion_notices() -> None:
    model = small_model()
    sparse = model.graph.sparse_initializer.add(dims=[3])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "s"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([2], np.int64)))
    file = ModelFile.load(model)
    sparse.indices.raw_data = np.array([7], np.int64).tobytes()
    with raises_sentence("cannot_be_understood", what="The model"):
        file.training_model()
    del model.graph.sparse_initializer[:]
    model.graph.output[0].type.tensor_type.elem_type = 99
    with raises_sentence("cannot_be_understood", what="The model"):
        file.training_model()


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(changed(set_opset(99)).SerializeToString())
    refuse(path, rf"^'.*m\.onnx' has opset 99, but opsets 7 to {newest_opset()}")


def test_what_the_checker_must_not_refuse() -> None:
    """Custom operators, the training domain's, values without a shape, external and sparse weights."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18, "vendor": 1, "ai.onnx.preview.training": 1]>
        g (float r, int64 t, float[3] x, float[3] g, float[3] h) => (float[3] new, float[3] state, float[3] y)
        { y = vendor.Anything<of = "this">(x)
          new, state = ai.onnx.preview.training.Adagrad(r, t, x, g, h) }
        """)
    for value in (model.graph.output[2], model.graph.input[2]):
        value.type.tensor_type.ClearField("shape")
    assert ModelFile.load(model).names() == []


# External data.


def edit(path: Path, **entries: str) -> None:
    """Change the external data of the weight "w"."""
    model = ModelProto.FromString(path.read_bytes())
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "w")
    known = {entry.key: entry.value for entry in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, value in known.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


def test_missing_external_data(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    (tmp_path / "model.data").unlink()
    refuse(
        path,
        r"^'.*' cannot be used: the external data of '\w+' is in 'model\.data', but there is no such file in .*; "
        r"put it there\.$",
    )


def test_external_data_that_is_cut_off(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    os.truncate(tmp_path / "model.data", 100)
    refuse(path, r"the external data of 'w' ends at byte \d+, but the file 'model\.data' has 100 bytes; it is cut off")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/etc/passwd", r"has the absolute path '/etc/passwd'; it must lie in the model's folder\.$"),
        ("../secret", r"is in '\.\./secret', which leaves the model's folder; it must lie inside\.$"),
        ("a/../../secret", r"is in 'a/\.\./\.\./secret', which leaves the model's folder"),
        ("a\\..\\secret", r"which leaves the model's folder"),
        ("link", r"is in 'link', a link to '.*secret' outside the model's folder; put the file itself there\.$"),
        ("linked/secret", r"is in 'linked/secret', a link to '.*secret' outside the model's folder"),
        ("hard", r"is in 'hard', which has several hard links; put a copy of the file there\.$"),
        ("", r"has no location; export the model again\.$"),
        (".", r"is in '\.', but there is no such file"),
    ],
)
def test_escaping_external_data(tmp_path: Path, location: str, message: str) -> None:
    path = external_model(tmp_path / "model")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(10_000))
    (tmp_path / "model" / "link").symlink_to(secret)
    (tmp_path / "model" / "linked").symlink_to(tmp_path)
    (tmp_path / "model" / "hard").hardlink_to(secret)
    edit(path, location=location)
    refuse(path, message)


def test_links_inside_the_folder_are_fine(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "model.data")
    edit(path, location="link")
    assert ModelFile.load(path).value("w").shape == (300, 4)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"length": "8"}, r"has 8 bytes from \d+, but its type and shape \[300, 4\] need 4800 bytes; export the model"),
        ({"offset": "-4"}, r"has 4800 bytes from -4, but"),
        ({"offset": "ten"}, r"has the offset or length 'ten', not a number\.$"),
    ],
)
def test_wrong_external_entries(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    path = external_model(tmp_path)
    edit(path, **entries)
    refuse(path, message)


def test_functions_that_become_too_many_nodes() -> None:
    """A file of a few kilobytes that would expand to far more is refused before any expansion."""
    calls = "".join(
        f'<domain: "own", opset_import: ["": 18, "own": 1]> f{level} (a) => (c) {{ b = {inner}(a) c = {inner}(b) }}'
        for level, inner in enumerate(["Neg", *(f"own.f{level}" for level in range(39))])
    )
    head = '<ir_version: 10, opset_import: ["": 18, "own": 1]>'
    branch = "{{ {0} = own.f39(x) }}"
    branches = (
        f"then_branch = t () => (float a) {branch.format('a')}, else_branch = e () => (float b) {branch.format('b')}"
    )
    choice = f"If (c) <{branches}>"
    for body in ("y = own.f39(x)", f"c = Cast<to = 9>(x) y = {choice}"):
        model = parser.parse_model(f"{head} g (float x) => (float y) {{ {body} }} {calls}")
        with raises_sentence("functions_expand", what="The model", got="more than 1,000,000,000,000", wanted=16384):
            ModelFile.load(model)
    few, many = (parser.parse_model(f"{head} g (float x) => (float y) {{ y = own.f{n}(x) }} {calls}") for n in (12, 13))
    ModelFile.load(few)
    with pytest.raises(ModelError, match=r"expand to 32,766 nodes"):
        ModelFile.load(many)


@pytest.mark.parametrize("operator", ["Constant", "Identity", "Transpose", "Cast", "Add", "MatMul", "DequantizeLinear"])
def test_nodes_without_outputs(tmp_path: Path, operator: str) -> None:
    """A model without initializers, whose weights are looked for before it is checked."""
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[N,2] x) => (float[N,2] y)
        { w = Constant<value = float[2,2] {1, 2, 3, 4}>() v = Identity(w) y = MatMul(x, v) }"""
    for place in range(3):
        model = parser.parse_model(text)
        model.graph.node[place].op_type = operator
        del model.graph.node[place].output[:]
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        with raises_sentence("not_valid_onnx"):
            ModelFile.load(tmp_path / "model.onnx")


@pytest.mark.parametrize("says", ["", "\n", "Two lines.\nAnd another."])
def test_a_checker_that_says_little(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: ModelProto) -> None:
        raise onnx.checker.ValidationError(says)

    monkeypatch.setattr(onnx.checker, "check_model", fail)
    expected = "Two lines" if says.strip() else "ValidationError without a message"
    refuse(small_model(), f"is not valid ONNX: {expected}; export it again")


FLOATS = {name: [0.5, 0.5] for name in ("coefficients", "intercepts", "offset", "scale")}
ATTRIBUTES = ({}, {"value_float": 0.5}, FLOATS | {"targets": 2}, FLOATS | {"post_transform": b"\xff"})


@pytest.mark.parametrize("attributes", ATTRIBUTES, ids=["none", "half", "linear", "not UTF-8"])
def test_nodes_without_inputs_or_outputs(attributes: dict[str, object]) -> None:
    """The search for weights runs before the checker, so it accepts invalid nodes."""
    operators = sorted({(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()})
    for domain, operator in operators:
        for inputs, outputs in (([], []), (["x"], []), ([], ["y"])):
            node = helper.make_node(operator, inputs, outputs, domain=domain, **attributes)
            value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
            model = helper.make_model(helper.make_graph([node], "g", [value], [value]))
            model.opset_import.add(domain="ai.onnx.ml", version=1)
            with contextlib.suppress(ModelError):
                ModelFile.load(model)
