"""A hint names parameters that PyTorch's newer exporter computed away."""

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxtrain
from sentences import warns_sentence

SIGNATURE = (
    "\n# inputs\np_d: PARAMETER target='d'\nb_t: BUFFER target='t'\nx: USER_INPUT\n\n# outputs\ny: USER_OUTPUT\n"
)
FOLDED = "pkg.onnxscript.optimizer.folded_from"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


def scaled(name, folded_from, signature=SIGNATURE):
    """The model y = (x scale) weight, whose scale [1, 4] the exporter computed from these values."""
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    graph (float[N, 4] x) => (float[N, 2] y) {{
        scaled = Mul(x, {name})
        y = MatMul(scaled, weight)
    }}"""
    model = parser.parse_model(text)
    generator = np.random.default_rng(0)
    for own, shape in ((name, (1, 4)), ("weight", (4, 2))):
        values = generator.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, own))
    info = model.graph.value_info.add(name=name)
    info.type.CopyFrom(onnx.helper.make_tensor_type_proto(1, (1, 4)))
    info.metadata_props.add(key=FOLDED, value=folded_from)
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=signature)
    return model


@pytest.mark.parametrize("name", ["sigmoid", "val_3", "rotary_cos", "masked_fill", "index"])
def test_a_hint_names_a_result_and_its_parameter(name):
    model = scaled(name, "['d', 'exp_2', 'val_0']")
    with warns_sentence("exporter_computed", names=name, parameter="d"):
        trainer = onnxtrain.Trainer(model, loss="mse")
    directly = f"a training changes {name} directly" in " ".join(trainer.hints)
    assert directly == (name in trainer.parameters)
    assert any("from the parameter d" in hint for hint in onnxtrain.inspect(model).hints)
    assert not any("from the parameter d" in hint for hint in onnxtrain.Trainer(model, loss="mse", freeze=name).hints)


@pytest.mark.parametrize(
    ("name", "folded_from", "signature"),
    [
        ("sigmoid", "['d'", SIGNATURE),  # not a list
        ("sigmoid", "[{}, []]", SIGNATURE),
        ("sigmoid", "7", SIGNATURE),
        ("sigmoid", "['d']", "PARAMETER"),
        ("sigmoid", "['d']", ""),
    ],
)
def test_other_initializers_are_sorted_as_without_the_list(name, folded_from, signature):
    model = scaled(name, folded_from, signature)
    trainer = onnxtrain.Trainer(model, loss="mse")
    assert not any("The exporter computed" in hint for hint in trainer.hints)
    del model.graph.value_info[:]
    assert set(trainer.parameters) == set(onnxtrain.Trainer(model, loss="mse").parameters)


@pytest.mark.parametrize("folded_from", ["['t', 'val_0']", "['arange', 'val_1']"])
def test_a_result_of_buffers_and_constants_alone_is_a_constant(folded_from):
    model = scaled("mul_3", folded_from)
    trainer = onnxtrain.Trainer(model, loss="mse")
    assert list(trainer.parameters) == ["weight"]
    (row,) = [row for row in onnxtrain.inspect(model).initializers if row.name == "mul_3"]
    assert row.reason == "computed from constants by the exporter"
    assert "mul_3" in onnxtrain.Trainer(model, loss="mse", train=["*", "mul_3"]).parameters


@pytest.mark.parametrize(("name", "is_trained"), [("transpose", True), ("val_3", True), ("expand", False)])
def test_a_parameter_in_another_layout_is_trained_unless_repeated(name, is_trained):
    model = scaled(name, "['d', 'val_0', 'view_2']")
    trainer = onnxtrain.Trainer(model, loss="mse")
    assert (name in trainer.parameters) == is_trained
    assert not any("The exporter computed" in hint for hint in trainer.hints)


def test_a_hint_names_the_batch_normalization_that_was_folded():
    lost = (("norm.weight", "PARAMETER"), ("norm.bias", "PARAMETER"), ("norm.running_mean", "BUFFER"))
    inputs = "".join(f"\nb: {kind} target='{name}'" for name, kind in (*lost, ("unused.weight", "PARAMETER")))
    model = scaled("weight_1", "[]", SIGNATURE + inputs)
    hints = " ".join(onnxtrain.inspect(model).hints)
    assert "The exporter folded batch normalization (norm) into the weights before it" in hints
    assert "lacks 2 parameters of the PyTorch program (d, unused.weight)" in hints
