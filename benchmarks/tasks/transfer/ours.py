"""Teach a model of the digits 0 to 4 the digits 5 to 9: a new head first, then all of it at a lower rate."""

from sklearn.datasets import load_digits

import onnxtrain

x, y = load_digits(return_X_y=True)
x, low = x / 16, y < 5
base = onnxtrain.Trainer(onnxtrain.examples.mlp((64, 64, 5)), loss="cross_entropy", optimizer="adam(lr=0.003)")
base.fit(x[low], y[low], epochs=10, progress=False)
new_x, new_y = x[~low], y[~low] - 5

model = onnxtrain.replace_head(base.model(), classes=5)
head = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.01)", train="head.*")
head.fit(new_x[:200], new_y[:200], epochs=40, progress=False)
whole = onnxtrain.Trainer(head.model(), loss="cross_entropy", optimizer="adam(lr=0.001)")
whole.fit(new_x[:200], new_y[:200], epochs=10, progress=False)
print("head", head.evaluate(new_x[200:], new_y[200:], metrics="accuracy")["accuracy"])
print("whole", whole.evaluate(new_x[200:], new_y[200:], metrics="accuracy")["accuracy"])
