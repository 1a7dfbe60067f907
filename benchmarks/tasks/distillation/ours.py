"""Distil a larger network into a small one, on 300 labelled digits."""

from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain.losses import Distillation

x, y = load_digits(return_X_y=True)
x = x / 16
teacher = onnxtrain.Trainer(onnxtrain.examples.mlp((64, 128, 10)), loss="cross_entropy", optimizer="adam(lr=0.003)")
teacher.fit(x[:1200], y[:1200], epochs=20, progress=False)
teacher.save("teacher.onnx")

loss = Distillation("teacher.onnx", temperature=3.0, mix=0.9)
student = onnxtrain.Trainer(onnxtrain.examples.mlp((64, 16, 10)), loss=loss, optimizer="adam(lr=0.01)")
student.fit(x[:300], y[:300], epochs=60, progress=False)
print("teacher", teacher.evaluate(x[1200:], y[1200:], metrics="accuracy")["accuracy"])
print("student", student.evaluate(x[1200:], y[1200:], metrics="accuracy")["accuracy"])
