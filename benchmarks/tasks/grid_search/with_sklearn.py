"""Cross-validate a grid of learning rates and epochs with scikit-learn's perceptron."""

import warnings

from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

warnings.simplefilter("ignore")  # it has not converged
x, y = load_iris(return_X_y=True)
classifier = MLPClassifier((16,), batch_size=32, random_state=0, alpha=0)
grid = {"mlpclassifier__learning_rate_init": [0.001, 0.03], "mlpclassifier__max_iter": [5, 40]}

search = GridSearchCV(make_pipeline(StandardScaler(), classifier), grid, cv=5).fit(x, y)
print("rate", search.best_params_["mlpclassifier__learning_rate_init"])
print("epochs", search.best_params_["mlpclassifier__max_iter"])
print("accuracy", search.best_score_)
