"""Displays of a trainer, its parameters and a history."""

import html

import numpy as np
import onnx

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors.formatting import html_table, text_table
from onnxtrain.training.callbacks import History


def test_a_trainer_says_what_it_trains(tmp_path):
    onnx.save(examples.mlp((4, 8, 3)), tmp_path / "model.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="cross_entropy", optimizer=onnxtrain.Momentum(0.1))
    shown = repr(trainer)
    assert shown.startswith(f"<Trainer: '{tmp_path / 'model.onnx'}', loss softmax_cross_entropy, Momentum(")
    assert shown.endswith("4 parameters of 67 elements>")
    assert "model.onnx" not in repr(onnxtrain.Trainer(examples.mlp((4, 3)), loss="mse"))


def test_parameters_are_a_table():
    parameters = onnxtrain.Trainer(examples.mlp((4, 3)), loss="mse").parameters
    lines = repr(parameters).splitlines()
    assert lines[0].split() == ["name", "shape", "dtype"]
    assert len(lines) == 1 + len(parameters)
    assert all(name in line and "float32" in line for name, line in zip(parameters, lines[1:], strict=True))
    assert parameters._repr_html_().count("<tr>") == 1 + len(parameters)


def test_a_trainer_shows_what_matters_in_a_notebook():
    model = examples.small_resnet()
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="sgd(lr=0.5)")
    assert trainer.hints
    shown = trainer._repr_html_()
    trained = sum(array.size for array in trainer.parameters.values())
    for part in ("image float32 (batch, ", "softmax_cross_entropy", "SGD(", "0.5", f"{trained:,} elements in "):
        assert part in shown, part
    assert all(html.escape(hint) in shown for hint in trainer.hints)


def test_a_history_counts_epochs_from_one():
    trainer = onnxtrain.Trainer(examples.mlp((4, 3)), loss="cross_entropy")
    history = trainer.fit(np.eye(4), np.arange(4) % 3, epochs=2)
    lines = [line.split() for line in repr(history).splitlines()]
    assert lines[0] == ["epoch", "step", "loss", "learning_rate"]
    assert [line[:2] for line in lines[1:]] == [["1", "1"], ["2", "2"]]
    assert lines[2][2] == f"{history.rows[1]['loss']:.4g}"
    assert "<td>2</td>" in history._repr_html_()
    assert repr(History()) == "History of no epochs"


def test_of_many_rows_the_first_and_the_last_are_shown():
    rows = [{"number": index, "word": "<b>"} for index in range(100)]
    lines = text_table(rows, most=4).splitlines()
    assert [line.split()[0] for line in lines] == ["number", "0", "1", "...", "98", "99"]
    assert html_table(rows, most=4).count("&lt;b&gt;") == 4
