"""The losses of plugins/more_losses beside scikit-learn and formulas in NumPy, with gradients by finite differences."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from sklearn.metrics import mean_gamma_deviance, mean_pinball_loss, mean_poisson_deviance

import onnxtrain
from losses.loss_models import loss_and_gradient
from onnxtrain import losses
from onnxtrain.errors import DataError, OptionError
from onnxtrain.plugins.more_losses.survival import concordance_index

RANDOM = np.random.default_rng(0)
Z, T = RANDOM.normal(size=(6, 3)), RANDOM.normal(size=(6, 3))
RATES, AMOUNTS = np.exp(Z), np.exp(T)
LABELS = np.array([0, 1, 0, 2, 1, 1])
TIMES = np.array([[3.0, 1], [1.0, 1], [3.0, 0], [2.0, 1], [5.0, 1], [3.0, 1]])  # three are equal
WEIGHTS = np.array([1.0, 0.5, 2.0, 0.0, 1.0, 3.0])


def lse(values):
    top = values.max()
    return top + np.log(np.exp(values - top).sum())


def circle(z, labels, gamma=80.0, margin=0.4, *, count_all=False):
    """Keras's formula; it also counts examples without a partner, as 0."""
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    distances = np.maximum(1 - unit @ unit.T, 0)
    terms = []
    for i, row in enumerate(distances):
        same = (labels == labels[i]) & (np.arange(len(labels)) != i)
        other = labels != labels[i]
        if not same.any() or not other.any():
            terms += [0.0] * count_all
            continue
        near = -gamma * np.maximum(margin + row, 0) * (margin - row)
        far = gamma * np.maximum(1 + margin - row, 0) * (1 - margin - row)
        terms.append(np.logaddexp(0, lse(near[same]) + lse(far[other])))
    return np.mean(terms)


def cox(z, targets, weights=None):
    """The log partial likelihood of lifelines and scikit-survival with Breslow's form of equal times."""
    z = z.reshape(-1)
    weights = np.ones(len(z)) if weights is None else weights
    total = 0.0
    for i, (time, event) in enumerate(targets):
        if event:
            risk = sum(weights[j] * np.exp(z[j]) for j in range(len(z)) if targets[j, 0] >= time)
            total += weights[i] * (np.log(risk) - z[i])
    return total / targets[:, 1].sum()


def several(z, t):
    return np.mean([mean_pinball_loss(t, z[:, k], alpha=q) for k, q in enumerate((0.1, 0.5, 0.9))])


CASES = {
    "pinball": (losses.Quantile(0.8), Z, T, lambda z, t: mean_pinball_loss(t, z, alpha=0.8)),
    "pinballs": (losses.Quantile((0.1, 0.5, 0.9)), Z, T[:, 0], several),
    "gamma": (losses.Gamma(), RATES, AMOUNTS, lambda z, t: mean_gamma_deviance(t.reshape(-1), z.reshape(-1))),
    "log gamma": (
        losses.Gamma(log_input=True),
        Z,
        AMOUNTS,
        lambda z, t: mean_gamma_deviance(t.reshape(-1), np.exp(z).reshape(-1)),
    ),
    "circle": (losses.Circle(), Z, LABELS[[0, 1, 0, 1, 1, 1]], circle),
    "circle, alone": (losses.Circle(20.0, 0.25), Z, LABELS, lambda z, t: circle(z, t, 20.0, 0.25)),
    "cox": (losses.Cox(), Z[:, :1], TIMES, cox),
    "cox [N]": (losses.Cox(), Z[:, 1], TIMES, cox),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name, dynamic):
    loss, z, targets, formula = CASES[name]
    found, gradient = loss_and_gradient(loss, {"z": z, "t": targets}, dynamic=dynamic)
    assert found == pytest.approx(formula(z, targets), rel=1e-9)
    step = 1e-6
    for place in np.ndindex(z.shape):
        moved = [formula(z + sign * step * (np.arange(z.size) == np.ravel_multi_index(place, z.shape)).reshape(z.shape),
                         targets) for sign in (1, -1)]  # fmt: skip
        assert gradient[place] == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-5, abs=1e-7)


def test_keras_counts_examples_without_a_partner():
    without = np.mean(LABELS == 0) + np.mean(LABELS == 1)  # the label 2 has one example
    assert circle(Z, LABELS, count_all=True) == pytest.approx(circle(Z, LABELS) * without)


