"""Classify wines with Keras."""

import keras
from sklearn.datasets import load_wine

keras.utils.set_random_seed(0)
frame = load_wine(as_frame=True).frame.sample(frac=1, random_state=0)
features = frame.columns[:-1]
frame[features] = (frame[features] - frame[features].mean()) / frame[features].std()
x, y = frame[features].to_numpy(), frame["target"].to_numpy()
model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(3)])

model.compile(
    keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
model.fit(x[:130], y[:130], epochs=20, verbose=0)
print("accuracy", model.evaluate(x[130:], y[130:], verbose=0)[1])
