"""Metrics against independent formulas, scikit-learn and PyTorch, and combined means of batches."""

import math

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import metrics
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses import CustomLoss
from onnxtrain.metrics import resolve_metric
from onnxtrain.metrics.base import MeanAccumulator
from onnxtrain.metrics.means import BUILT_IN
from onnxtrain.training.inference.forward import evaluate
from sentences import raises_sentence


@pytest.fixture
def random():
    return np.random.default_rng(0)


def test_accuracy_of_indices_one_hot_and_class_predictions(random):
    logits = random.normal(size=(50, 4)).astype(np.float32)
    labels = random.integers(0, 4, 50)
    expected = np.mean([row.argmax() == label for row, label in zip(logits, labels, strict=True)])
    assert 0 < expected < 1
    assert metrics.accuracy(labels, logits) == pytest.approx(expected)
    assert metrics.accuracy(labels[:, None], logits) == pytest.approx(expected)
    assert metrics.accuracy(np.eye(4)[labels], logits) == pytest.approx(expected)
    assert metrics.accuracy(labels, logits.argmax(1)) == pytest.approx(expected)
    assert metrics.accuracy(labels.astype(str), logits.argmax(1).astype(str)) == pytest.approx(expected)


def test_accuracy_of_images_and_sequences(random):
    labels = random.integers(0, 3, (2, 5, 6))
    scores = random.normal(size=(2, 3, 5, 6))
    expected = (scores.argmax(1) == labels).mean()
    assert metrics.accuracy(labels, scores) == pytest.approx(expected)
    assert metrics.accuracy(labels, np.moveaxis(scores, 1, -1), axis=3) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("truth_shape", [(4,), (4, 1)])
def test_accuracy_of_one_column(shape, truth_shape):
    truth = np.array([0, 1, 1, 0]).reshape(truth_shape)
    assert metrics.accuracy(truth, np.array([0.2, 0.7, 0.4, 0.1]).reshape(shape)) == 0.75
    assert metrics.accuracy(truth, np.array([-2.0, 0.1, 0.4, 0.3]).reshape(shape), threshold=0.0) == 0.75


def test_accuracy_skips_ignored_labels():
    scores = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert metrics.accuracy(np.array([0, -1, 0]), scores, ignore_index=-1) == 0.5
    assert math.isnan(metrics.accuracy(np.array([-1, -1, -1]), scores, ignore_index=-1))


@pytest.mark.torch
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [None, 1, -100])
@pytest.mark.parametrize("form", ["indices", "probabilities", "images"])
def test_softmax_cross_entropy_equals_pytorch(random, weighted, label_smoothing, ignore_index, form):
    torch = pytest.importorskip("torch")
    shape = (6, 3, 2, 2) if form == "images" else (6, 3)
    logits = random.normal(size=shape) * 3
    labels = random.integers(0, 3, (shape[0], *shape[2:]))
    if ignore_index is not None:
        labels[1] = ignore_index
    if form == "probabilities":
        ignore_index, labels = None, random.dirichlet(np.ones(3), 6)
    weights = np.array([0.2, 1.0, 3.0]) if weighted else None
    theirs = torch.nn.functional.cross_entropy(
        torch.tensor(logits),
        torch.tensor(labels),
        weight=None if weights is None else torch.tensor(weights),
        label_smoothing=label_smoothing,
        ignore_index=-100 if ignore_index is None else ignore_index,
    )
    ours = metrics.softmax_cross_entropy(
        labels, logits, class_weights=weights, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    assert ours == pytest.approx(float(theirs), rel=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("binary_cross_entropy", "binary_cross_entropy_with_logits", {}),
        ("mean_squared_error", "mse_loss", {}),
        ("mean_absolute_error", "l1_loss", {}),
        ("huber", "huber_loss", {}),
        ("huber", "huber_loss", {"delta": 0.3}),
    ],
)
def test_other_losses_equal_pytorch(random, name, theirs, options):
    torch = pytest.importorskip("torch")
    y_true, y_pred = random.uniform(size=(7, 2)), random.normal(size=(7, 2))
    expected = getattr(torch.nn.functional, theirs)(torch.tensor(y_pred), torch.tensor(y_true), **options)
    assert getattr(metrics, name)(y_true, y_pred, **options) == pytest.approx(float(expected), rel=1e-12)


