"""Predict disease progression: regression on a DataFrame."""

from sklearn.datasets import load_diabetes

import onnxtrain

frame = load_diabetes(as_frame=True, scaled=False).frame.sample(frac=1, random_state=0)
frame = (frame - frame.mean()) / frame.std()
model = onnxtrain.examples.mlp((10, 32, 1))

trainer = onnxtrain.Trainer(model, loss="mse", optimizer="adam(lr=0.003)")
trainer.fit(frame[:330], target="target", epochs=15, progress=False)
print("r2", trainer.evaluate(frame[330:], target="target", metrics="r2")["r2"])
