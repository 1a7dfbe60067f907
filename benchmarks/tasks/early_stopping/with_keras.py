"""Stop when the validation loss rises with Keras, and keep the weights of the best epoch."""

import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
stopping = keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True)
validation = x[300:800] / 16, y[300:800]
model.fit(x[:300] / 16, y[:300], validation_data=validation, epochs=200, callbacks=[stopping], verbose=0)
print("best", stopping.best)
print("loss", model.evaluate(*validation, verbose=0)[0])
print("accuracy", model.evaluate(x[800:] / 16, y[800:], verbose=0)[1])
