"""Sparse matrices of SciPy train and predict like the same arrays, without a dense copy of all rows."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain

sparse = pytest.importorskip("scipy.sparse")
RNG = np.random.default_rng(0)
X = np.where(RNG.random((60, 20)) < 0.2, RNG.normal(size=(60, 20)), 0).astype(np.float32)
Y = (X[:, :5].sum(1) > X[:, 5:10].sum(1)).astype(np.int64)


def trainer():
    return onnxtrain.Trainer(onnxtrain.examples.mlp((20, 8, 2)), loss="cross_entropy", seed=1)


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_array", "coo_matrix"])
def test_training_equals_that_on_the_same_array(kind):
    matrix, options = getattr(sparse, kind)(X), {"validation": 0.2, "epochs": 2, "batch_size": 16, "progress": False}
    weights = RNG.random(60)
    ours, theirs = trainer(), trainer()
    rows = ours.fit(matrix, Y, metrics="accuracy", sample_weight=weights, **options).rows
    assert rows == theirs.fit(X, Y, metrics="accuracy", sample_weight=weights, **options).rows
    np.testing.assert_array_equal(ours.predict(matrix), theirs.predict(X))
    name = next(iter(ours.objective.inputs)).name
    assert ours.evaluate({name: matrix, "label": Y}) == theirs.evaluate(X, Y)
    assert ours.evaluate(({name: matrix}, Y)) == theirs.evaluate(X, Y)


def test_only_the_rows_of_a_batch_are_dense():
    wide = sparse.random_array((50, 2**16), density=1e-4, format="csr", dtype=np.float32, rng=0)
    rows = onnxtrain.plugins.tables.sparse.SparseRows(wide)
    assert rows[np.array([3, 1])].shape == (2, 2**16)
    np.testing.assert_array_equal(rows[np.array([3, 1])], wide.toarray()[[3, 1]])


def test_nan_and_other_widths_are_refused():
    broken = X.copy()
    broken[7, 3] = np.nan
    with pytest.raises(onnxtrain.errors.DataError, match="nan at example 7"):
        trainer().fit(sparse.csr_matrix(broken), Y, epochs=1, progress=False)
    with pytest.raises(onnxtrain.errors.DataError, match="axis 1 is 19 instead of 20"):
        trainer().predict(sparse.csr_matrix(X[:, 1:]))


def test_texts_through_a_vectorizer():
    pipeline = pytest.importorskip("sklearn.pipeline")
    text = pytest.importorskip("sklearn.feature_extraction.text")
    from onnxtrain.sklearn import OnnxClassifier

    reviews = ["a good film", "a bad film", "a good play", "an awful play"] * 10
    verdicts = ["yes", "no", "yes", "no"] * 10
    classifier = OnnxClassifier(epochs=20, learning_rate=0.01, random_state=0)
    model = pipeline.make_pipeline(text.TfidfVectorizer(), classifier).fit(reviews, verdicts)
    assert model.score(reviews, verdicts) == 1
    rows = model[0].transform(reviews)
    dense = OnnxClassifier(epochs=20, learning_rate=0.01, random_state=0).fit(rows.toarray(), verdicts)
    np.testing.assert_array_equal(classifier.predict_proba(rows), dense.predict_proba(rows.toarray()))
