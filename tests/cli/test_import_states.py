"""`export --describe` and `import-states`: import of states that were trained elsewhere."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx
import pytest
from mistakes import Mistake
from onnx import numpy_helper, parser
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.plugins

EXPORT = ("export", "model.onnx", "--loss", "softmax_cross_entropy", "--states", "states.safetensors")
IMPORT = ("import-states", "model.onnx", "states.safetensors", "-o", "tuned.onnx")


def weights(path):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_only_weights_change(files, success):
    success(*EXPORT)
    states = load_file(files / "states.safetensors")
    states["layer1.bias"] += 1
    save_file(states, files / "states.safetensors")
    out = success(*IMPORT).out
    assert "4 tensors" in out
    assert "9 states of the optimizer" in out
    old, new = weights(files / "model.onnx"), weights(files / "tuned.onnx")
    np.testing.assert_array_equal(new["layer1.bias"], old["layer1.bias"] + 1)
    changed = onnx.load(files / "tuned.onnx")
    for tensor in changed.graph.initializer:
        if tensor.name == "layer1.bias":
            tensor.CopyFrom(numpy_helper.from_array(old["layer1.bias"], tensor.name))
    assert changed == onnx.load(files / "model.onnx")


def test_names_of_columns_and_labels_go_along(files, success):
    names = '{"columns": {"input": ["a", "b", "c", "d"]}, "labels": ["x", "y", "z"]}'
    (files / "model.labels.json").write_text(names)
    success(*EXPORT)
    success(*IMPORT)
    assert json.loads((files / "tuned.labels.json").read_text()) == json.loads(names)


def test_describe(files, success):
    made = success(*EXPORT, "--step-graph", "step.onnx", "--static", "N=8", "--describe").out
    read = success("export", "step.onnx", "--describe").out
    assert read in made
    for words in (
        "target +target +int64 +\\[8\\]",
        "layer1.weight/V +optimizer +float",
        "loss +loss before the update",
    ):
        assert re.search(words, read), words


def spoil_states(**arrays):
    return lambda folder: save_file(arrays, folder / "states.safetensors")


@pytest.mark.parametrize(
    "mistake",
    [
        Mistake("no file", "'states.safetensors' cannot be read: No such file", IMPORT),
        Mistake(
            "no safetensors",
            "is not a file of states as safetensors",
            IMPORT,
            lambda folder: (folder / "states.safetensors").write_bytes(b"abc"),
        ),
        Mistake("other model", "has no weight of 'model.onnx'", IMPORT, spoil_states(x=np.ones(3))),
        Mistake(
            "not finite",
            "'layer1.bias' in 'states.safetensors' has values that are not finite",
            IMPORT,
            spoil_states(**{"layer1.bias": np.full(8, np.nan, np.float32)}),
        ),
        Mistake(
            "wrong shape",
            r"new value of 'layer1.bias' is float32\[7\]",
            IMPORT,
            spoil_states(**{"layer1.bias": np.zeros(7, np.float32)}),
        ),
        Mistake(
            "onto the model",
            "-o and MODEL|MODEL and --output|--output is the model itself|same file",
            (*IMPORT[:3], "-o", "model.onnx"),
            spoil_states(**{"layer1.bias": np.zeros(8, np.float32)}),
        ),
        Mistake("static without size", "--static is 'N'; it needs a name and a size", (*EXPORT, "--static", "N")),
        Mistake("portable kernels", "--portable makes a graph of", (*EXPORT, "--portable", "webgpu", "--kernels")),
        Mistake("nothing to write", "export has nothing to write; give --", EXPORT[:4]),
    ],
    ids=str,
)
def test_mistakes(mistake, ends_in_one_sentence):
    ends_in_one_sentence(mistake)


def test_tied_copies_come_home_together(files, success):
    model = onnx.load(files / "model.onnx")
    model.graph.initializer.append(
        numpy_helper.from_array(weights(files / "model.onnx")["layer1.weight"].T.copy(), "copy")
    )
    onnx.save(model, files / "model.onnx")
    new = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    save_file({"layer1.weight": new}, files / "states.safetensors")
    success(*IMPORT, "--tie")
    np.testing.assert_array_equal(weights(files / "tuned.onnx")["copy"], new.T)


def test_weights_that_are_constants(files, success):
    text = """<ir_version: 8, opset_import: ["": 18]>
        f (float[N, 2] input) => (float[N, 2] logits) {
            w = Constant <value = float[2, 2] {1.0, 2.0, 3.0, 4.0}> ()  logits = MatMul(input, w) }"""
    onnx.save(parser.parse_model(text), files / "model.onnx")
    success(*EXPORT)
    states = load_file(files / "states.safetensors")
    save_file(states | {"w": states["w"] + 1}, files / "states.safetensors")
    success(*IMPORT)
    (node, _) = onnx.load(files / "tuned.onnx").graph.node
    np.testing.assert_array_equal(numpy_helper.to_array(node.attribute[0].t), [[2, 3], [4, 5]])
