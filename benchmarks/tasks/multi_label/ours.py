"""Multi-label classification: five yes-or-no questions per example."""

from sklearn.datasets import make_multilabel_classification

import onnxtrain

x, y = make_multilabel_classification(1200, n_features=20, n_classes=5, random_state=0)
x = (x - x.mean(0)) / x.std(0)
model = onnxtrain.examples.mlp((20, 32, 5))

trainer = onnxtrain.Trainer(model, loss="bce", optimizer="adam(lr=0.003)")
trainer.fit(x[:1000], y[:1000], epochs=20, progress=False)
measured = trainer.evaluate(x[1000:], y[1000:], metrics=["accuracy", "f1"])
print("accuracy", measured["accuracy"])
print("f1", measured["f1"])
