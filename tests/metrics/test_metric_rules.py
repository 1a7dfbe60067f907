"""Rules for every metric, found by reflection: NaN scores, batches, scikit-learn's values, invalid arguments."""

from __future__ import annotations

import dataclasses
import pickle
import warnings

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import examples, losses, metrics
from onnxtrain.errors import DataError, OnnxTrainError, OptionError
from onnxtrain.metrics.base import MetricInput, NamedMetric
from onnxtrain.metrics.choice import METRICS, metric_for_loss
from onnxtrain.metrics.dataset_metrics import AVERAGES, DATASET_METRIC_NAMES, DATASET_METRICS
from onnxtrain.metrics.error_rates import CharacterErrorRate
from onnxtrain.metrics.means import BUILT_IN
from onnxtrain.training.report.record import large_is_good
from sentences import raises_sentence

oracle = pytest.importorskip("sklearn.metrics")

OF_NUMBERS = ("rmse", "cosine_similarity")  # of a plugin
NAMES = [*BUILT_IN, *DATASET_METRICS, "top_k(2)", "calibration_error(3)", *OF_NUMBERS]
X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
LABELS = np.arange(40) % 3


def reads(name):
    if name in OF_NUMBERS:
        return ("numbers",)
    entry = BUILT_IN.get(name) or DATASET_METRICS.get(name.partition("(")[0])
    return ("classes",) if entry is None else entry.reads


PAIRS = [(name, kind) for name in NAMES for kind in reads(name)]


def data(kind, seed=0, rows=60):
    """Return targets and scores with ties."""
    random = np.random.default_rng(seed)
    scores = random.integers(-3, 4, (rows, 4)).astype(np.float32) / 2
    truth = {
        "classes": random.integers(0, 4, rows),
        "binary": random.integers(0, 2, (rows, 4)).astype(np.float32),
        "numbers": random.integers(-2, 3, (rows, 4)).astype(np.float32),
    }[kind]
    return truth, scores


def one(name, kind, truth, scores):
    metric = metric_for_loss(MetricInput("a loss", kind), name)
    return metric.result(metric.update(metric.start(), truth, scores))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_one_nan_score_makes_every_metric_nan(name, kind):
    truth, scores = data(kind)
    assert np.isfinite(one(name, kind, truth, scores)).all()
    scores[41, 2] = np.nan
    assert np.isnan(one(name, kind, truth, scores))
    metric = metric_for_loss(MetricInput("a loss", kind), name)
    parts = [metric.update(metric.start(), truth[rows], scores[rows]) for rows in np.split(np.arange(60), 4)]
    state = metric.start()
    for part in parts:
        state = metric.merge(state, pickle.loads(pickle.dumps(part)))
    assert np.isnan(metric.result(state))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
