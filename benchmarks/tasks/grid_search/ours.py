"""Cross-validate a grid of learning rates and epochs."""

from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import onnxtrain
from onnxtrain.interop.sklearn import OnnxClassifier

x, y = load_iris(return_X_y=True)
classifier = OnnxClassifier(onnxtrain.examples.mlp((4, 16, 3)), batch_size=32, random_state=0)
grid = {"onnxclassifier__learning_rate": [0.001, 0.03], "onnxclassifier__epochs": [5, 40]}

search = GridSearchCV(make_pipeline(StandardScaler(), classifier), grid, cv=5).fit(x, y)
print("rate", search.best_params_["onnxclassifier__learning_rate"])
print("epochs", search.best_params_["onnxclassifier__epochs"])
print("accuracy", search.best_score_)
