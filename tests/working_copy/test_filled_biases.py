"""Biases of recurrent layers that tf2onnx filled with zeros: Keras's LSTM has one bias, or none, and ONNX's has two."""

import numpy as np
import onnx
import pytest

import onnxtrain
from sentences import warns_sentence

X, Y = (
    np.random.default_rng(seed).normal(size=size).astype(np.float32) for seed, size in ((0, (5, 2, 3)), (1, (1, 2, 4)))
)


def recurrent(operator: str, name: str, biases: np.ndarray) -> onnx.ModelProto:
    rows = len(biases[0]) // 2
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 15]>
        f (float[5, 2, 3] x) => (float[1, 2, 4] y) {{ all, y = {operator}<hidden_size = 4>(x, W__1, R__2, {name}) }}""")
    random = np.random.default_rng(2)
    tensors = {"W__1": random.normal(size=(1, rows, 3)), "R__2": random.normal(size=(1, rows, 4)), name: biases}
    for key, array in tensors.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), key))
    return model


def biases_of(operator: str, *, first: bool = True, second: bool = False) -> np.ndarray:
    rows = {"LSTM": 16, "GRU": 12, "RNN": 4}[operator]
    values = np.random.default_rng(3).normal(size=(1, 2 * rows))
    values[:, :rows] *= first
    values[:, rows:] *= second
    return values


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "adamw(lr=0.1, weight_decay=0.1)", "lion(lr=0.1)"])
@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_the_second_bias_stays_zero(operator: str, optimizer: str):
    biases = biases_of(operator)
    rows = biases.shape[1] // 2
    trainer = onnxtrain.Trainer(recurrent(operator, "B__3", biases), loss="mse", output="y", optimizer=optimizer)
    assert not trainer.hints
    both = onnxtrain.Trainer(recurrent(operator, "bias", biases), loss="mse", output="y", optimizer=optimizer)
    assert trainer.train_step(X, Y) == pytest.approx(both.train_step(X, Y))
    found, other = trainer.parameters["B__3"], both.parameters["bias"]
    np.testing.assert_allclose(found[:, :rows], other[:, :rows], rtol=1e-5, atol=1e-6)
    assert not found[:, rows:].any()
    assert other[:, rows:].any()
    trainer.train_step(X, Y)
    (saved,) = (tensor for tensor in trainer.model().graph.initializer if tensor.name == "B__3")
    assert not onnx.numpy_helper.to_array(saved)[:, rows:].any()


def test_two_biases_are_trained():
    trainer = onnxtrain.Trainer(recurrent("GRU", "B__3", biases_of("GRU", second=True)), loss="mse", output="y")
    before = np.array(trainer.parameters["B__3"])
    trainer.train_step(X, Y)
    assert (trainer.parameters["B__3"] != before).all()


def test_zeros_alone_are_no_bias_with_a_hint():
    with warns_sentence("not_trained", names="B0__3"):
        trainer = onnxtrain.Trainer(
            recurrent("LSTM", "B0__3", biases_of("LSTM", first=False)), loss="mse", output="y", optimizer="adam"
        )
    assert set(trainer.parameters) == {"W__1", "R__2"}
