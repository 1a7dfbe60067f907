"""Distil a larger network into a small one with Keras."""

import keras
from keras.distillation import Distiller, LogitsDistillation
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x / 16
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
teacher.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
teacher.fit(x[:1200], y[:1200], epochs=20, verbose=0)

student = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)])
# An object: with the string "kl_divergence" Keras 3.15 applies the divergence to the logits themselves.
told = LogitsDistillation(temperature=3.0, loss=keras.losses.KLDivergence())
distiller = Distiller(teacher, student, distillation_losses=told, student_loss_weight=0.1)
distiller.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
distiller.fit(x[:300], y[:300], epochs=60, verbose=0)
student.compile(loss=loss, metrics=["accuracy"])
print("teacher", teacher.evaluate(x[1200:], y[1200:], verbose=0)[1])
print("student", student.evaluate(x[1200:], y[1200:], verbose=0)[1])
