"""Scikit-learn estimators that train ONNX models: scikit-learn's checks and conventions."""

from __future__ import annotations

import importlib
import pickle
import sys

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.training.examples import digits_cnn, mlp
from sentences import raises_sentence, warns_sentence

pytest.importorskip("sklearn", minversion="1.6")

from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, load_iris, make_multilabel_classification
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from onnxtrain.interop.sklearn import OnnxClassifier, OnnxRegressor
from zoo.sklearn_models import sklearn_models

ESTIMATORS = [OnnxClassifier, OnnxRegressor]
QUICK = {"epochs": 10, "learning_rate": 0.01, "random_state": 0, "threads": 1}


@pytest.fixture(scope="module")
def iris():
    x, y = load_iris(return_X_y=True)
    return StandardScaler().fit_transform(x), np.array(["setosa", "versicolor", "virginica"])[y]


def _run(path, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0]
    return session.run(None, {entry.name: x.astype(np.float64 if "double" in entry.type else np.float32)})


def _ending_in(operator: str, model: onnx.ModelProto) -> onnx.ModelProto:
    """Append an activation to the logits of a model."""
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(onnx.helper.make_node(operator, ["before"], ["logits"]))
    return model


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_pass_scikit_learns_checks(estimator):
    settings = {"hidden_layer_sizes": (32,), "epochs": 15, "learning_rate": 0.02, "threads": 1}
    results = check_estimator(estimator(**settings), on_skip=None)
    assert sum(result["status"] == "passed" for result in results) > 50


@pytest.mark.thorough
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_defaults_pass_scikit_learns_checks(estimator):
    results = check_estimator(estimator(), on_skip=None)
    assert sum(result["status"] == "passed" for result in results) > 50


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_constructor_stores_its_arguments(estimator):
    given = dict.fromkeys(estimator().get_params(), "anything")
    assert estimator(**given).get_params() == given


def test_a_pipeline_learns(iris):
    x, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), OnnxClassifier(**QUICK | {"epochs": 30}))
    assert cross_val_score(pipeline, x, y, cv=3).mean() > 0.9


def test_a_grid_search_chooses_the_rate_that_learns(iris):
    search = GridSearchCV(OnnxClassifier(**QUICK), {"learning_rate": [1e-6, 0.02]}, cv=2).fit(*iris)
    assert search.best_params_ == {"learning_rate": 0.02}
    assert search.best_score_ > 0.9


def test_a_regressor_beats_the_mean():
    x, y = load_diabetes(return_X_y=True)
    x, y = x * 20, (y - y.mean()) / y.std()
    assert OnnxRegressor(**QUICK).fit(x, y).score(x, y) > 0.4


def test_a_regressor_learns_several_columns(iris):
    x = iris[0]
    regressor = OnnxRegressor(mlp((4, 8, 2)), **QUICK | {"epochs": 60}).fit(x, x[:, :2])
    assert regressor.predict(x).shape == (len(x), 2)
    assert regressor.score(x, x[:, :2]) > 0.9


@pytest.mark.parametrize("optimizer", ["adamw(weight_decay=0.1)", onnxtrain.SGD(0.05)])
def test_fit_matches_the_trainer(iris, optimizer):
    """The same model, data, order and optimizer give the same weights bit for bit."""
    x, y = iris[0].astype(np.float32), np.searchsorted(np.unique(iris[1]), iris[1])
    model = mlp((4, 8, 3))
    found = OnnxClassifier(model, optimizer=optimizer, epochs=3, shuffle=False, threads=1).fit(x, y)
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=optimizer, threads=1)
    trainer.fit((x, y), epochs=3, batch_size=64, shuffle=False)
    for name, array in trainer.parameters.items():
        np.testing.assert_array_equal(found.trainer_.parameters[name], array)


