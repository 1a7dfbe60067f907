"""Linear models and pipelines of scikit-learn can be trained further after export by skl2onnx."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import ModelError, OptionError
from sentences import raises_sentence

pytest.importorskip("skl2onnx")
pytest.importorskip("sklearn")
pytestmark = pytest.mark.torch


def written(estimator, x, **options):
    from skl2onnx import to_onnx

    return to_onnx(estimator, x[:1], options={"zipmap": False, **options} if hasattr(estimator, "classes_") else None)


def probabilities(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


@pytest.fixture(scope="module")
def iris():
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32), y


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_regression_converges_to_scikit_learns_solution(iris, classes):
    from sklearn.linear_model import LogisticRegression

    x, y = iris
    x, y = (x[50:, :3], y[50:] - 1) if classes == 2 else (x, np.digitize(x[:, 0], [-0.5, 0.5]))
    x = x[:, :2] if classes == 2 else x[:, 1:]
    rough = LogisticRegression(C=1e-3).fit(x, y)
    best = LogisticRegression(C=np.inf, tol=1e-8, max_iter=10_000).fit(x, y)
    trainer = onnxtrain.Trainer(written(rough, x), loss="softmax_cross_entropy", optimizer="sgd(lr=0.5, momentum=0.95)")
    first = trainer.evaluate(x, y)["loss"]
    for _ in range(1500):
        trainer.train_step(x, y)
    label, found = probabilities(trainer.model(), x)
    expected = best.predict_proba(x)
    assert first > 1.1 * trainer.evaluate(x, y)["loss"]
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert np.mean(label == best.predict(x)) > 0.98


def test_linear_regression_is_trained_to_least_squares(iris):
    from sklearn.linear_model import LinearRegression, Ridge

    x, _ = iris
    x, y = x[:, 2:], x[:, :2]
    trainer = onnxtrain.Trainer(written(Ridge(1e3).fit(x, y), x), loss="mse", optimizer="sgd(lr=0.2, momentum=0.9)")
    for _ in range(1000):
        trainer.train_step(x, y)
    (found,) = probabilities(trainer.model(), x)
    np.testing.assert_allclose(found, LinearRegression().fit(x, y).predict(x), atol=1e-3)


def test_a_pipeline_can_be_trained_with_its_preprocessing(iris, tmp_path):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    x = 100 * x + 500
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=1e-2)).fit(x, names)
    onnx.save(written(pipeline, x), tmp_path / "model.onnx")
    options = {"loss": "softmax_cross_entropy", "optimizer": "adam(lr=0.05)"}
    fitted = onnxtrain.Trainer(tmp_path / "model.onnx", **options).parameters
    assert set(fitted) == {"LinearClassifier.coefficients", "LinearClassifier.intercepts"}
    preprocessing = ["Scaler.offset", "Scaler.scale"]
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", train=["*", *preprocessing], **options)
    assert set(trainer.parameters) == {*fitted, *preprocessing}
    trainer.fit(x, names, epochs=30, progress=False)
    assert trainer.labels == ("setosa", "versicolor", "virginica")
    trainer.save(tmp_path / "tuned.onnx")
    label, found = probabilities(onnx.load(tmp_path / "tuned.onnx"), x)
    predicted = trainer.predict(x)
    np.testing.assert_array_equal(label, predicted["label"])
    np.testing.assert_allclose(found, predicted["probabilities"], rtol=1e-4, atol=1e-6)
    assert np.mean(label == names) > pipeline.score(x, names)


@pytest.mark.parametrize("kind", ["forest", "support vectors"])
def test_models_without_gradients_are_named(iris, kind):
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVR

    estimator, operator = {
        "forest": (RandomForestClassifier(2, random_state=0), "TreeEnsembleClassifier"),
        "support vectors": (SVR(), "SVMRegressor"),
    }[kind]
    model = written(make_pipeline(StandardScaler(), estimator).fit(*iris), iris[0])
    with pytest.raises(OptionError, match=f"computes with {operator}, through which no gradient flows"):
        onnxtrain.Trainer(model, loss="mse")


TREE = {
    "n_targets": 1, "nodes_featureids": [0], "nodes_truenodeids": [0], "nodes_trueleafs": [1],
    "nodes_falsenodeids": [1], "nodes_falseleafs": [1], "leaf_targetids": [0, 0], "tree_roots": [0],
    **{
        name: onnx.numpy_helper.from_array(np.array(values, dtype))
        for name, values, dtype in (
            ("nodes_splits", [0.5], np.float32), ("nodes_modes", [0], np.uint8), ("leaf_weights", [1, 2], np.float32)
        )
    },
}  # fmt: skip
LINEAR = {"coefficients": [0.1, 0.2, 0.3], "intercepts": [0.5], "targets": 1}


def classical(operator: str, version: int, attributes: dict) -> onnx.ModelProto:
    """Return a model that imports ai.onnx.ml only."""
    node = onnx.helper.make_node(operator, ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    infos = [onnx.helper.make_tensor_value_info(name, 1, ["N", size]) for name, size in (("x", 3), ("y", 1))]
    graph = onnx.helper.make_graph([node], "g", infos[:1], infos[1:])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("ai.onnx.ml", version)], ir_version=8)


def test_models_of_the_domain_of_classical_models_alone():
    model = classical("LinearRegressor", 1, LINEAR)
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    y = x @ np.float32([[1], [2], [3]])
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.1)")
    before = trainer.evaluate(x, y)["loss"]
    trainer.fit(x, y, epochs=5, progress=False)
    assert trainer.evaluate(x, y)["loss"] < before
    saved = trainer.model()
    onnx.checker.check_model(saved)
    assert [(item.domain, item.version) for item in saved.opset_import] == [("ai.onnx.ml", 1)]
    (found,) = onnxruntime.InferenceSession(saved.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(found, trainer.predict(x), rtol=1e-5)
    assert onnxtrain.inspect(model).trainable_size == 4
    longer = onnxtrain.append(model, onnxtrain.layers.Linear(2))
    onnx.checker.check_model(longer)
    onnx.checker.check_model(onnxtrain.quantize(model, x))


def test_trees_of_opset_5_keep_their_sentence():
    with raises_sentence("nothing_trainable", reasons="computes with TreeEnsemble, through"):
        onnxtrain.Trainer(classical("TreeEnsemble", 5, TREE), loss="mse")


def columns_of_texts(kind):
    """An encoder, and data for it: a column of numbers, and one of texts."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

    rng = np.random.default_rng(0)
    texts = rng.choice(["red wine", "green tea", "red tea"], 60)
    encoder, column = {
        "one hot": (OneHotEncoder(handle_unknown="ignore"), ["text"]),
        "ordinal": (OrdinalEncoder(), ["text"]),
        "counts of words": (CountVectorizer(lowercase=False), "text"),
    }[kind]
    return encoder, column, {"size": rng.normal(size=(60, 1)).astype(np.float32), "text": texts[:, None].astype(object)}


