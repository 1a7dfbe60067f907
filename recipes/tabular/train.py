"""Tables that scikit-learn has: onnxtrain beside scikit-learn's own perceptron and its gradient boosting.

Five folds of each table; features are standardized with the mean and deviation of the training rows. The perceptron
of both is the same: two hidden layers of 64, Adam, the same rate, epochs, batches and weight decay.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

import onnxtrain
from network import Network

TABLES = {
    "breast cancer": (datasets.load_breast_cancer, True),
    "wine": (datasets.load_wine, True),
    "digits": (datasets.load_digits, True),
    "diabetes": (datasets.load_diabetes, False),
}
HIDDEN, EPOCHS, RATE, BATCH = (64, 64), 40, 1e-3, 32


def train(options, seed: int) -> dict[str, float]:
    """Measure the methods: accuracies in percent, for diabetes R² in percent."""
    names, folds = (["wine", "diabetes"], 2) if options.quick else (list(TABLES), 5)
    found = {}
    for name in names:
        for method, score in compare(*TABLES[name], folds, seed).items():
            found[f"{name}, {method}"] = score
    return found


def compare(load, is_class: bool, folds: int, seed: int) -> dict[str, float]:
    """Cross-validate the methods on a table, with the same folds."""
    x, y = load(return_X_y=True)
    splits = (StratifiedKFold if is_class else KFold)(folds, shuffle=True, random_state=seed)
    right = {"onnxtrain": 0.0, "MLP": 0.0, "boosting": 0.0}
    for fold, (rows, held_out) in enumerate(splits.split(x, y)):
        draw = 10 * seed + fold  # other weights in each fold
        scaler = StandardScaler().fit(x[rows])
        features, tests = (scaler.transform(x[part]).astype(np.float32) for part in (rows, held_out))
        center, scale = (0, 1) if is_class else (y[rows].mean(), y[rows].std())  # targets of a regression, standardized
        goal, truth = (y[rows] - center) / scale, (y[held_out] - center) / scale
        settings = {"hidden_layer_sizes": HIDDEN, "batch_size": BATCH, "learning_rate_init": RATE}
        settings |= {"max_iter": EPOCHS, "n_iter_no_change": EPOCHS}
        mlp = (MLPClassifier if is_class else MLPRegressor)(random_state=draw, **settings)
        boosting = (HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor)(random_state=draw)
        predictions = {
            "onnxtrain": ours(features, goal, tests, is_class, draw),
            "MLP": mlp.fit(features, goal).predict(tests),
            "boosting": boosting.fit(features, goal).predict(tests),
        }
        for method, prediction in predictions.items():
            score = np.mean(prediction == truth) if is_class else 1 - np.mean((prediction - truth) ** 2) / truth.var()
            right[method] += 100 * float(score) / folds
    return right


def perceptron(sizes: list[int], seed: int) -> onnx.ModelProto:
    """`features` [N, sizes[0]] to `scores` [N, sizes[-1]], initialized as scikit-learn does."""
    net, value = Network(seed), "features"
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        bound = (6 / (inputs + outputs)) ** 0.5
        weight = net.uniform(f"layer{layer}.weight", bound, inputs, outputs)
        bias = net.uniform(f"layer{layer}.bias", bound, outputs)
        last = layer == len(sizes) - 2
        value = net.node("Gemm", value, weight, bias, output="scores" if last else f"layer{layer}")
        value = value if last else net.node("Relu", value, output=f"layer{layer}.relu")
    return net.model({"features": ("N", sizes[0])}, {"scores": ("N", sizes[-1])})


def ours(features: np.ndarray, goal: np.ndarray, tests: np.ndarray, is_class: bool, seed: int) -> np.ndarray:
    """Train the perceptron with onnxtrain, and predict."""
    outputs = int(goal.max()) + 1 if is_class else 1
    trainer = onnxtrain.Trainer(
        perceptron([features.shape[1], *HIDDEN, outputs], seed),
        loss="softmax_cross_entropy" if is_class else "mean_squared_error",
        optimizer=onnxtrain.Adam(RATE),
        seed=seed,
        threads=1,
    )
    trainer.fit(features, goal, epochs=EPOCHS, batch_size=BATCH, progress=False)
    scores = trainer.predict(tests)
    return scores.argmax(axis=1) if is_class else scores[:, 0]
