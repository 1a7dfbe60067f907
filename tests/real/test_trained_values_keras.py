"""The trainable parameters of Keras exports equal ``trainable_weights`` (needs the keras extra)."""

from __future__ import annotations

import os
import warnings
from collections import Counter

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.model_file.file import ModelFile
from sentences import raises_sentence
from zoo.framework_steps import check_steps

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
"""Models whose weights the converter transforms (folded batch norm, negated slopes); only shapes are compared."""


@pytest.mark.parametrize("name", MODELS)
def test_trainable_parameters_equal_trainable_weights(name, tmp_path):
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["LSTM", "Bidirectional"])
def test_a_recurrent_layer_has_one_bias(name, bias, tmp_path):
    """Steps equal those of Keras, which has no second bias, or none; the file has two."""
    tensorflow = pytest.importorskip("tensorflow")
    keras.utils.set_random_seed(0)
    layers = {"LSTM": L.LSTM(5, use_bias=bias), "Bidirectional": L.Bidirectional(L.LSTM(3, use_bias=bias))}
    model = keras.Sequential([keras.Input(SEQUENCE), layers[name], L.Dense(2)])
    generator = np.random.default_rng(0)
    x, target = generator.normal(size=(8, *SEQUENCE)).astype(np.float32), generator.normal(size=(8, 2))
    model(x)
    for weight in model.trainable_weights:  # the exporter omits a bias of zeros
        weight.assign(np.asarray(weight) + 0.02 * generator.random(weight.shape).astype(np.float32))
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="mse", optimizer="sgd(lr=0.2)")
    assert any("not trained" in hint for hint in trainer.hints) is not bias
    for _ in range(4):
        with tensorflow.GradientTape() as tape:
            loss = tensorflow.reduce_mean((model(x, training=False) - target.astype(np.float32)) ** 2)
        assert trainer.train_step(x, target.astype(np.float32)) == pytest.approx(float(loss), rel=1e-5)
        values = [weight.value for weight in model.trainable_weights]
        for weight, slope in zip(model.trainable_weights, tape.gradient(loss, values), strict=True):
            weight.assign(np.asarray(weight) - 0.2 * np.asarray(slope))


def test_batch_normalization_without_a_scale_has_no_parameter_for_it(tmp_path):
    keras.utils.set_random_seed(0)
    model = sequential(IMAGE, L.Conv2D(4, 3), L.BatchNormalization(scale=False), L.ReLU(), L.Flatten())()
    model(np.zeros((2, *IMAGE), np.float32))
    generator = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(np.asarray(weight) + 0.1 * generator.random(weight.shape).astype(np.float32))
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    rows = [row for row in onnxtrain.inspect(tmp_path / "model.onnx").initializers if row.trainable]
    assert sum(row.size for row in rows) == sum(np.asarray(weight).size for weight in model.trainable_weights)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_three_steps(name, tmp_path):
    tensorflow = pytest.importorskip("tensorflow")
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    generator = np.random.default_rng(0)
    shape = (4, *model.input_shape[1:])
    is_words = name.startswith("embedding")
    x = (generator.integers(1, 30, shape) if is_words else generator.normal(size=shape)).astype(np.float32)
    model(x)
    for weight in model.trainable_weights:
        weight.assign(np.asarray(weight) + 0.02 * generator.random(weight.shape).astype(np.float32))
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    with tensorflow.GradientTape() as tape:
        y = model(x, training=False)
        target = generator.normal(size=y.shape).astype(np.float32)
        loss = tensorflow.reduce_mean((y - target) ** 2)
    file = onnx.load(tmp_path / "model.onnx")
    if name == "normalization":  # Keras exports its mean and deviation as inputs without values
        assert len(file.graph.input) == 3
        with raises_sentence("one_array", what="the batch", inputs="normalization"):
            onnxtrain.Trainer(file, loss="mse").train_step(x, target)
        return
    slopes = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
    check_steps(
        file,
        {weight.path: np.asarray(weight) for weight in model.trainable_weights},
        {
            weight.path: np.asarray(tensorflow.convert_to_tensor(slope))
            for weight, slope in zip(model.trainable_weights, slopes, strict=True)
        },
        float(loss),
        x,
        target,
        tmp_path / "trained.onnx",
        computed=name in SHAPED,
    )
