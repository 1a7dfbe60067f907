"""Gradients stop where the metadata of a file say so, and a hint tells where they leave it open."""

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxtrain
from sentences import warns_sentence

CALL = "pkg.torch.onnx.fx_node"


def concatenated(arguments, *, named=("left", "right")):
    """The model y = [x first | x second] last, whose Concat has this call of the program."""
    left, right = named
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    graph (float[N, 2] x) => (float[N, 1] y) <float[2, 2] first, float[2, 2] second, float[4, 1] last> {{
        {left} = MatMul(x, first)
        {right} = MatMul(x, second)
        both = Concat<axis = 1>({left}, {right})
        y = MatMul(both, last)
    }}"""
    model = parser.parse_model(text)
    generator = np.random.default_rng(0)
    for name, shape in (("first", (2, 2)), ("second", (2, 2)), ("last", (4, 1))):
        values = generator.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    target = "call_function[target=torch.ops.aten.cat.default]"
    call = f"%cat : [num_users=1] = {target}(args = ([{arguments}], 1), kwargs = {{}})"
    model.graph.node[2].metadata_props.add(key=CALL, value=call)
    return model


@pytest.mark.parametrize(
    ("arguments", "named", "trained"),
    [
        ("%left, %right", ("left", "right"), {"first", "second", "last"}),
        ("%left, %detach", ("left", "right"), {"first", "last"}),
        ("%detach_3, %right", ("left", "right"), {"second", "last"}),
        ("%detach, %detach_1", ("left", "right"), {"last"}),
        ("%detach, %right", ("detach", "right"), {"second", "last"}),
        ("%right, %detach", ("left", "right"), {"second", "last"}),  # in the other order in the file
        ("%detached, %right", ("left", "right"), {"first", "second", "last"}),
    ],
)
def test_weights_behind_detached_values_are_not_trained(arguments, named, trained):
    model = concatenated(arguments, named=named)
    trainer = onnxtrain.Trainer(model, loss="mse")
    assert set(trainer.parameters) == trained
    assert not [hint for hint in trainer.hints if "detaches" in hint]
    rows = onnxtrain.inspect(model).initializers
    assert {row.name for row in rows if row.trainable} == trained
    before = trainer.predict(np.ones((3, 2), np.float32))
    trainer.train_step(np.ones((3, 2), np.float32), np.zeros((3, 1), np.float32))
    assert np.abs(trainer.predict(np.ones((3, 2), np.float32)) - before).max() > 1e-4


def test_a_hint_names_a_call_whose_inputs_are_open():
    model = concatenated("%right, %detach, %more")
    with warns_sentence("detaches_inputs", names="cat"):
        trainer = onnxtrain.Trainer(model, loss="mse")
    assert set(trainer.parameters) == {"first", "second", "last"}
    assert any("detaches inputs of cat" in hint for hint in onnxtrain.inspect(model).hints)


def test_a_file_of_the_trained_model_is_as_before(tmp_path):
    trainer = onnxtrain.Trainer(concatenated("%left, %detach"), loss="mse")
    trainer.train_step(np.ones((3, 2), np.float32), np.zeros((3, 1), np.float32))
    trainer.save(tmp_path / "model.onnx")
    saved = onnx.load(tmp_path / "model.onnx")
    assert [node.op_type for node in saved.graph.node] == ["MatMul", "MatMul", "Concat", "MatMul"]
    assert any(entry.key == CALL for entry in saved.graph.node[2].metadata_props)


def test_a_mask_keeps_the_padding_row_of_other_exporters():
    text = """<ir_version: 10, opset_import: ["" : 18]>
    graph (int64[N, 2] tokens) => (float[N, 3] y) <float[4, 3] table> {
        rows = Gather(table, tokens)
        y = ReduceMean<keepdims = 0>(rows, axes)
    }""".replace("<float[4, 3] table>", "<float[4, 3] table, int64[1] axes = {1}>")
    model = parser.parse_model(text)
    values = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    values[0] = 0
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, "table"))
    mask = np.ones((4, 3), bool)
    mask[0] = False
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer=onnxtrain.SGD(0.1), masks={"table": mask})
    trainer.train_step(np.array([[0, 1], [0, 2]]), np.ones((2, 3), np.float32))
    assert not trainer.parameters["table"][0].any()
    assert (trainer.parameters["table"][1] != values[1]).all()
