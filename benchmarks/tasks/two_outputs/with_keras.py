"""Classify a digit and predict its brightness with Keras."""

import keras

from data import digits_and_ink

keras.utils.set_random_seed(0)
x, y, ink = digits_and_ink()
inputs = keras.Input((64,))
hidden = keras.layers.Dense(64, activation="relu")(inputs)
outputs = {"digit": keras.layers.Dense(10)(hidden), "ink": keras.layers.Dense(1, use_bias=False)(hidden)}
model = keras.Model(inputs, outputs)

losses = {"digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "ink": "mse"}
metrics = {"digit": "accuracy", "ink": "mae"}
model.compile(keras.optimizers.Adam(0.003), losses, loss_weights={"digit": 1.0, "ink": 0.3}, metrics=metrics)
model.fit(x[:1200], {"digit": y[:1200], "ink": ink[:1200]}, epochs=20, verbose=0)
rest = {"digit": y[1200:], "ink": ink[1200:]}
measured = model.evaluate(x[1200:], rest, verbose=0, return_dict=True)
print("accuracy", measured["digit_accuracy"])
print("mae", measured["ink_mae"])
