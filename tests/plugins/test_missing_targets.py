"""Missing targets are left out of losses that can, as a mask does in PyTorch; others refuse them in one sentence."""

import inspect

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import onnxtrain
from frames import Frame
from losses.loss_rows import LOSS_ROWS
from onnxtrain import examples
from onnxtrain.errors import DataError
from onnxtrain.losses import LOSSES

RNG = np.random.default_rng(1)
X = RNG.normal(size=(24, 4)).astype(np.float32)
Y = RNG.random((24, 3)).astype(np.float32)
Y[RNG.random(Y.shape) < 0.3] = np.nan
WEIGHTS = RNG.random(24).astype(np.float32)
LABELS = np.where(np.arange(24) % 5 == 3, np.nan, np.arange(24) % 3)
TEXTS = np.array([None if np.isnan(label) else "abc"[int(label)] for label in LABELS], object)

ELEMENTWISE = [name for name, loss in LOSSES.items() if loss.elementwise]


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alone", "weighted"])
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("mean_squared_error", "mse_loss"),
        ("mean_absolute_error", "l1_loss"),
        ("huber", "huber_loss"),
        ("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    ],
)
def test_missing_elements_are_masked_as_in_pytorch(name, reference, weights):
    torch = pytest.importorskip("torch")
    model = examples.mlp((4, 8, 3), activation="tanh")
    trainer = onnxtrain.Trainer(model, loss=name, optimizer="sgd(lr=0.5)")
    values = [torch.tensor(numpy_helper.to_array(each), requires_grad=True) for each in model.graph.initializer]
    hidden = torch.tanh(torch.tensor(X) @ values[0].T + values[1])
    present = torch.tensor(~np.isnan(Y))
    target = torch.tensor(np.nan_to_num(Y))
    terms = getattr(torch.nn.functional, reference)(hidden @ values[2].T + values[3], target, reduction="none")
    factors = present if weights is None else present * torch.tensor(weights)[:, None]
    loss = (terms * factors).sum() / present.sum()
    loss.backward()
    assert trainer.train_step(X, Y, *([] if weights is None else [weights])) == pytest.approx(loss.item(), rel=1e-6)
    for each, value in zip(model.graph.initializer, values, strict=True):
        after = (value - 0.5 * value.grad).detach().numpy()
        np.testing.assert_allclose(trainer.parameters[each.name], after, rtol=0, atol=3e-7)


def test_losses_that_are_a_mean_over_elements_say_so():
    means = [name for name, loss in LOSSES.items() if "mean_over(" in inspect.getsource(loss.build)]
    assert {*means} == {*ELEMENTWISE} >= {"poisson", "hinge", "quantile", "mean_squared_error"}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_loss_equals_itself_on_the_present_elements(name):
    """The loss of [N, 4] is the mean over all present elements, also over micro-batches and in an evaluation."""
    row = LOSS_ROWS[name]
    model, x, y = row.model(), row.x, row.targets[0].astype(np.float32)
    y[RNG.random(y.shape) < 0.3] = np.nan
    present = ~np.isnan(y)
    scores = onnxtrain.predict(model, x)[present]
    identity = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[N] x) => (float[N] y) {y = Identity(x)}'
    )
    expected = onnxtrain.evaluate(identity, (scores, y[present]), loss=name)["loss"]
    whole = onnxtrain.Trainer(model, loss=name)
    assert whole.evaluate(x, y)["loss"] == pytest.approx(expected, rel=1e-5)
    assert whole.evaluate(x, y, batch_size=7)["loss"] == pytest.approx(expected, rel=1e-5)
    several = onnxtrain.Trainer(model, loss=name, accumulate=4)
    assert several.train_step(x, y) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(
        several.get_weights(flat=True),
        (whole.train_step(x, y), whole.get_weights(flat=True))[1],
        rtol=0,
        atol=1e-5,
    )


def test_targets_may_be_missing_from_a_later_step_on():
    first, second = (onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="mse") for _ in range(2))
    assert first.train_step(X, np.nan_to_num(Y)) == second.train_step(X, np.nan_to_num(Y))
    assert first.train_step(X, Y) == onnxtrain.evaluate(second.model(), (X, Y), loss="mse")["loss"]
    with pytest.raises(DataError, match=r"holds nan at example 0"):
        first.train_step(np.full_like(X, np.nan), Y)


@pytest.mark.parametrize("targets", [LABELS, TEXTS], ids=["nan", "none"])
def test_missing_labels_are_the_ignored_label(targets):
    kept = ~np.isnan(LABELS)
    codes = np.where(kept, LABELS, -100).astype(np.int64)
    first, second = (onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy") for _ in range(2))
    with pytest.warns(UserWarning, match=r"the data: 5 of 24 targets are missing \(NaN or empty\); the loss leaves"):
        found = first.fit(X, targets, validation=(X, targets), metrics="accuracy", progress=False).rows
    assert found == second.fit(X, codes, validation=(X, codes), metrics="accuracy", progress=False).rows
    np.testing.assert_array_equal(first.get_weights(flat=True), second.get_weights(flat=True))


def test_the_count_is_said_once():
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="mse")
    with pytest.warns(UserWarning, match=f"the data: {np.isnan(Y).sum()} of 72 targets are missing") as found:
        trainer.fit(X, Y, validation=(X, Y), progress=False)
    trainer.fit(X, Y, progress=False)  # a second warning would be an error
    assert len([each for each in found if "missing" in str(each.message)]) == 1


