"""Classify wines: a DataFrame with a column of classes."""

from sklearn.datasets import load_wine

import onnxtrain

frame = load_wine(as_frame=True).frame.sample(frac=1, random_state=0)
features = frame.columns[:-1]
frame[features] = (frame[features] - frame[features].mean()) / frame[features].std()
model = onnxtrain.examples.mlp((13, 32, 3))

trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.01)")
trainer.fit(frame[:130], target="target", epochs=20, progress=False)
print("accuracy", trainer.evaluate(frame[130:], target="target", metrics="accuracy")["accuracy"])
