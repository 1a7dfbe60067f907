"""Diagnose with sample weights: the rare class counts three times."""

import numpy as np
from sklearn.datasets import load_breast_cancer

import onnxtrain

x, y = load_breast_cancer(return_X_y=True)
x = (x - x.mean(0)) / x.std(0)
model = onnxtrain.examples.mlp((30, 16, 1))

trainer = onnxtrain.Trainer(model, loss="bce", optimizer="adam(lr=0.003)")
trainer.fit(x[:400], y[:400], sample_weight=np.where(y[:400] == 0, 3.0, 1.0), epochs=20, progress=False)
measured = trainer.evaluate(x[400:], y[400:], metrics=["accuracy", "auc"])
print("accuracy", measured["accuracy"])
print("auc", measured["auc"])