def test_labels_come_from_the_data_and_are_saved_beside_the_model(iris, tmp_path):
    x, y = iris
    classifier = OnnxClassifier(mlp((4, 8, 3)), **QUICK).fit(x, y)
    assert list(classifier.classes_) == ["setosa", "versicolor", "virginica"]
    assert classifier.score(x, y) > 0.8
    classifier.save(tmp_path / "tuned.onnx")
    (logits,) = _run(tmp_path / "tuned.onnx", x)
    np.testing.assert_allclose(classifier.predict_proba(x), _softmax(logits), rtol=1e-4, atol=1e-6)
    assert onnxtrain.evaluate(
        tmp_path / "tuned.onnx", (x.astype(np.float32), y), loss="softmax_cross_entropy", metrics=["accuracy"]
    )["accuracy"] == pytest.approx(classifier.score(x, y))


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_probabilities_of_a_model_that_ends_in_its_activation(iris, operator):
    model = _ending_in(operator, mlp((4, 8, 3)))
    plain = OnnxClassifier(mlp((4, 8, 3)), **QUICK).fit(*iris)
    found = OnnxClassifier(model, **QUICK).fit(*iris)
    np.testing.assert_allclose(found.predict_proba(iris[0]), plain.predict_proba(iris[0]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", [None, "Sigmoid", "HardSigmoid"])
def test_one_output_for_two_classes(iris, activation, tmp_path):
    x, y = iris[0][:100], iris[1][:100]
    model = mlp((4, 8, 1))
    if activation:
        model = _ending_in(activation, model)
    classifier = OnnxClassifier(model, **QUICK | {"epochs": 30}).fit(x, y)
    assert classifier.score(x, y) > 0.95
    classifier.save(tmp_path / "binary.onnx")
    (output,) = _run(tmp_path / "binary.onnx", x)
    positive = output[:, 0] if activation else 1 / (1 + np.exp(-output[:, 0]))
    np.testing.assert_allclose(classifier.predict_proba(x), np.stack([1 - positive, positive], 1), atol=1e-6)


def test_rows_fill_the_shape_of_an_image():
    x, y = load_digits(return_X_y=True)
    kept = y < 3
    x, y = x[kept][:200] / 16, y[kept][:200]
    classifier = OnnxClassifier(digits_cnn(), new_head=True, train="head.*", **QUICK).fit(x, y)
    assert classifier.predict_proba(x).shape == (200, 3)
    assert classifier.score(x, y) > 0.9
    before = {tensor.name: tensor.SerializeToString() for tensor in digits_cnn().graph.initializer}
    after = {tensor.name: tensor.SerializeToString() for tensor in classifier.model_.graph.initializer}
    assert {name for name in after if after[name] != before.get(name)} == {"head.weight", "head.bias"}


def test_a_new_head_keeps_the_names_of_columns(tmp_path):
    frame = pytest.importorskip("pandas").DataFrame(np.random.default_rng(0).normal(size=(60, 3)), columns=[*"abc"])
    onnx.save(mlp((3, 8, 4)), tmp_path / "model.onnx")
    (tmp_path / "model.labels.json").write_text(
        '{"columns": {"input": ["c", "a", "b"]}, "labels": ["w", "x", "y", "z"]}'
    )
    classifier = OnnxClassifier(tmp_path / "model.onnx", new_head=True, train="head.*", **QUICK)
    classifier.fit(frame, frame["a"] > 0)
    expected = onnxtrain.predict(classifier.model_, frame[["c", "a", "b"]].to_numpy())
    np.testing.assert_array_equal(classifier.trainer_.predict(frame[["b", "a", "c"]]), expected)
    np.testing.assert_allclose(classifier._outputs(frame), expected)


def test_columns_are_split_over_several_inputs_in_order():
    model = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 18]>
    g (float[N, 2] a, float[N, 2, 1] b) => (float[N] y)
        <float[2, 1] w = {0.5, 0.5}, float[2, 1] v = {0.5, 0.5}, int64[1] last = {1}> {
        f = Flatten(b)  p = MatMul(a, w)  q = MatMul(f, v)  s = Add(p, q)  y = Squeeze(s, last)
    }""")
    x = np.random.default_rng(0).normal(size=(200, 4))
    y = x @ [1.0, -2.0, 3.0, -4.0]
    regressor = OnnxRegressor(model, epochs=60, learning_rate=0.05, random_state=0).fit(x, y)
    np.testing.assert_allclose(regressor.trainer_.get_weights(flat=True), [1, -2, 3, -4], atol=0.01)
    np.testing.assert_allclose(regressor.predict(x), y, atol=0.05)


def test_an_integer_input_takes_integers():
    model = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 18]>
    g (int64[N, 1] token) => (float[N, 2] y) <float[3, 2] table = {0, 0, 0, 0, 0, 0}, int64[1] last = {1}> {
        t = Squeeze(token, last)  y = Gather(table, t)
    }""")
    x = np.arange(30).reshape(-1, 1) % 3
    labels = np.array(["no", "yes"])[(x[:, 0] == 1).astype(int)]
    classifier = OnnxClassifier(model, **QUICK).fit(x.astype(float), labels)
    assert classifier.score(x, labels) == 1
    with raises_sentence("x_not_integer", what="token", got=0.5, wanted="int64"):
        classifier.predict([[0.5]])


