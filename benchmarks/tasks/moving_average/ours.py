"""Train at a high learning rate with a moving average of the weights, which validation uses."""

from sklearn.datasets import load_digits

import onnxtrain

x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16
model = onnxtrain.examples.mlp((64, 64, 10))

trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adamw(lr=0.01)", ema=0.98)
validation = x[1200:], y[1200:]
history = trainer.fit(x[:1200], y[:1200], validation=validation, metrics="accuracy", epochs=20, progress=False)
print("validation", history.rows[-1]["val_accuracy"])
print("accuracy", trainer.evaluate(*validation, metrics="accuracy", ema=True)["accuracy"])