@pytest.mark.parametrize("cuts", [(1,), (30,), (7, 8, 50), tuple(range(1, 60))], ids=["1", "2", "4", "60"])
def test_batches_give_every_metric_of_the_data_set(name, kind, cuts):
    truth, scores = data(kind)
    metric = metric_for_loss(MetricInput("a loss", kind), name)
    state = metric.start()
    for rows in np.split(np.arange(60), cuts):
        part = metric.update(metric.start(), truth[rows], scores[rows])
        state = metric.merge(state, pickle.loads(pickle.dumps(part)))
    np.testing.assert_allclose(metric.result(state), one(name, kind, truth, scores), rtol=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_no_examples_give_nan(name, kind):
    truth, scores = data(kind)
    metric = metric_for_loss(MetricInput("a loss", kind), name)
    assert np.isnan(metric.result(metric.start()))
    assert np.all(np.isnan(found := one(name, kind, truth[:0], scores[:0]))) or not np.any(found)


def test_nan_at_ignored_labels_is_skipped():
    truth, scores = data("classes")
    truth[5], scores[5] = -100, np.nan
    metric_input = MetricInput("a loss", "classes", ignore_index=-100)
    for name in ("accuracy", "f1", "top_k(2)", "perplexity"):
        metric = metric_for_loss(metric_input, name)
        found = metric.result(metric.update(metric.start(), truth, scores))
        assert found == pytest.approx(one(name, "classes", np.delete(truth, 5), np.delete(scores, 5, 0)))
    words = np.array([[1, -100, 2], [0, 1, 1]])
    logits = np.random.default_rng(0).normal(size=(2, 3, 4))
    logits[0, 0] = np.nan  # its target is the next token, which is ignored
    later = metric_for_loss(MetricInput("next_token", "classes", axis=2, ignore_index=-100, later=1), "accuracy")
    assert np.isfinite(later.result(later.update(later.start(), words, logits)))
    logits[0, 1] = np.nan
    assert np.isnan(later.result(later.update(later.start(), words, logits)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BUILT_IN)
def test_metric_functions_return_nan_too(name):
    kind = BUILT_IN[name].reads[0]
    truth, scores = data(kind)
    assert np.isfinite(getattr(metrics, name)(truth, scores))
    scores[3, 1] = np.nan
    assert np.isnan(getattr(metrics, name)(truth, scores))
    assert np.isnan(getattr(metrics, name)(truth.tolist(), scores.tolist()))


def nan_model(loss="cross_entropy", **options):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=loss, **options)
    trainer.set_weights({"layer2.bias": np.full(3, np.nan, np.float32)})
    return trainer


def test_a_nan_model_has_nan_metrics_only():
    def hits(y_true, y_pred):
        return np.mean(y_pred.argmax(1) == y_true)

    class Own:
        name, of_output = "own", True

        def start(self):
            return 0

        def update(self, state, y_true, y_pred):
            return state + len(y_true)

        def merge(self, state, other):
            return state + other

        def result(self, state):
            return state

    trainer = nan_model()
    asked = [name for name in NAMES if "classes" in reads(name) and name != "calibration_error(3)"]
    found = trainer.evaluate(X, LABELS, metrics=[*asked, hits, Own()], batch_size=7)
    assert all(np.isnan(value) for value in found.values()), found
    right = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")
    assert right.evaluate(X, LABELS, metrics=Own(), batch_size=7)["own"] == 40
    assert (trainer.predict(X, labels=True) == -1).all()


# --- scikit-learn


def softmax(z):
    p = np.exp(z.astype(np.float64) - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def macro(score, average):
    return lambda t, z: score(t, z.argmax(1), average=average, zero_division=0)


SCORES = {
    "precision": oracle.precision_score,
    "recall": oracle.recall_score,
    "f1": oracle.f1_score,
    "iou": oracle.jaccard_score,
}
CLASSES = {
    **{f"{name}_{average}": macro(score, average) for name, score in SCORES.items() for average in AVERAGES},
    "accuracy": lambda t, z: oracle.accuracy_score(t, z.argmax(1)),
    **{
        f"top_k({k})": (lambda t, z, k=k: oracle.top_k_accuracy_score(t, z, k=k, labels=range(z.shape[1])))
        for k in (1, 2, 3)
    },
    "perplexity": lambda t, z: np.exp(oracle.log_loss(t, softmax(z), labels=range(z.shape[1]))),
}


@pytest.mark.parametrize("case", ["random", "ties", "all alike", "a class is missing", "two classes"])
@pytest.mark.parametrize("name", CLASSES)
def test_classes_match_scikit_learn(name, case):
    for seed in range(5):
        random = np.random.default_rng(seed)
        width = 2 if case == "two classes" else 4
        truth, scores = random.integers(0, width, 30), random.normal(size=(30, width))
        if case == "ties":
            scores = np.round(scores)
        if case == "all alike":
            scores = np.zeros_like(scores)
        if case == "a class is missing":
            truth = np.where(truth == 2, 0, truth)
            scores[:, 2] -= 100 * (seed % 2)
        if name.startswith("top_k") and width == 2:
            continue  # scikit-learn takes one column of scores for two classes
        found = one(name, "classes", truth, scores)
        assert found == pytest.approx(CLASSES[name](truth, scores), abs=1e-12), (name, case, seed)


def test_ties_are_not_hits_of_top_k():
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 10)), loss="cross_entropy")
    trainer.set_weights({name: np.zeros_like(array) for name, array in trainer.get_weights().items()})
    labels = np.arange(40) % 10
    found = trainer.evaluate(X, labels, metrics="top_k(5),top_k(1)")
    assert (found["top_k(5)"], found["top_k(1)"]) == (0.5, 0.1)  # as guessing


