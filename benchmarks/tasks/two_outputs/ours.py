"""Classify a digit and predict its brightness: two outputs with weighted losses."""

import onnxtrain
from data import digits_and_ink, write_model
from onnxtrain.losses import MeanSquaredError

x, y, ink = digits_and_ink()
write_model("model.onnx")

losses = {"digit": "cross_entropy", "ink": MeanSquaredError(weight=0.3)}
trainer = onnxtrain.Trainer("model.onnx", loss=losses, optimizer="adam(lr=0.003)")
trainer.fit(x[:1200], {"digit": y[:1200], "ink": ink[:1200]}, epochs=20, progress=False)
rest = {"digit": y[1200:], "ink": ink[1200:]}
measured = trainer.evaluate(x[1200:], rest, metrics={"digit": "accuracy", "ink": "mae"})
print("accuracy", measured["digit_accuracy"])
print("mae", measured["ink_mae"])