def test_partial_fit_continues(iris):
    x, y = iris
    settings = QUICK | {"shuffle": False, "batch_size": 50}
    whole = OnnxClassifier(**settings | {"epochs": 3}).fit(x, y)
    parts = OnnxClassifier(**settings)
    for step in range(9):
        part = slice(step % 3 * 50, step % 3 * 50 + 50)
        parts.partial_fit(x[part], y[part], classes=np.unique(y) if step == 0 else None)
        if step == 4:
            parts = pickle.loads(pickle.dumps(parts))  # with the optimizer's states
    np.testing.assert_allclose(parts.predict_proba(x), whole.predict_proba(x), rtol=1e-9)


def test_a_pickle_predicts_the_same_and_a_clone_is_unfitted(iris):
    classifier = OnnxClassifier(mlp((4, 8, 3)), **QUICK).fit(*iris)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(iris[0]), classifier.predict_proba(iris[0]))
    assert again.model_.graph.initializer == classifier.model_.graph.initializer
    with pytest.raises(NotFittedError):
        clone(classifier).model_  # noqa: B018
    np.testing.assert_array_equal(clone(classifier).fit(*iris).predict(iris[0]), classifier.predict(iris[0]))


def test_text_labels_of_numbers_beside_a_saved_model(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 4))
    y = np.array(["3", "7"])[(x[:, 0] > 0).astype(int)]
    OnnxClassifier(mlp((4, 8, 2)), **QUICK).fit(x, y).save(tmp_path / "tuned.onnx")
    again = OnnxClassifier(tmp_path / "tuned.onnx", **QUICK).fit(x, y)
    assert again.trainer_.labels is None
    assert again.score(x, y) > 0.8


def test_a_saved_model_can_be_trained_further(iris, tmp_path):
    OnnxClassifier(**QUICK).fit(*iris).save(tmp_path / "model.onnx")
    before = (tmp_path / "model.onnx").read_bytes()
    classifier = OnnxClassifier(str(tmp_path / "model.onnx"), **QUICK).fit(*iris)
    assert classifier.history_.column("loss")[0] < 0.5  # an untrained one starts above 1
    assert (tmp_path / "model.onnx").read_bytes() == before


def test_columns_of_a_frame_have_names(iris):
    pandas = pytest.importorskip("pandas")
    x, y = pandas.DataFrame(iris[0], columns=list("abcd")), pandas.Series(iris[1])
    classifier = OnnxClassifier(**QUICK).fit(x, y)
    assert list(classifier.feature_names_in_) == list("abcd")
    with pytest.raises(ValueError, match="feature names"):
        classifier.predict(x[list("dcba")])


def test_only_ratios_of_sample_weights_matter(iris):
    x, y = iris
    weights = np.where(y == "setosa", 3.0, 1.0)
    one = OnnxClassifier(**QUICK).fit(x, y, sample_weight=weights)
    other = OnnxClassifier(**QUICK).fit(x, y, sample_weight=100 * weights)
    without = OnnxClassifier(**QUICK).fit(x, y)
    np.testing.assert_allclose(one.predict_proba(x), other.predict_proba(x), rtol=1e-6)
    assert np.abs(one.predict_proba(x) - without.predict_proba(x)).max() > 1e-3