QUESTIONS = {
    f"{name}_{average}": (lambda t, z, s=score, a=average: s(t, z > 0, average=a, zero_division=0))
    for name, score in SCORES.items()
    for average in AVERAGES
} | {
    "accuracy": lambda t, z: np.mean((z > 0) == t),
    "average_precision": lambda t, z: oracle.average_precision_score(t, z),
    "auc": lambda t, z: oracle.roc_auc_score(t, z),
}


@pytest.mark.parametrize("questions", [1, 3])
@pytest.mark.parametrize("name", QUESTIONS)
def test_binary_outputs_match_scikit_learn(name, questions):
    for seed in range(5):
        random = np.random.default_rng(seed)
        truth, scores = random.integers(0, 2, (30, questions)), np.round(random.normal(size=(30, questions)), 1)
        expected = QUESTIONS[name](truth, scores) if questions > 1 else QUESTIONS[name](truth[:, 0], scores[:, 0])
        assert one(name, "binary", truth, scores) == pytest.approx(expected, abs=1e-12)


def test_a_binary_output_without_positives():
    truth, scores = np.zeros((9, 1)), np.arange(9.0)[:, None]
    with pytest.warns(UserWarning, match="No positive class"):
        expected = oracle.average_precision_score(truth, scores)
    assert one("average_precision", "binary", truth, scores) == expected == 0
    assert one("average_precision", "binary", 1 - truth, scores) == oracle.average_precision_score(1 - truth, scores)
    assert np.isnan(one("auc", "binary", truth, scores))


NUMBERS = {
    "r2": oracle.r2_score,
    "rmse": oracle.root_mean_squared_error,
    "mean_squared_error": oracle.mean_squared_error,
    "mean_absolute_error": oracle.mean_absolute_error,
    "mean_absolute_percentage_error": oracle.mean_absolute_percentage_error,
}


@pytest.mark.parametrize("columns", [0, 1, 2, 5])
@pytest.mark.parametrize("case", ["random", "scaled", "constant", "constant and right", "one constant column", "zeros"])
@pytest.mark.parametrize("name", NUMBERS)
def test_values_match_scikit_learn(name, case, columns):
    for seed in range(5):
        random = np.random.default_rng(seed)
        shape = (20, columns) if columns else (20,)
        truth, found = random.normal(size=shape), random.normal(size=shape)
        if case == "scaled":
            truth = truth * 10.0 ** np.arange(max(columns, 1)) if columns else truth * 100
            found = truth + found
        if case.startswith("constant"):
            truth = np.full(shape, 2.5)
            found = truth.copy() if "right" in case else found
        if case == "one constant column":
            truth[..., -1:] = 1.0
        if case == "zeros":
            truth[:3] = 0
        assert one(name, "numbers", truth, found) == pytest.approx(NUMBERS[name](truth, found), rel=1e-9)


def test_r2_of_one_example_is_nan_as_in_scikit_learn():
    with pytest.warns(UserWarning, match="R\\^2 score is not well-defined"):
        assert np.isnan(oracle.r2_score([1.0], [2.0]))
    assert np.isnan(one("r2", "numbers", np.ones(1), np.zeros(1)))


def test_r2_of_several_outputs_is_the_mean_over_them():
    y = (X[:, :2] * [1, 1000]).astype(np.float32)
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 2)), loss="mse")
    found = trainer.evaluate(X, y, metrics="r2", batch_size=7)["r2"]
    assert found == pytest.approx(oracle.r2_score(y, trainer.predict(X)), rel=1e-5)