OTHERS = ["kl_divergence", "categorical_hinge", "ordinal", "tversky", "cosine_similarity", "quantile"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_refuse_missing_targets(name):
    """Each in one sentence; a quantile loss of several quantiles has several predictions for a target."""
    row = LOSS_ROWS[name]
    y = row.targets[0].astype(np.float32)
    y[3] = np.nan
    loss = LOSSES[name]()
    if name == "quantile":
        loss, y = LOSSES[name]((0.1, 0.2, 0.5, 0.9)), y[:, 0]
    refused = r"at (example|row) 3|at example \d+|has type float32, but the model needs int64"
    with pytest.raises(DataError, match=refused):
        onnxtrain.Trainer(row.model(), loss=loss).fit(row.x, y, progress=False)


@pytest.mark.parametrize("name", ["triplet", "info_nce"])
@pytest.mark.parametrize(("targets", "shown"), [(LABELS, "nan"), (TEXTS, "empty")])
def test_losses_of_pairs_refuse_missing_labels(name, targets, shown):
    with pytest.raises(
        DataError, match=rf"the targets have no label at example 3 \({shown}\): leave such examples out"
    ):
        onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=name).fit(X, targets)


def test_data_without_any_target():
    with pytest.raises(DataError, match=r"72 of 72 targets are missing .*, so that there is nothing to learn from"):
        onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="mse").fit(X, np.full_like(Y, np.nan))


def test_metrics_read_the_present_targets_of_each_column():
    sklearn = pytest.importorskip("sklearn.metrics")
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="mse")
    found, scores = trainer.evaluate(X, Y, metrics="mae,r2"), trainer.predict(X)
    columns = [(Y[kept, column], scores[kept, column]) for column in range(3) for kept in [~np.isnan(Y[:, column])]]
    for name, function in (("mae", sklearn.mean_absolute_error), ("r2", sklearn.r2_score)):
        assert found[name] == pytest.approx(np.mean([function(*each) for each in columns]), rel=1e-5)
    answers = np.where(np.isnan(Y), np.nan, Y > 0.5)
    binary = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="bce")
    right = [np.mean((pred > 0) == (true > 0.5)) for true, pred in columns]
    assert binary.evaluate(X, answers, metrics="accuracy")["accuracy"] == pytest.approx(np.mean(right))


def table(form, folder, columns):
    if form == "frame":
        return Frame(columns)
    if form == "hugging face":
        plain = {name: [None if item != item else item for item in map(float, own)] for name, own in columns.items()}
        return pytest.importorskip("datasets").Dataset.from_dict(plain)
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        plain = {name: arrow.array(own, from_pandas=True) for name, own in columns.items()}
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(plain), folder / "d.parquet")
        return folder / "d.parquet"
    rows = [
        ",".join("" if item != item else repr(float(item)) for item in row)
        for row in zip(*columns.values(), strict=True)
    ]
    (folder / "d.csv").write_text("\n".join([",".join(columns), *rows]))
    return folder / "d.csv"


FEATURES = {f"f{index}": X[:, index] for index in range(4)}
TARGETS = {f"t{index}": Y[:, index] for index in range(3)}


@pytest.mark.parametrize("form", ["frame", "csv", "parquet", "hugging face"])
@pytest.mark.parametrize("kind", ["regression", "multilabel", "autoencoder"])
def test_several_columns_are_one_target(kind, form, tmp_path):
    targets = {name: np.where(np.isnan(own), np.nan, own > 0.5) for name, own in TARGETS.items()}
    columns = {"regression": TARGETS, "multilabel": targets, "autoencoder": FEATURES}[kind]
    loss = "bce" if kind == "multilabel" else "mse"
    data = table(form, tmp_path, FEATURES | columns)
    first, second = (onnxtrain.Trainer(examples.mlp((4, 8, len(columns))), loss=loss) for _ in range(2))
    options = {"shuffle": False, "batch_size": 12, "progress": False}
    first.fit(data, target=",".join(columns), validation=data, **options)
    y = np.stack([*columns.values()], axis=1)
    second.fit(X, y, validation=(X, y), **options)
    np.testing.assert_array_equal(first.get_weights(flat=True), second.get_weights(flat=True))
    assert first.evaluate(data, target=[*columns]) == second.evaluate(X, y)
    np.testing.assert_array_equal(first.predict(data), second.predict(X))
    first.save(tmp_path / "tuned.onnx")
    again = onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=loss)
    assert again.data_names.targets == {"logits": tuple(columns)}
    fresh = onnxtrain.Trainer(examples.mlp((4, 8, len(columns))), loss=loss)
    assert fresh.predict(data, target=[*columns]).shape == (24, len(columns))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (["t0", "z"], "the table has no column 'z'"),
        ({"other": "t0"}, "target has the output 'other', but outputs with losses are logits"),
        (["t0", "t1", "t2", "word"], "hold texts in 'word' and numbers in 't0'; give one kind for all"),
    ],
)
def test_columns_that_do_not_fit(target, message):
    data = Frame(FEATURES | TARGETS | {"word": np.array(["a"] * 24)})
    with pytest.raises(DataError, match=message):
        onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="mse").fit(data, target=target)


def test_metrics_of_the_training_read_the_present_targets_too():
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="mse")
    rows = trainer.fit(X, Y, metrics="mae", progress=False).rows
    assert np.isfinite(rows[-1]["mae"])
