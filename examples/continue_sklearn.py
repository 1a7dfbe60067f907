"""Train a pipeline converted by skl2onnx further, without the original scikit-learn objects.

Needs scikit-learn and skl2onnx.
"""

from pathlib import Path

import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from onnxtrain.interop.sklearn import OnnxClassifier


def main(folder: Path) -> tuple[float, float]:
    """Return the accuracy before and after; the tuned pipeline, scaler included, is `tuned.onnx`."""
    x, y = load_iris(return_X_y=True)
    x = x.astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    few, new, test = order[:12], order[12:100], order[100:]

    pipeline = make_pipeline(StandardScaler(), MLPClassifier(max_iter=30, tol=1.0, random_state=0)).fit(x[few], y[few])
    model = to_onnx(pipeline, x[:1])

    classifier = OnnxClassifier(model, epochs=30, learning_rate=0.01, random_state=0).fit(x[new], y[new])
    classifier.save(folder / "tuned.onnx")
    return pipeline.score(x[test], y[test]), classifier.score(x[test], y[test])


if __name__ == "__main__":
    print("accuracy before {:.2f}, after {:.2f}".format(*main(Path.cwd())))