@pytest.mark.parametrize("bins", [15, 4])
def test_the_calibration_error_matches_the_calibration_curve(bins):
    from sklearn.calibration import calibration_curve

    random = np.random.default_rng(0)
    truth, scores = random.integers(0, 2, (200, 1)), random.normal(size=(200, 1)) * 2
    chances = 1 / (1 + np.exp(-scores[:, 0]))
    right, said = calibration_curve(truth[:, 0], chances, n_bins=bins)
    counts = np.bincount(np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], chances), minlength=bins)
    expected = (np.abs(right - said) * counts[counts > 0]).sum() / 200
    assert one(f"calibration_error({bins})", "binary", truth, scores) == pytest.approx(expected)
    several = random.normal(size=(200, 4))
    labels, p = random.integers(0, 4, 200), softmax(several)
    hit, sure = p.argmax(1) == labels, p.max(1)
    places = np.digitize(sure, np.linspace(0, 1, bins + 1)[1:-1], right=True)
    expected = sum(abs(hit[places == b].sum() - sure[places == b].sum()) for b in range(bins)) / 200
    assert one(f"calibration_error({bins})", "classes", labels, several) == pytest.approx(expected)


def test_the_confusion_matrix_matches_scikit_learn():
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3), seed=3), loss="cross_entropy")
    said = trainer.predict(X).argmax(1)
    expected = oracle.confusion_matrix(LABELS, said, labels=range(3))
    np.testing.assert_array_equal(
        trainer.evaluate(X, LABELS, metrics="confusion_matrix", batch_size=7)["confusion_matrix"], expected
    )
    np.testing.assert_array_equal(metrics.confusion_matrix(LABELS, said, classes=3), expected)
    np.testing.assert_array_equal(metrics.confusion_matrix(LABELS, trainer.predict(X)), expected)
    answers = (X[:, :2] > 0).astype(np.float32)
    binary = onnxtrain.Trainer(examples.mlp((4, 8, 2)), loss="bce")
    found = binary.evaluate(X, answers, metrics="confusion_matrix")["confusion_matrix"]
    np.testing.assert_array_equal(found, oracle.multilabel_confusion_matrix(answers, binary.predict(X) > 0))
    with raises_sentence("metric_is_a_table", what="confusion_matrix"):
        trainer.fit(X, LABELS, validation=0.2, metrics="confusion_matrix", progress=False)
    with pytest.raises(DataError, match="y_pred holds NaN"):
        metrics.confusion_matrix([0], [[np.nan, 1.0]])


def test_sample_weights_do_not_affect_metrics():
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")
    plain = trainer.evaluate(X, LABELS, metrics="accuracy,f1,auc")
    weighed = trainer.evaluate(X, LABELS, metrics="accuracy,f1,auc", sample_weight=np.arange(40.0))
    assert plain.pop("loss") != weighed.pop("loss")
    assert plain == weighed


# --- labels and probabilities


@pytest.mark.parametrize("ending", ["", "Softmax"])
def test_probabilities_and_labels_of_classes(ending):
    model = examples.mlp((4, 8, 3), seed=3)
    if ending:
        model.graph.node.append(onnx.helper.make_node(ending, ["logits"], ["p"], axis=1))
        model.graph.output[0].name = "p"
    names = np.array(["cat", "dog", "eel"])
    trainer = onnxtrain.Trainer(model, loss="cross_entropy")
    assert trainer.predict(X, labels=True).tolist() == trainer.predict(X).argmax(1).tolist()
    trainer.fit(X, names[LABELS], progress=False)
    raw = trainer.predict(X)
    np.testing.assert_allclose(trainer.predict_proba(X), raw if ending else softmax(raw), rtol=1e-5)
    assert trainer.predict_proba(X, batch_size=7).dtype == np.float32
    assert trainer.predict(X, labels=True).tolist() == names[raw.argmax(1)].tolist()


def test_probabilities_and_labels_of_binary_outputs():
    for width in (1, 3):
        trainer = onnxtrain.Trainer(examples.mlp((4, 8, width)), loss="bce")
        raw = trainer.predict(X).astype(np.float64)
        yes = 1 / (1 + np.exp(-raw))
        expected = np.concatenate([1 - yes, yes], 1) if width == 1 else yes
        np.testing.assert_allclose(trainer.predict_proba(X), expected, rtol=1e-5)
        said = trainer.predict(X, labels=True)
        assert said.tolist() == ((raw > 0).astype(int)[:, 0] if width == 1 else (raw > 0).astype(int)).tolist()