def test_losses_by_hand():
    labels, logits = np.array([0, 1]), np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    expected = -(math.log(0.5) + math.log(0.8)) / 2
    assert metrics.softmax_cross_entropy(labels, logits) == pytest.approx(expected)
    assert metrics.softmax_cross_entropy(np.eye(3)[labels], logits) == pytest.approx(expected)
    smooth = metrics.softmax_cross_entropy(labels[:1], logits[:1], label_smoothing=0.3)
    assert smooth == pytest.approx(-(0.8 * math.log(0.5) + 0.2 * math.log(0.25)))
    truth, prediction = np.array([1.0, 0.0]), np.array([0.5, 3.0])
    assert metrics.mean_squared_error(truth, prediction) == (0.25 + 9) / 2
    assert metrics.mean_absolute_error(truth, prediction) == 1.75
    assert metrics.huber(truth, prediction) == (0.125 + 2.5) / 2
    sigmoid = 1 / (1 + np.exp(-prediction))
    assert metrics.binary_cross_entropy(truth, prediction) == pytest.approx(
        -(math.log(sigmoid[0]) + math.log(1 - sigmoid[1])) / 2
    )


def test_losses_are_stable_where_naive_formulas_overflow():
    labels = np.array([0, 1])
    logits = np.array([[1e4, -1e4], [1e4, -1e4]], np.float32)
    assert metrics.softmax_cross_entropy(labels, logits) == 1e4
    assert metrics.binary_cross_entropy(np.array([0.0, 1.0]), np.array([1e4, 1e4])) == 5e3
    certain = np.array([[0.0, -np.inf]])
    assert metrics.softmax_cross_entropy(np.array([0]), certain) == 0.0
    assert metrics.softmax_cross_entropy(np.array([1]), certain) == math.inf
    # float16 sums of many values would be far off
    many = np.full(100_000, 0.1, np.float16)
    assert metrics.mean_absolute_error(np.zeros_like(many), many) == pytest.approx(float(np.float16(0.1)))


def test_a_column_does_not_broadcast_against_a_vector():
    assert metrics.mean_squared_error(np.array([1.0, 2.0]), np.array([[1.0], [2.0]])) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: metrics.accuracy(np.zeros(3), np.zeros((2, 4))),
            r"of shape \(3,\) do not fit predictions of shape \(2, 4\): class indices need shape \(2,\)",
        ),
        (
            lambda: metrics.mean_squared_error(np.zeros(3), np.zeros(4)),
            r"Targets of shape \(3,\) do not fit predictions of shape \(4,\)\.",
        ),
        (
            lambda: metrics.softmax_cross_entropy(np.zeros(3, int), np.zeros(3)),
            r"Predictions of shape \(3,\) have no axis 1 for the classes",
        ),
        (
            lambda: metrics.softmax_cross_entropy(np.array([0, 5]), np.zeros((2, 3))),
            r"the targets have label 5 at example 1, but labels must be 0 to 2",
        ),
        (
            lambda: metrics.softmax_cross_entropy(np.array([0]), np.zeros((1, 3)), class_weights=[1, 2]),
            r"There are 2 class weights for 3 classes",
        ),
    ],
)
def test_mismatches_are_refused(call, message):
    with pytest.raises(DataError, match=message):
        call()


def test_delta_of_huber_must_be_positive():
    with raises_sentence("huber_delta", what="delta", got=0):
        metrics.huber(np.zeros(1), np.zeros(1), delta=0)


@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "softmax_cross_entropy",
        "binary_cross_entropy",
        "mean_squared_error",
        "mean_absolute_error",
        "huber",
    ],
)
def test_every_name_resolves_to_its_function(random, name):
    labels, scores = random.integers(0, 2, (8, 2)), random.normal(size=(8, 2))
    metric = resolve_metric(name)
    assert metric.name == name
    assert metric(labels, scores) == getattr(metrics, name)(labels, scores)
    assert resolve_metric(metric) is metric


def test_any_function_is_a_metric():
    def worst(y_true, y_pred):
        return np.abs(y_true - y_pred).max()

    metric = resolve_metric(worst)
    assert metric.name == "worst"
    assert metric(np.array([1.0, 2.0]), np.array([1.0, 5.0])) == 3.0


