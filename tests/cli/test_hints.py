"""Hints on the command line: printed once, with names of flags."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


@pytest.fixture
def language_model(files):
    table = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["wte", "ids"], ["h"]),
        helper.make_node("Dropout", ["h", "ratio", "on"], ["d"]),
        helper.make_node("MatMul", ["d", "head"], ["y"]),
    ]
    arrays = {"wte": table, "head": table.T.copy(), "ratio": np.float32(0.5), "on": np.asarray(True)}
    graph = helper.make_graph(
        nodes,
        "lm",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 12])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, files / "lm.onnx")
    ids = np.random.default_rng(1).integers(0, 12, 32)
    np.savez(files / "ids.npz", ids=ids, label=(ids + 1) % 12)
    return files


APART = (
    "hint: head holds the same values as wte, transposed, and they are trained separately; if the model ties them, --"
)
LOSS = ("--loss", "softmax_cross_entropy")


def test_fit_says_hints_once(language_model, success):
    result = success("fit", "lm.onnx", "--data", "ids.npz", *LOSS, "--output", "out.onnx")
    assert (result.out + result.err).count(APART) == 1
    assert "hint: The file sets 1 Dropout node to training mode" in result.out
    tied = success("fit", "lm.onnx", "--data", "ids.npz", *LOSS, "--output", "out.onnx", "--tie")
    assert "same values" not in tied.out + tied.err
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("out.onnx").graph.initializer}
    np.testing.assert_array_equal(values["head"].T, values["wte"])


def test_prune_and_export_print_surprising_hints(language_model, run):
    how = ("--sparsity", "0.5", "--epochs", "1", "--fine-tune-epochs", "1", "--output", "pruned.onnx")
    result = run("prune", "lm.onnx", "--data", "ids.npz", *LOSS, *how)
    assert result.code == 0
    assert result.err.count(APART) == 1
    result = run("export", "lm.onnx", *LOSS, "--optimizer", "momentum", "--training-model", "t.onnx")
    assert result.err.count(APART) == 1


def test_evaluation_of_a_file_in_training_mode_is_inference(language_model, success):
    runs = [success("evaluate", "lm.onnx", "--data", "ids.npz", *LOSS, "--json").out for _ in range(2)]
    assert runs[0] == runs[1]
    outputs = []
    for name in ("one.npz", "two.npz"):
        success("predict", "lm.onnx", "--data", "ids.npz", "--output", name)
        outputs.append(np.load(name)["y"])
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_names_are_printed_as_they_are(language_model, success):
    model = onnx.load("lm.onnx")
    names = {"wte": "model:key:0/[bold]wte[/bold]", "head": "h" * 300}
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    onnx.save(model, "names.onnx")
    out = success("inspect", "names.onnx").out
    assert out.count("model:key:0/[bold]wte[/bold]") == 2  # in the table and in a hint
    assert "h" * 300 in out.replace("\n", "").replace(" ", "")