@pytest.mark.parametrize("ask", [lambda t: t.predict_proba(X), lambda t: t.predict(X, labels=True)])
def test_values_have_no_probabilities(ask):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="mse")
    with raises_sentence("needs_scores", got="mean_squared_error"):
        ask(trainer)


# --- user-defined functions, names


def test_a_function_sees_all_data_at_once():
    seen = []

    def worst(y_true, y_pred):
        seen.append((y_true, y_pred))
        return np.abs(y_true - y_pred).max()

    y = X[:, :1]
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 1)), loss="mse")
    found = [trainer.evaluate(X, y, metrics=worst, batch_size=size)["worst"] for size in (1, 7, 40)]
    np.testing.assert_allclose(found, np.abs(y - trainer.predict(X)).max(), rtol=1e-6)
    assert all(len(targets) == len(predictions) == 40 for targets, predictions in seen)
    rows = trainer.fit(X, y, validation=(X, y), metrics=[worst], batch_size=4, progress=False).rows
    assert rows[-1]["val_worst"] == pytest.approx(np.abs(y - trainer.predict(X)).max(), rel=1e-5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("accuracy,f1", ["accuracy", "f1"]),
        (" accuracy , top_k(2), f1(average=micro),", ["accuracy", "top_k(2)", "f1(average=micro)"]),
        (["accuracy,f1", "auc"], ["accuracy", "f1", "auc"]),
        (("f1(average='weighted')",), ["f1(average='weighted')"]),
        ("top_2,ece,f1_score", ["top_2", "ece", "f1_score"]),
        (np.array(["accuracy", "f1_micro"]), ["accuracy", "f1_micro"]),
        ({"logits": "acc,f1"}, ["acc", "f1"]),
        (None, []),
        ("", []),
    ],
)
def test_text_lists_several_metrics(given, expected):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")
    assert list(trainer.evaluate(X, LABELS, metrics=given)) == ["loss", *expected]
    assert expected == [] or trainer.fit(X, LABELS, validation=0.2, metrics=given, progress=False).rows


def test_names_of_other_libraries_are_aliases():
    for one_name, other in {"mape": "mean_absolute_percentage_error", "mae": "mean_absolute_error"}.items():
        assert one(one_name, "numbers", *data("numbers")) == one(other, "numbers", *data("numbers"))
    for one_name, other in {"ece": "calibration_error", "f1_score": "f1", "roc_auc": "auc", "acc": "accuracy"}.items():
        assert one(one_name, "classes", *data("classes")) == one(other, "classes", *data("classes"))


@pytest.mark.parametrize(
    ("wrong", "right"), [("acuracy", "accuracy"), ("f1-score", "f1_score"), ("AUC", "auc"), ("calibraton", "calib.*")]
)
def test_a_wrong_name_suggests_the_nearest_one(wrong, right):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")
    with pytest.raises(OptionError, match=f"There is no metric '{wrong}': use accuracy, .* The nearest is '{right}'"):
        trainer.evaluate(X, LABELS, metrics=wrong)


def loss(y_true, y_pred):
    return 0.0


@pytest.mark.parametrize(
    ("twice", "name"),
    [
        ("f1,f1", "f1"),
        (["accuracy", "accuracy"], "accuracy"),
        ([lambda t, p: 0.0, lambda t, p: 1.0], "<lambda>"),
        (loss, "loss"),
    ],
)
def test_two_metrics_of_one_name_are_an_error(twice, name):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")
    with raises_sentence("metric_name_twice", what=name):
        trainer.evaluate(X, LABELS, metrics=twice)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda t: 0.0, r"function '<lambda>' takes the arguments \(t\); it is called with two"),
        (lambda t, p: None, "function '<lambda>' returned None; it needs to return one number"),
        (lambda t, p: p, r"returned an? ndarray of shape .40, 3.; it needs"),
        (CharacterErrorRate, r"The metric is the class CharacterErrorRate; give an object: CharacterErrorRate\(\)"),
        ("f1(average=samples)", r"average is samples in 'f1\(average=samples\)'; it is macro, micro, weighted"),
        ("auc(3)", r"'auc\(3\)' gives the metric auc unknown arguments; it takes no arguments"),
        ("f1(k=3)", "gives the metric f1 unknown arguments; it takes average alone"),
        ("calibration_error(none)", r"needs a number of bins of at least 1, as in 'calibration_error\(15\)'"),
        (3, "metrics is an int 3; give names such as 'accuracy,f1'"),
        ([[1]], "A metric is a name or a function of .* not a list"),
    ],
)
def test_invalid_metrics_are_refused(given, message):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")
    with pytest.raises(OptionError, match=message):
        trainer.evaluate(X, LABELS, metrics=given)