def test_an_unknown_metric():
    with raises_sentence(
        "unknown_metric",
        what="metrics",
        got="accurac",
        metrics="accuracy, softmax_",
        nearest="The nearest is 'accuracy'",
    ):
        resolve_metric("accurac")
    with pytest.raises(OptionError, match="not an int 3"):
        resolve_metric(3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("accuracy", {"ignore_index": 0}),
        ("softmax_cross_entropy", {"ignore_index": 0, "class_weights": [1.0, 2.0, 0.5]}),
        ("softmax_cross_entropy", {"label_smoothing": 0.1}),
    ],
)
def test_batches_of_any_size_combine_to_the_value_of_the_data_set(random, name, options):
    labels, scores = random.integers(0, 3, 100), random.normal(size=(100, 3))
    metric = resolve_metric(name, **options)
    state = metric.start()
    for part in np.split(np.arange(100), [1, 30, 31, 90]):
        state = metric.merge(state, metric.update(metric.start(), labels[part], scores[part]))
    assert metric.result(state) == pytest.approx(metric(labels, scores), rel=1e-12)


def test_mean_accumulator():
    mean = MeanAccumulator()
    assert math.isnan(mean.value)
    mean.add(math.nan, 0)
    assert math.isnan(mean.value)
    mean.add(np.float32(1.0), 3)
    mean.add(2.0, 1)
    assert mean.value == 1.25
    mean.add(math.nan, 1)
    assert math.isnan(mean.value)


# --- metrics follow the loss's meaning of predictions


