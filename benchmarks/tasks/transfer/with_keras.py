"""Teach a model of the digits 0 to 4 the digits 5 to 9 with Keras."""

import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x, low = x / 16, y < 5
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
base = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(5)])
base.compile(keras.optimizers.Adam(0.003), loss)
base.fit(x[low], y[low], epochs=10, verbose=0)
new_x, new_y = x[~low], y[~low] - 5

features = keras.Sequential(base.layers[:-1])
features.trainable = False
model = keras.Sequential([features, keras.layers.Dense(5)])
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
model.fit(new_x[:200], new_y[:200], epochs=40, verbose=0)
print("head", model.evaluate(new_x[200:], new_y[200:], verbose=0)[1])
features.trainable = True
model.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
model.fit(new_x[:200], new_y[:200], epochs=10, verbose=0)
print("whole", model.evaluate(new_x[200:], new_y[200:], verbose=0)[1])