def test_batches_of_different_shapes_are_refused_for_functions_only():
    metric = metrics.resolve_metric(lambda t, p: 0.0)
    state = metric.update(metric.start(), np.ones((2, 3)), np.ones((2, 3)))
    state = metric.merge(state, metric.update(metric.start(), np.ones((2, 4)), np.ones((2, 4))))
    with raises_sentence("metric_shapes", what="<lambda>", what2="targets"):
        metric.result(state)


# --- invalid arguments

KINDS_OF_VALUES = {
    "none": None,
    "integer": 3,
    "float": float("nan"),
    "text": "abc",
    "bytes": b"x",
    "truth": True,
    "empty": [],
    "texts": ["a"] * 12,
    "nones": [None] * 12,
    "ragged": [[1, 2], [3]],
    "by_text": {"a": 1},
    "by_class": {1: "a"},
    "nested": {"layer1.weight": [[1], [1, 2]]},
    "set": {1, 2},
    "object": object(),
    "type": int,
    "function": len,
    "generator": (index for index in range(3)),
    "complex": np.ones(12) * 1j,
    "dates": np.array(["2020-01-01"] * 12, "M8[D]"),
    "scalar": np.array(1.0),
    "columns": np.ones((12, 2)),
    "nan": np.full(12, np.nan),
    "negative": -np.ones(12),
    "short": np.ones(5),
    "records": np.zeros(12, [("a", int)]),
    "huge": [10**400, 1, 1],
    "zeros": [0, 0, 0],
}
XS, YS = X[:12], LABELS[:12]


def small(**given):
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), **{"loss": "cross_entropy", **given})


