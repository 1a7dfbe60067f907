"""Diagnose with sample weights in Keras."""

import keras
import numpy as np
from sklearn.datasets import load_breast_cancer

keras.utils.set_random_seed(0)
x, y = load_breast_cancer(return_X_y=True)
x = (x - x.mean(0)) / x.std(0)
model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1, activation="sigmoid")])

model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy", metrics=["accuracy", "auc"])
model.fit(x[:400], y[:400, None], sample_weight=np.where(y[:400] == 0, 3.0, 1.0), epochs=20, verbose=0)
_, accuracy, auc = model.evaluate(x[400:], y[400:, None], verbose=0)
print("accuracy", accuracy)
print("auc", auc)