@pytest.mark.parametrize("zipmap", [False, True])
@pytest.mark.parametrize("kind", ["one hot", "ordinal", "counts of words"])
@pytest.mark.filterwarnings("ignore:.*tokenizer.*")
def test_a_pipeline_that_reads_texts_is_trained_as_its_error_says(kind, zipmap):
    pandas = pytest.importorskip("pandas")
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    encoder, column, data = columns_of_texts(kind)
    frame = pandas.DataFrame({name: array[:, 0] for name, array in data.items()})
    y = (frame.text == "red tea").to_numpy().astype(np.int64)
    pipeline = make_pipeline(
        ColumnTransformer([("numbers", StandardScaler(), ["size"]), ("texts", encoder, column)]), LogisticRegression()
    ).fit(frame, 1 - y)
    kinds = [("size", FloatTensorType([None, 1])), ("text", StringTensorType([None, 1]))]
    model = convert_sklearn(pipeline, initial_types=kinds, options={id(pipeline): {"zipmap": zipmap}})
    with pytest.raises(ModelError, match="cannot read texts \\('text'\\)") as caught:
        onnxtrain.Trainer(model, loss="cross_entropy")

    cuts = re.findall(r"onnxtrain\.cut\(model, \w+=\[[^]]*\]\)", str(caught.value))
    rest, encoding = (eval(text, {"onnxtrain": onnxtrain, "model": model}) for text in cuts)
    encoded = onnxtrain.predict(encoding, data["text"])
    encoded = encoded if isinstance(encoded, dict) else {encoding.graph.output[0].name: encoded}
    trainer = onnxtrain.Trainer(rest, loss="cross_entropy", optimizer="sgd(lr=0.3)")
    given = {"size": data["size"], **encoded}
    first = trainer.evaluate((given, y))["loss"]
    trainer.fit(given, y, epochs=40, batch_size=20, progress=False)
    assert trainer.evaluate((given, y))["loss"] < 0.8 * first

    whole = onnx.compose.merge_models(encoding, trainer.model(), io_map=[(name, name) for name in encoded])
    session = onnxruntime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    _, found = session.run(None, data)
    np.testing.assert_allclose(found, trainer.predict_proba(given), rtol=1e-5)


def test_an_estimator_says_how_to_encode_texts():
    from onnxtrain.interop.sklearn import OnnxClassifier, OnnxRegressor

    x, y = np.array([[1.0, "red"], [2.0, "green"]], object), np.array([0, 1])
    with raises_sentence("texts_for_an_estimator", text="'red'", estimator="OnnxClassifier"):
        OnnxClassifier(epochs=1).fit(x, y)
    with raises_sentence("texts_for_an_estimator", text="'red'", estimator="OnnxRegressor"):
        OnnxRegressor(epochs=1).fit([[1.0], [2.0]], y).predict(np.array([["red"]], object))