ARGUMENTS = {
    "masks": lambda v: small(masks=v),
    "set_masks": lambda v: small().set_masks(v),
    "sample_weight of train_step": lambda v: small().train_step(XS, YS, v),
    "sample_weight of fit": lambda v: small().fit(XS, YS, sample_weight=v, progress=False),
    "sample_weight of evaluate": lambda v: small().evaluate(XS, YS, sample_weight=v),
    **{
        f"class_weights of {name}": (
            lambda v, kind=kind: kind(**({"teacher": "t.onnx"} if kind is losses.Distillation else {}), class_weights=v)
        )
        for name, kind in losses.LOSSES.items()
        if "class_weights" in [field.name for field in dataclasses.fields(kind)]
    },
    "metrics of evaluate": lambda v: small().evaluate(XS, YS, metrics=v),
    "metrics of fit": lambda v: small().fit(XS, YS, metrics=[v], validation=0.3, progress=False),
    "metrics without validation": lambda v: small().fit(XS, YS, metrics=v, progress=False),
    "metrics by output": lambda v: small().evaluate(XS, YS, metrics={"logits": v}),
    **{
        f"{side} of {name}": (lambda v, m=name, s=side: getattr(metrics, m)(*((v, XS) if s == "y_true" else (YS, v))))
        for name in [*BUILT_IN, "confusion_matrix"]
        for side in ("y_true", "y_pred")
    },
    **{
        f"{option} of {name}": (lambda v, m=name, o=option: getattr(metrics, m)(YS, XS, **{o: v}))
        for name, entry in BUILT_IN.items()
        for option in entry.terms.__kwdefaults__ or {}
    },
    "classes of confusion_matrix": lambda v: metrics.confusion_matrix(YS, YS, classes=v),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_invalid_arguments_raise_this_package_s_errors(argument):
    """Any argument either works or raises an error of this package with a sentence."""
    sentences = []
    for kind, value in KINDS_OF_VALUES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                ARGUMENTS[argument](value)
            except OnnxTrainError as error:
                sentences.append((kind, str(error)))
    assert [sentence for sentence in sentences if not sentence[1].endswith((".", ")")) or "defect" in sentence[1]] == []


def test_a_metric_object_is_used_unchanged():
    metric = metrics.resolve_metric(CharacterErrorRate())
    assert isinstance(metric, NamedMetric)
    assert metric.name == "character_error_rate"


def test_several_outputs_have_labels_and_probabilities_by_name():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 4] x) => (float[n, 3] kind, float[n, 1] sure)
        <float[4, 3] a = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1}, float[4, 1] b = {1, 0, 0, 1}>
        { kind = MatMul(x, a)  z = MatMul(x, b)  sure = Sigmoid(z) }""")
    trainer = onnxtrain.Trainer(model, loss={"kind": "cross_entropy", "sure": "bce"})
    raw = trainer.predict(X)
    chances, said = trainer.predict_proba(X), trainer.predict(X, labels=True)
    np.testing.assert_allclose(chances["kind"], softmax(raw["kind"]), rtol=1e-5)
    np.testing.assert_allclose(chances["sure"][:, 1:], raw["sure"], rtol=1e-5)
    assert said["kind"].tolist() == raw["kind"].argmax(1).tolist()
    assert said["sure"].tolist() == (raw["sure"][:, 0] > 0.5).astype(int).tolist()
    targets = {"kind": LABELS, "sure": (X[:, :1] > 0).astype(np.float32)}
    found = trainer.evaluate(X, targets, metrics={"kind": "accuracy,f1_micro", "sure": "auc"})
    assert {"kind_accuracy", "kind_f1_micro", "sure_auc"} <= found.keys()

    def loss(y_true, y_pred):
        return 0.0

    with pytest.raises(OptionError, match="Two values would be called 'kind_loss'"):
        trainer.evaluate(X, targets, metrics={"kind": loss})


def test_heads_of_several_kinds_answer_where_they_can():
    """Outputs of numbers keep their values among labels, and have no probabilities."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 4] x) => (float[n, 3] kind, float[n, 1] size)
        <float[4, 3] a = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1}, float[4, 1] b = {1, 0, 0, 1}>
        { kind = MatMul(x, a)  size = MatMul(x, b) }""")
    trainer = onnxtrain.Trainer(model, loss={"kind": "cross_entropy", "size": "mse"})
    raw, said = trainer.predict(X), trainer.predict(X, labels=True)
    assert said["kind"].tolist() == raw["kind"].argmax(1).tolist()
    np.testing.assert_array_equal(said["size"], raw["size"])
    chances = trainer.predict_proba(X)
    assert chances.keys() == {"kind"}
    np.testing.assert_allclose(chances["kind"], softmax(raw["kind"]), rtol=1e-5)
    with pytest.raises(OptionError, match="needs scores over classes"):
        onnxtrain.Trainer(model, loss={"kind": "mse", "size": "mse"}).predict_proba(X)


def test_scores_that_are_nan_have_no_label():
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy")
    trainer.fit(X, np.array(["cat", "dog", "eel"])[LABELS], progress=False)
    trainer.set_weights({name: np.full_like(value, np.nan) for name, value in trainer.get_weights().items()})
    assert set(trainer.predict(X, labels=True)) == {"-1"}


def test_save_best_knows_the_direction_of_every_metric():
    small = {"perplexity", "calibration_error", "ece", "expected_calibration_error", "confusion_matrix"}
    small |= BUILT_IN.keys() - {"accuracy"} | {"rewards/rejected", "rmse"}
    for name in [
        *DATASET_METRIC_NAMES,
        *BUILT_IN,
        *METRICS,
        "acc",
        "mape",
        "cer",
        "wer",
        "top_5",
    ]:
        assert large_is_good(f"val_{name}") == (name not in small | {"mape", "cer", "wer"}), name


def test_labels_may_be_integral_floats():
    truth, scores = data("classes")
    assert one("f1", "classes", truth.astype(np.float32), scores) == one("f1", "classes", truth, scores)
    with pytest.raises(DataError, match="class indices must be integers"):
        one("f1", "classes", truth + 0.5, scores)
