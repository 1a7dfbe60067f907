"""What is trained of Keras' exports equals ``trainable_weights``; needs TensorFlow and tf2onnx (the keras extra)."""

from __future__ import annotations

import os
import warnings
from collections import Counter

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.model_file.file import ModelFile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tensorflow")
    pytest.importorskip("tf2onnx")
    keras = pytest.importorskip("keras")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="its exporter writes TensorFlow's graphs"),
]

L = keras.layers
IMAGE, SEQUENCE, WORDS = (8, 8, 3), (5, 4), (5,)


def attention():
    x = keras.Input(SEQUENCE)
    y = L.LayerNormalization()(x + L.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(x, L.Dense(2)(y))


def normalization():
    layer = L.Normalization()
    layer.adapt(3 * np.random.default_rng(0).random((50, 6)).astype(np.float32) + 1)
    return keras.Sequential([keras.Input((6,)), layer, L.Dense(4, activation="relu"), L.Dense(2)])


def sequential(shape, *layers):
    def make():
        fresh = [type(layer).from_config(layer.get_config()) for layer in layers]
        return keras.Sequential([keras.Input(shape), *fresh, L.Dense(2)])

    return make


MODELS = {
    "attention": attention,
    "normalization": normalization,
    "perceptron": sequential((6,), L.Dense(4, activation="relu")),
    "activations": sequential((6,), L.Dense(6, "silu"), L.Dense(6, "selu"), L.Dense(6, "softplus")),
    "convolution": sequential(IMAGE, L.Conv2D(4, 3), L.Flatten()),
    "convolution of sequences": sequential((8, 3), L.Conv1D(4, 3), L.GlobalMaxPooling1D()),
    "separable convolutions": sequential(IMAGE, L.DepthwiseConv2D(3), L.SeparableConv2D(4, 3), L.Flatten()),
    "transposed convolution": sequential(IMAGE, L.Conv2DTranspose(4, 3), L.Flatten()),
    "batch normalization": sequential(IMAGE, L.Conv2D(4, 3), L.BatchNormalization(), L.ReLU(), L.Flatten()),
    "group normalization": sequential(IMAGE, L.Conv2D(4, 3), L.GroupNormalization(2), L.Flatten()),
    "layer normalization": sequential((6,), L.Dense(6), L.LayerNormalization()),
    "root mean square normalization": sequential((6,), L.Dense(6), L.RMSNormalization()),
    "unit normalization": sequential((6,), L.Dense(6), L.UnitNormalization()),
    "rescaling": sequential(IMAGE, L.Rescaling(1 / 255, offset=-0.5), L.Conv2D(4, 3), L.Flatten()),
    "slopes": sequential((6,), L.Dense(6), L.PReLU()),
    "lstm": sequential(SEQUENCE, L.LSTM(5)),
    "lstm of both directions": sequential(SEQUENCE, L.Bidirectional(L.LSTM(5))),
    "gru": sequential(SEQUENCE, L.GRU(5)),
    "gru that masks": sequential(SEQUENCE, L.Masking(0.0), L.GRU(5)),
    "rnn": sequential(SEQUENCE, L.SimpleRNN(5)),
    "embedding and lstm": sequential(WORDS, L.Embedding(30, 6, mask_zero=True), L.LSTM(5)),
    "embedding and mean": sequential(WORDS, L.Embedding(30, 6, mask_zero=True), L.GlobalAveragePooling1D()),
}

SHAPED = {"batch normalization", "slopes"}
"""What the converter computes from weights: folded batch normalization, negated slopes; shapes and counts tell."""


@pytest.mark.parametrize("name", MODELS)
def test_what_is_trained_are_the_trainable_weights(name, tmp_path):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    model(np.zeros((2, *model.input_shape[1:]), np.float32))
    generator = np.random.default_rng(0)
    for weight in model.trainable_weights:
        weight.assign(np.asarray(weight) + 0.02 * generator.random(weight.shape).astype(np.float32))
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    proto = onnx.load(tmp_path / "model.onnx")
    rows = [row for row in onnxtrain.inspect(proto).initializers if row.trainable]
    file = ModelFile.load(proto)
    found = Counter(value for row in rows for value in np.asarray(file.value(row.name)).reshape(-1).tolist())
    expected = Counter(value for weight in model.trainable_weights for value in np.asarray(weight).reshape(-1).tolist())
    if name in SHAPED:
        assert found.total() == expected.total()
        return
    # ONNX's recurrent layers have two biases where Keras' have one: the other is zero, in the same tensor.
    assert found - Counter({0.0: found[0.0]}) == expected
    assert all(np.asarray(file.value(row.name)).any() for row in rows)
