"""Predict disease progression with Keras."""

import keras
from sklearn.datasets import load_diabetes

keras.utils.set_random_seed(0)
frame = load_diabetes(as_frame=True, scaled=False).frame.sample(frac=1, random_state=0)
frame = (frame - frame.mean()) / frame.std()
x, y = frame.drop(columns="target").to_numpy(), frame["target"].to_numpy()
model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])

model.compile(keras.optimizers.Adam(0.003), "mse", metrics=["r2_score"])
model.fit(x[:330], y[:330, None], epochs=15, verbose=0)
print("r2", model.evaluate(x[330:], y[330:, None], verbose=0)[1])