def _trainer(loss, columns=5, **options):
    return onnxtrain.Trainer(onnxtrain.examples.mlp((4, columns)), loss=loss, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
@pytest.mark.parametrize("columns", [1, 5])
def test_accuracy_of_binary_columns_counts_each_of_them(random, columns, dtype):
    x = random.normal(size=(40, 4)).astype(np.float32)
    truth = x @ random.normal(size=(4, columns)) > 0
    trainer = _trainer("binary_cross_entropy", columns, optimizer=onnxtrain.Adam(0.1))
    history = trainer.fit((x, truth.astype(dtype)), validation=(x, truth), metrics=["accuracy"], epochs=40)
    expected = np.mean((trainer.predict(x) > 0) == truth)
    assert expected > 0.95
    assert history.rows[-1]["val_accuracy"] == pytest.approx(expected)
    for metric in ("accuracy", metrics.accuracy):
        assert trainer.evaluate((x, truth.astype(dtype)), metrics=[metric])["accuracy"] == pytest.approx(expected)


def test_accuracy_of_several_columns_alone(random):
    truth, scores = random.random((30, 4)) > 0.4, random.random((30, 4))
    expected = np.mean((scores > 0.5) == truth)
    assert metrics.accuracy(truth, scores) == pytest.approx(expected)
    assert metrics.accuracy(truth.astype(float), scores, binary=True) == pytest.approx(expected)
    assert metrics.accuracy(truth, scores * 2 - 1, threshold=0.0) == pytest.approx(expected)
    one_hot = np.eye(4)[truth.argmax(1)]
    assert metrics.accuracy(one_hot, scores) == pytest.approx(np.mean(scores.argmax(1) == truth.argmax(1)))
    assert metrics.accuracy(one_hot, scores, binary=True) == pytest.approx(np.mean((scores > 0.5) == one_hot))
    assert metrics.accuracy(one_hot * 6, scores, binary=False) == metrics.accuracy(one_hot, scores)
    with raises_sentence("targets_neither", what="y_true", got=(30, 4), sum=6, axis=1):
        metrics.accuracy(one_hot * 6, scores)


NUMBERS = {"mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "huber"}
LOSS_METRICS = {
    "softmax_cross_entropy": {"accuracy", "softmax_cross_entropy"},
    "binary_cross_entropy": {"accuracy", "binary_cross_entropy"},
    "mean_squared_error": NUMBERS,
    "mean_absolute_error": NUMBERS,
    "huber": NUMBERS,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("loss", LOSS_METRICS)  # the others are for predictions of other shapes
def test_a_metric_is_for_the_predictions_of_some_losses(random, loss, name):
    x, truth = random.normal(size=(6, 4)), np.eye(5)[random.integers(0, 5, 6)]
    if name in LOSS_METRICS[loss]:
        found = _trainer(loss).evaluate((x, truth), metrics=[name])
        if name == loss:
            assert found[name] == pytest.approx(found["loss"], rel=1e-5)
        return
    fitting = ", ".join(metric for metric in BUILT_IN if metric in LOSS_METRICS[loss])
    message = (
        rf"The metric {name} is for .*, but with the loss {loss} predictions are .*; measure {fitting}, .*or a func"
    )
    for measure in (
        lambda: _trainer(loss).evaluate((x, truth), metrics=[name]),
        lambda: _trainer(loss).evaluate((x, truth), metrics=[getattr(metrics, name)]),
        lambda: _trainer(loss).fit((x, truth), validation=(x, truth), metrics=[name]),
        lambda: evaluate(onnxtrain.examples.mlp((4, 5)), (x, truth), loss=loss, metrics=[name]),
    ):
        with pytest.raises(OptionError, match=message):
            measure()


def _squared(op, prediction, target):
    return op.ReduceMean((prediction - target) ** 2)


def test_metrics_of_a_user_defined_loss(random):
    x, truth = random.normal(size=(6, 4)), (random.random((6, 5)) > 0.5).astype(np.float32)
    scores = _trainer(_squared).predict(x)
    found = _trainer(_squared).evaluate((x, truth), metrics=["mean_squared_error"])
    assert found["mean_squared_error"] == pytest.approx(found["loss"], rel=1e-5)
    with raises_sentence("accuracy_of_unknown_predictions", what="accuracy", got="custom"):
        _trainer(_squared).evaluate((x, truth), metrics=["accuracy"])
    expected = {
        "binary": np.mean((scores > 0) == truth),
        "classes": np.mean(scores.argmax(1) == truth.argmax(1)),
    }
    for predicts, value in expected.items():
        loss = CustomLoss(_squared, predicts=predicts)
        assert _trainer(loss).evaluate((x, truth), metrics=["accuracy"])["accuracy"] == pytest.approx(value)


def test_metrics_of_a_loss_that_is_a_model(random, tmp_path):
    text = """<ir_version: 8, opset_import: ["": 18]> loss (float[N,5] p, int64[N] t) => (float l)
        { l = SoftmaxCrossEntropyLoss(p, t) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "loss.onnx")
    x, labels = random.normal(size=(6, 4)), random.integers(0, 5, 6)
    expected = _trainer("softmax_cross_entropy").evaluate((x, labels), metrics=["accuracy"])
    found = _trainer(tmp_path / "loss.onnx").evaluate((x, labels), metrics=["accuracy"])
    assert found == pytest.approx(expected, rel=1e-5)


ENDINGS = {
    "Sigmoid": ("binary_cross_entropy", "p = Sigmoid(z)"),
    "Softmax": ("softmax_cross_entropy", "p = Softmax(z)"),
    "Cast": ("binary_cross_entropy", "q = Sigmoid(z)  p = Cast<to = 1>(q)"),
    "probabilities": ("softmax_cross_entropy", "s = Exp(z)  n = ReduceSum(s, axes)  p = Div(s, n)  c = ArgMax(p)"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_metrics_read_logits_and_functions_the_output(random, ending):
    loss, nodes = ENDINGS[ending]
    label = ", int64[N,M] c" if ending == "probabilities" else ""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> m (float[N,2] x) => (float[N,3] p{label})
        <float[2,3] w = {{0.5, -0.5, 1, 0.1, 0.2, 2}}, int64[1] axes = {{1}}> {{ z = MatMul(x, w)  {nodes} }}"""
    )
    x, classes = random.normal(size=(8, 2)).astype(np.float32), random.integers(0, 3, 8)
    binary = loss == "binary_cross_entropy"
    truth = (random.random((8, 3)) > 0.5) if binary else classes
    seen = []

    def own(y_true, y_pred):
        seen.append(y_pred)
        return 0.0

    trainer = onnxtrain.Trainer(model, loss=loss, train="w")
    output = trainer.predict(x)
    output = output["p"] if isinstance(output, dict) else output
    expected = np.mean((output > 0.5) == truth) if binary else np.mean(output.argmax(1) == truth)
    found = trainer.evaluate((x, truth), metrics=["accuracy", loss, own])
    assert found["accuracy"] == pytest.approx(expected)
    assert found[loss] == pytest.approx(found["loss"], rel=1e-4)
    np.testing.assert_allclose(seen[0], output, rtol=1e-6)
    trainer.fit((x, truth), validation=(x, truth), metrics=[own])
    np.testing.assert_allclose(seen[1], trainer.predict(x)["p"] if ending == "probabilities" else trainer.predict(x))