def test_poisson_is_the_deviance_of_scikit_learn_up_to_a_constant():
    counts = np.floor(AMOUNTS)
    rates = [RATES, RATES[::-1]]
    values = [loss_and_gradient(losses.Poisson(), {"z": np.array(rate), "t": counts})[0] for rate in rates]
    wanted = [mean_poisson_deviance(counts.reshape(-1), rate.reshape(-1)) / 2 for rate in rates]
    assert values[0] - values[1] == pytest.approx(wanted[0] - wanted[1], rel=1e-5)


def test_several_quantiles_take_targets_of_one_column():
    x = RANDOM.normal(size=(6, 4)).astype(np.float32)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="quantile((0.1, 0.5, 0.9))")
    found = trainer.predict(x)
    wanted = np.mean([mean_pinball_loss(T[:, 0], found[:, place], alpha=q) for place, q in enumerate((0.1, 0.5, 0.9))])
    for targets in (T[:, :1], T[:, 0], T[:, :1]):
        assert trainer.evaluate(x, targets)["loss"] == pytest.approx(wanted, rel=1e-5)
    assert trainer.train_step(x, T[:, :1]) == pytest.approx(wanted, rel=1e-5)
    trainer.fit(x, T[:, :1], validation=(x, T[:, 0]), progress=False)
    with pytest.raises(DataError, match=r"shape \(6, 3\)"):
        trainer.train_step(x, T)


def test_cox_takes_weights_of_examples_and_batches_without_events():
    x = RANDOM.normal(size=(6, 4)).astype(np.float32)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 1)), loss="cox")
    z = trainer.predict(x)
    found = trainer.evaluate(x, TIMES, sample_weight=WEIGHTS)["loss"]
    assert found == pytest.approx(cox(z, TIMES, WEIGHTS), rel=1e-5)
    assert trainer.train_step(x, TIMES * [1, 0]) == 0


def test_cox_orders_times():
    x = RANDOM.normal(size=(64, 4)).astype(np.float32)
    time = np.exp(-x[:, 0] + 0.1 * RANDOM.normal(size=64))
    targets = np.stack([time, RANDOM.random(64) < 0.7], 1)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 1)), loss="cox", optimizer="adam(lr=0.1)")
    trainer.fit(x, targets, epochs=30, batch_size=64, progress=False)
    assert trainer.evaluate(x, targets, metrics="concordance_index")["concordance_index"] > 0.9


def test_the_concordance_index_by_hand():
    assert concordance_index(np.array([[1, 1], [2, 1], [3, 1]]), np.array([[3.0], [1.0], [1.0]])) == 2.5 / 3
    assert np.isnan(concordance_index(np.array([[1, 0], [2, 0]]), np.array([3.0, 1.0])))


def test_cosine_and_rmse_are_metrics_of_losses_on_numbers():
    def squares(op, prediction, target):
        return op.ReduceMean((prediction - target) ** 2, keepdims=0)

    x = RANDOM.normal(size=(6, 4)).astype(np.float32)
    for loss in ("cosine_similarity", "mse", squares):
        trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss=loss)
        z = trainer.predict(x).astype(np.float64)
        cosines = (z * T).sum(1) / np.linalg.norm(z, axis=1) / np.linalg.norm(T, axis=1)
        found = trainer.evaluate(x, T, metrics="cosine_similarity,rmse", batch_size=4)
        assert found["cosine_similarity"] == pytest.approx(cosines.mean(), rel=1e-5)
        assert found["rmse"] == pytest.approx(np.sqrt(((z - T) ** 2).mean(0)).mean(), rel=1e-5)
        if loss == "cosine_similarity":
            assert found["loss"] == pytest.approx(-cosines.mean(), rel=1e-5)
    gaps = np.where(np.arange(18).reshape(6, 3) == 4, np.nan, T)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="mse")
    with pytest.raises(DataError, match=r"cosine_similarity compares vectors .* without missing targets"):
        trainer.evaluate(x, gaps, metrics="cosine_similarity")
    with pytest.raises(OptionError, match=r"rmse is for numbers, but with the loss softmax_cross_entropy"):
        onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="cross_entropy").evaluate(x, LABELS, metrics="rmse")