@pytest.mark.torch
@pytest.mark.parametrize("zipmap", ["", "_zipmap"])
def test_models_of_skl2onnx_can_be_trained(zipmap, tmp_path):
    pytest.importorskip("skl2onnx")
    entry = sklearn_models()[f"mlp_classifier_classes{zipmap}"]
    classifier = OnnxClassifier(entry.model, epochs=1, learning_rate=1e-9).fit(entry.inputs, entry.targets)
    np.testing.assert_allclose(
        classifier.predict_proba(entry.inputs), entry.estimator.predict_proba(entry.inputs), rtol=1e-3, atol=1e-5
    )
    tuned = OnnxClassifier(entry.model, epochs=20, learning_rate=0.02, random_state=0).fit(entry.inputs, entry.targets)
    assert tuned.score(entry.inputs, entry.targets) > entry.estimator.score(entry.inputs, entry.targets)
    tuned.save(tmp_path / "tuned.onnx")
    label = _run(tmp_path / "tuned.onnx", entry.inputs)[0]
    np.testing.assert_array_equal(label, tuned.predict(entry.inputs))


@pytest.mark.torch
def test_a_pipeline_of_skl2onnx_can_be_trained_with_its_preprocessing(tmp_path):
    pytest.importorskip("skl2onnx")
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPRegressor

    x, y = load_diabetes(return_X_y=True)
    x, y = (x * 1000 + 300).astype(np.float32), (y - y.mean()) / y.std()
    pipeline = make_pipeline(
        StandardScaler(), MLPRegressor(hidden_layer_sizes=(16,), max_iter=300, tol=1, random_state=0)
    ).fit(x, y)
    model = to_onnx(pipeline, x[:1], target_opset={"": 18, "ai.onnx.ml": 3})
    assert any(node.op_type == "Scaler" for node in model.graph.node)
    regressor = OnnxRegressor(model, epochs=20, learning_rate=0.01, random_state=0).fit(x, y)
    assert regressor.score(x, y) > pipeline.score(x, y) + 0.1
    regressor.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    assert [node.op_type for node in saved.graph.node] == [node.op_type for node in model.graph.node]
    np.testing.assert_allclose(_run(tmp_path / "tuned.onnx", x)[0][:, 0], regressor.predict(x), rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_weights_in_attributes_can_be_trained(tmp_path):
    pytest.importorskip("skl2onnx")
    entry = sklearn_models()["logistic_regression_classes"]
    classifier = OnnxClassifier(entry.model, epochs=3, learning_rate=0.01).fit(entry.inputs, entry.targets)
    classifier.save(tmp_path / "tuned.onnx")
    _, probabilities = _run(tmp_path / "tuned.onnx", entry.inputs)
    np.testing.assert_allclose(probabilities, classifier.predict_proba(entry.inputs), rtol=1e-4, atol=1e-6)
    assert np.abs(probabilities - entry.estimator.predict_proba(entry.inputs)).max() > 1e-3


def test_another_number_of_classes_needs_a_new_head(iris):
    with raises_sentence("classes_of_output", what="logits", got=5, wanted=3):
        OnnxClassifier(mlp((4, 8, 5)), **QUICK).fit(*iris)
    assert OnnxClassifier(mlp((4, 8, 5)), new_head=True, **QUICK).fit(*iris).predict_proba(iris[0]).shape == (150, 3)
    with raises_sentence("columns_of_output", what="logits", got=5, wanted=1):
        OnnxRegressor(mlp((4, 8, 5)), **QUICK).fit(iris[0], iris[0][:, 0])


def test_invalid_data_are_refused(iris):
    x, y = iris
    with raises_sentence("one_class", what="y", got="setosa"):
        OnnxClassifier().fit(x[:50], y[:50])
    with raises_sentence("columns_of_x", what="X", got=4, wanted=64, inputs="64 for 'image'"):
        OnnxClassifier(digits_cnn(), new_head=True).fit(x, y)
    with raises_sentence("weights_at_least_0", what="sample_weight", got=-1):
        OnnxClassifier().fit(x, y, sample_weight=-np.ones(150))
    with raises_sentence("classes_missing"):
        OnnxClassifier().partial_fit(x, y)
    classifier = OnnxClassifier(**QUICK)
    with pytest.raises(OptionError, match="is not one of the classes"):
        classifier.partial_fit(x, y, classes=np.unique(y)[1:])
    with pytest.raises(ValueError, match=r"only zero weights|at least one non-zero"):  # scikit-learn's own since 1.9
        classifier.partial_fit(x, y, classes=np.unique(y), sample_weight=np.zeros(150))
    with pytest.raises(NotFittedError):  # a failed fit leaves the estimator unfitted
        classifier.predict(x)
    classifier.partial_fit(x[50:], y[50:], classes=np.unique(y)[1:])
    with raises_sentence("label_of_no_class", what="y", got="setosa", wanted=["versicolor", "virginica"]):
        classifier.partial_fit(x, y)
    with raises_sentence("other_classes", what="classes", got=["a", "b"]):
        classifier.partial_fit(x[50:], y[50:], classes=["a", "b"])
    image = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 18]>
    g (float[N, 4] x) => (float[N, 2, 2] y) <float[4] w = {1, 1, 1, 1}, int64[3] s = {0, 2, 2}> {
        p = Mul(x, w)  y = Reshape(p, s)
    }""")
    with raises_sentence("output_needs_rows", what="y", shape="N, 2, 2"):
        OnnxClassifier(image).fit(x, y)


@pytest.mark.parametrize("name", ["OnnxClassifier", "OnnxRegressor"])
def test_without_scikit_learn_one_sentence_says_what_to_install(name, monkeypatch):
    monkeypatch.setattr(onnxtrain, "sklearn", onnxtrain.interop.sklearn)  # importing it again sets it
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    for loaded in [module for module in sys.modules if module.startswith("onnxtrain.interop.sklearn")]:
        monkeypatch.delitem(sys.modules, loaded)
    module = importlib.import_module("onnxtrain.interop.sklearn")
    monkeypatch.undo()
    with raises_sentence("sklearn_missing", estimator=name):
        getattr(module, name)(epochs=3)


def test_the_module_is_loaded_when_it_is_named():
    assert onnxtrain.sklearn.OnnxClassifier is OnnxClassifier


def test_a_fixed_batch_gets_a_hint():
    model = onnxtrain.examples.mlp((4, 3))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_value = 1
    x, y = np.zeros((40, 4), np.float32), np.arange(40) % 3
    with warns_sentence("fixed_batch", size="1 example", step=1, wanted=8):
        fixed = OnnxClassifier(model, epochs=1, batch_size=8).fit(x, y)
    free = OnnxClassifier(onnxtrain.dynamic_batch(model), epochs=1, batch_size=8).fit(x, y)
    assert (fixed.history_.rows[-1]["step"], free.history_.rows[-1]["step"]) == (40, 5)


@pytest.fixture(scope="module")
def several():
    x, y = make_multilabel_classification(120, 6, n_classes=3, random_state=0)
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32), y


def test_an_indicator_asks_several_questions(several):
    """Weights are those of the trainer bit for bit; predictions are those of the saved model."""
    x, y = several
    model = mlp((6, 8, 3))
    found = OnnxClassifier(model, epochs=8, learning_rate=0.02, shuffle=False, threads=1).fit(x, y)
    trainer = onnxtrain.Trainer(model, loss="binary_cross_entropy", optimizer="adam(lr=0.02)", threads=1)
    trainer.fit((x, y.astype(np.float32)), epochs=8, batch_size=64, shuffle=False)
    assert all(np.array_equal(found.trainer_.parameters[name], array) for name, array in trainer.parameters.items())
    chances = 1 / (1 + np.exp(-trainer.predict(x)))
    np.testing.assert_allclose(found.predict_proba(x), chances, rtol=1e-5)
    np.testing.assert_array_equal(found.predict(x), chances > 0.5)
    assert found.score(x, y) == (found.predict(x) == y).all(1).mean()
    assert found.classes_.tolist() == [0, 1, 2]
    sparse = OnnxClassifier(model, epochs=8, learning_rate=0.02, shuffle=False, threads=1).fit(x, csr_matrix(y))
    np.testing.assert_array_equal(sparse.predict_proba(x), found.predict_proba(x))
    with_sigmoid = OnnxClassifier(_ending_in("Sigmoid", mlp((6, 8, 3))), **QUICK).fit(x, y)
    np.testing.assert_array_equal(with_sigmoid.predict_proba(x), with_sigmoid.trainer_.predict(x))
    parts = clone(found)
    for _ in range(3):
        parts.partial_fit(x, y)
    assert parts.predict(x).shape == y.shape
    new = OnnxClassifier(**QUICK).fit(x, y)
    assert new.score(x, y) > 0.4
    assert new.fit(x, y[:, 0]).predict(x).shape == (120,)  # another fit, another kind of y


@pytest.mark.parametrize("by_label", [{"rare": 7.0}, "balanced"])
def test_class_weights_are_weights_of_examples(several, by_label):
    x, y = several[0], np.where(several[0][:, 0] > 0.8, "rare", "often")
    own = np.linspace(0.5, 1.5, 120)
    found = OnnxClassifier(class_weight=by_label, **QUICK).fit(x, y, sample_weight=own)
    weights = own * (
        np.where(y == "rare", 7.0, 1.0)
        if by_label != "balanced"
        else 60 / np.where(y == "rare", (y == "rare").sum(), (y == "often").sum())
    )
    other = OnnxClassifier(**QUICK).fit(x, y, sample_weight=weights)
    np.testing.assert_allclose(found.predict_proba(x), other.predict_proba(x), rtol=1e-5, atol=1e-6)
    plain = OnnxClassifier(**QUICK).fit(x, y, sample_weight=own)
    assert (found.predict(x) == "rare").sum() > (plain.predict(x) == "rare").sum()
    assert clone(found).get_params()["class_weight"] == by_label


def test_class_weights_of_an_indicator_and_of_parts(several):
    x, y = several
    rows = np.where(y[:, 1] == 1, 5.0, 1.0)
    weights = [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 5.0}, {0: 1.0, 1: 1.0}]
    found, other = OnnxClassifier(class_weight=weights, **QUICK).fit(x, y), OnnxClassifier(**QUICK).fit(x, y, rows)
    np.testing.assert_allclose(found.predict_proba(x), other.predict_proba(x), rtol=1e-5, atol=1e-6)
    parts = OnnxClassifier(class_weight={1: 5.0}, **QUICK).partial_fit(x, y[:, 1], classes=[0, 1])
    wanted = OnnxClassifier(**QUICK).partial_fit(x, y[:, 1], classes=[0, 1], sample_weight=rows)
    np.testing.assert_allclose(parts.predict_proba(x), wanted.predict_proba(x), rtol=1e-5, atol=1e-6)


def test_targets_and_class_weights_that_do_not_fit(several):
    x, y = several
    with pytest.raises(OptionError, match="y has several columns that are not all 0 and 1; give one column of labels"):
        OnnxClassifier(**QUICK).fit(x, y + 1 + np.arange(3))
    fitted = OnnxClassifier(**QUICK).fit(x, y)
    with pytest.raises(OptionError, match=r"y has the shape \(120, 2\); earlier data have 3 columns"):
        fitted.partial_fit(x, y[:, :2])
    with pytest.raises(OptionError, match="class_weight='balanced' needs all data, and partial_fit has some"):
        OnnxClassifier(class_weight="balanced").partial_fit(x, y[:, 0], classes=[0, 1])
    with pytest.raises(ValueError, match=r"class_weight.*Got 'equal' instead"):
        OnnxClassifier(class_weight="equal").fit(x, y[:, 0])
    with pytest.raises(OptionError, match="is for 2 classes, but there are 3"):
        OnnxClassifier(mlp((6, 2)), **QUICK).fit(x, y)
