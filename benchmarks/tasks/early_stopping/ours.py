"""Stop when the validation loss rises, and keep the weights of the best epoch."""

from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain.training.callbacks import EarlyStopping

x, y = load_digits(return_X_y=True)
model = onnxtrain.examples.mlp((64, 128, 10))

trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.003)")
stopping = EarlyStopping(patience=5)
validation = x[300:800] / 16, y[300:800]
trainer.fit(x[:300] / 16, y[:300], validation=validation, epochs=200, callbacks=[stopping], progress=False)
print("best", stopping.best)
print("loss", trainer.evaluate(*validation)["loss"])
print("accuracy", trainer.evaluate(x[800:] / 16, y[800:], metrics="accuracy")["accuracy"])