@pytest.mark.parametrize("targets", [np.array([1, -1, 1, -1, -1, 1]), np.array([1, 0, 1, 0, 0, 1]) > 0])
@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_the_other_class_is_0_or_minus_1(loss, targets):
    x = RANDOM.normal(size=(6, 4)).astype(np.float32)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 1)), loss=loss)
    short = np.maximum(1 - np.where(targets > 0, 1, -1) * trainer.predict(x)[:, 0], 0)
    wanted = np.mean(short ** (2 if loss == "squared_hinge" else 1))
    assert trainer.evaluate(x, targets)["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "message"),
    [
        ("poisson", 1, [1, -2, 3], "targets has -2 at example 1, but poisson needs numbers of at least 0."),
        ("gamma", 1, [1, 0, 3], "targets has 0 at example 1, but gamma needs numbers above 0."),
        ("hinge", 1, [1, 0, 3], "targets has 3 at example 2, but hinge needs 1 for the one class and -1 or 0"),
        ("ordinal", 2, [1, 0, 3], "labels must be 0 to 2"),
        ("cox", 1, [[1, 0], [2, 5], [3, 1]], r"targets has \(2, 5\) at example 1, but cox needs a time of at least 0"),
        ("cox", 2, [[1, 0], [2, 1], [3, 1]], r"cox needs one log hazard per example, \[batch\] or \[batch, 1\], but"),
        ("quantile((0.1, 0.9))", 3, [1, 2, 3], "quantile has 2 quantiles, but 'logits' has the shape"),
        ("quantile(1.5)", 1, [1, 2, 3], "q is 1.5; quantile needs a number between 0 and 1, or several."),
        ("quantile(half)", 1, [1, 2, 3], "q is 'half' in .*; it needs a number."),
        ("tversky(alpha=-1)", 2, [1, 2, 3], "alpha is -1.0; tversky needs a finite number above 0."),
    ],
)
def test_what_does_not_fit_is_refused(loss, outputs, targets, message):
    with pytest.raises((DataError, OptionError), match=message.replace("targets has", ".* has")):
        onnxtrain.Trainer(onnxtrain.examples.mlp((4, outputs)), loss=loss).train_step(
            np.ones((3, 4), np.float32), np.array(targets)
        )


@pytest.mark.parametrize(
    ("loss", "shape", "message"),
    [
        ("cosine_similarity", "n", "cosine_similarity compares vectors"),
        ("ordinal", "n", r"ordinal needs logits \[batch, ..., classes - 1\]"),
    ],
)
def test_predictions_without_an_axis_are_refused(loss, shape, message):
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 4] x) => (float[{shape}] y) <float[4] w = {{1, 2, 3, 4}}> {{ y = MatMul(x, w) }}""")
    with pytest.raises(OptionError, match=message):
        onnxtrain.Trainer(model, loss=loss)


def test_the_names_of_keras_on_the_page_are_those_here():
    page = (Path(__file__).resolve().parents[3] / "docs" / "coming_from.md").read_text()
    (row,) = [line for line in page.splitlines() if '"poisson"' in line]
    texts, classes = re.findall(r'`"(\w+)"`', row), re.findall(r"`([A-Z]\w+)`", row)
    assert len(texts) == 10
    assert len(classes) == 4
    for name in texts:
        onnxtrain.Trainer(onnxtrain.examples.mlp((4, 2)), loss=name)
    assert all(issubclass(getattr(losses, name), losses.Loss) for name in classes)


def test_steps_between_grades_are_not_scores_of_classes():
    x, grade = RANDOM.normal(size=(6, 4)).astype(np.float32), LABELS
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 2)), loss="ordinal")
    with pytest.raises(OptionError, match="accuracy needs to know what the predictions are"):
        trainer.evaluate(x, grade, metrics="accuracy")
    with pytest.raises(OptionError, match="needs scores over classes, or binary logits, but with the loss ordinal"):
        trainer.predict(x, labels=True)

    def right(y_true, y_pred):
        return np.mean((y_pred > 0).sum(1) == y_true)

    wanted = np.mean((trainer.predict(x) > 0).sum(1) == grade)
    assert trainer.evaluate(x, grade, metrics=[right])["right"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("mape", "mean_absolute_percentage_error"),
        ("msle", "mean_squared_logarithmic_error"),
        ("kld", "kl_divergence"),
        ("kl_div", "kl_divergence"),
        ("pinball(0.9)", "quantile"),
    ],
)
def test_other_names(alias, name):
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 2)), loss=alias)
    assert trainer.objective.heads[0].loss.name == name
