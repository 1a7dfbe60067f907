"""Multi-label classification with Keras."""

import keras
from sklearn.datasets import make_multilabel_classification

keras.utils.set_random_seed(0)
x, y = make_multilabel_classification(1200, n_features=20, n_classes=5, random_state=0)
x, y = (x - x.mean(0)) / x.std(0), y.astype("float32")
model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(5, activation="sigmoid")])

metrics = ["binary_accuracy", keras.metrics.F1Score(average="macro", threshold=0.5)]
model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy", metrics=metrics)
model.fit(x[:1000], y[:1000], epochs=20, verbose=0)
_, accuracy, f1 = model.evaluate(x[1000:], y[1000:], verbose=0)
print("accuracy", accuracy)
print("f1", f1)
