"""Models made from a model with external data refer to no file: they can be saved and run anywhere."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.model_file.proto import all_tensors
from sentences import raises_sentence

HEADER = '<ir_version: 10, opset_import: ["" : 18]>'
LOSS = "mean_squared_error"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A model with all data beside it, an attribute's and a function's too; the working directory is elsewhere."""
    generator = np.random.default_rng(0)
    model = parser.parse_model(
        f"{HEADER} g (float[n,8] x) => (float[n,4] y) {{ m = MatMul(x, w) a = Add(m, b) y = Tanh(a) }}"
    )
    for name, shape in (("w", (8, 4)), ("b", (4,))):
        model.graph.initializer.append(numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name))
    model.graph.node[1].input[1] = "shifted"
    one = numpy_helper.from_array(np.ones(4, np.float32), "one")
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["one"], value=one))
    model.graph.node.insert(1, onnx.helper.make_node("Add", ["b", "one"], ["shifted"]))
    folder, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    onnx.save(
        model,
        folder / "model.onnx",
        save_as_external_data=True,
        size_threshold=0,
        location="model.data",
        convert_attribute=True,
    )
    monkeypatch.chdir(elsewhere)
    return folder / "model.onnx"


def refers_to_files(model: onnx.ModelProto) -> list[str]:
    return [tensor.name for tensor in all_tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]


def test_the_model_is_what_the_tests_take_it_for(path) -> None:
    assert len(refers_to_files(onnx.load(path, load_external_data=False))) == 3


def test_a_gradient_is_saved_and_run_elsewhere(path) -> None:
    built = onnxtrain.gradient(path, xs=["x", "w", "b"])
    assert not refers_to_files(built)
    onnx.save(built, "gradient.onnx")
    x = np.ones((2, 8), np.float32)
    found = onnxruntime.InferenceSession("gradient.onnx").run(["y", "w_grad"], {"x": x})
    expected = onnxruntime.InferenceSession(
        onnxtrain.gradient(onnx.load(path), xs=["x", "w", "b"]).SerializeToString()
    ).run(["y", "w_grad"], {"x": x})
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_gradient_is_saved_with_external_data_of_its_own(path) -> None:
    built = onnxtrain.gradient(path)
    onnx.save(built, "gradient.onnx", save_as_external_data=True, size_threshold=100, location="gradient.data")
    assert refers_to_files(onnx.load("gradient.onnx", load_external_data=False))
    onnxruntime.InferenceSession("gradient.onnx").run(None, {"x": np.ones((2, 8), np.float32)})


@pytest.mark.parametrize("freeze", [None, "w", "b"])
def test_training_models_and_step_graphs_hold_their_data(path, freeze) -> None:
    optimizer = onnxtrain.Momentum(0.1)
    written = onnxtrain.training_model(path, loss=LOSS, optimizer=optimizer, freeze=freeze)
    assert not refers_to_files(written)
    trainer = onnxtrain.Trainer(path, loss=LOSS, optimizer=optimizer, freeze=freeze)
    x, y = np.ones((2, 8), np.float32), np.zeros((2, 4), np.float32)
    trainer.train_step(x, y)
    assert not refers_to_files(trainer.training_model())
    trainer.save_training_model("training.onnx")
    assert not refers_to_files(onnx.load("training.onnx", load_external_data=False))
    session = onnxtrain.TrainingSession("training.onnx")
    feeds = {"x": x, "target": y, "learning_rate": np.array(0.1, np.float32)}
    assert float(session.step(feeds)["loss"]) == pytest.approx(trainer.train_step(x, y), rel=1e-5)

    beside = path.parent / "training.onnx"
    onnx.save(written, beside, save_as_external_data=True, size_threshold=0, location="training.data")
    assert not refers_to_files(onnxtrain.lower(beside))
    assert not refers_to_files(onnxtrain.TrainingSession(beside).model())
    step = onnxtrain.lower(onnx.load(beside, load_external_data=False), folder=path.parent)
    onnxruntime.InferenceSession(step.SerializeToString())


def test_a_folder_without_the_data_is_one_sentence(path) -> None:
    beside = path.parent / "training.onnx"
    written = onnxtrain.training_model(path, loss=LOSS, optimizer=onnxtrain.Momentum(0.1))
    onnx.save(written, beside, save_as_external_data=True, size_threshold=0, location="training.data")
    without = onnx.load(beside, load_external_data=False)
    for build in (onnxtrain.lower, onnxtrain.TrainingSession):
        with raises_sentence("no_data_file", what="The external data of 'w'", got="training.data"):
            build(without)
