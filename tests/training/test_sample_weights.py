"""Sample weights: as a column of any source, in validation and evaluation, and refused values."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
import onnxtrain.data
from onnxtrain import examples
from onnxtrain.errors import DataError
from sentences import raises_sentence

RNG = np.random.default_rng(5)
X = RNG.standard_normal((12, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 12)
W = RNG.random(12).astype(np.float32) * 2
ROWS = np.column_stack([X[:, :2], W, X[:, 2:], Y])
COLUMNS = ["a", "b", "weight", "c", "d", "label"]  # in the middle of the features
NAMED = {"target": "label", "sample_weight": "weight"}


def trainer(**options):
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="cross_entropy", optimizer="sgd(lr=0.1)", **options)


def csv(folder):
    np.savetxt(folder / "data.csv", ROWS, delimiter=",", header=",".join(COLUMNS), comments="", fmt="%.9g")
    return folder / "data.csv", NAMED


def pandas(folder):
    frame = pytest.importorskip("pandas").DataFrame(ROWS.astype(np.float32), columns=COLUMNS)
    return frame.astype({"label": int}), NAMED


def polars(folder):
    return pytest.importorskip("polars").DataFrame(dict(zip(COLUMNS, ROWS.T, strict=True))), NAMED


def parquet(folder):
    pytest.importorskip("pyarrow")
    pandas(folder)[0].to_parquet(folder / "data.parquet")
    return folder / "data.parquet", NAMED


def hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_pandas(pandas(folder)[0]), NAMED


def hugging_face_of_arrays(folder):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X, "weight": W, "label": Y}).with_format("numpy"), NAMED


def npz(folder):
    np.savez(folder / "data.npz", input=X, weight=W, label=Y)
    return folder / "data.npz", NAMED


def mapping(folder):
    return {"input": X, "weight": W, "label": Y}, {"sample_weight": "weight"}


def inputs_in_a_mapping(folder):
    return ({"input": X, "weight": W}, Y), {"sample_weight": "weight"}


def inputs_in_a_table(folder):
    return (pandas(folder)[0].drop(columns="label"), Y), {"sample_weight": "weight"}


def batches(folder):
    return [{"input": X[at : at + 5], "w": W[at : at + 5], "y": Y[at : at + 5]} for at in (0, 5, 10)], {
        "sample_weight": "w"
    }


def examples_by_index(folder):
    return [{"input": x, "w": w, "y": y} for x, w, y in zip(X, W, Y, strict=True)], {"sample_weight": "w"}


def triple(folder):
    return (X, Y, W), {}


SOURCES = [
    csv,
    pandas,
    polars,
    parquet,
    hugging_face,
    hugging_face_of_arrays,
    npz,
    mapping,
    inputs_in_a_mapping,
    inputs_in_a_table,
    batches,
    triple,
]


@pytest.mark.parametrize("make", SOURCES)
def test_a_column_is_the_weights(make, tmp_path):
    data, names = make(tmp_path)
    one, other = trainer(), trainer()
    rows = one.fit(data, validation=data, batch_size=5, shuffle=False, epochs=2, progress=False, **names).rows
    other.fit(X, Y, sample_weight=W, batch_size=5, shuffle=False, epochs=2, progress=False)
    for name, array in other.get_weights().items():
        np.testing.assert_allclose(one.parameters[name], array, rtol=1e-6, atol=1e-7)
    expected = other.evaluate(X, Y, sample_weight=W)["loss"]
    assert rows[-1]["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert one.evaluate(data, **names)["loss"] == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(one.evaluate(X, Y)["loss"], rel=1e-3)


def test_evaluation_is_the_mean_of_weight_times_loss():
    one = trainer()
    logits = np.asarray(one.predict(X), np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(12), Y]
    found = one.evaluate(X, Y, sample_weight=W, metrics="accuracy", batch_size=5)
    assert found["loss"] == pytest.approx((losses * W).mean(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == Y).mean())


def test_a_held_out_fraction_keeps_its_weights():
    data = onnxtrain.data.open_dataset((X, Y), trainer().objective.inputs)
    held_out = onnxtrain.data.split_validation(data, 0.25, seed=0).validation
    (batch,) = held_out.batches(12)
    weights = W[[np.flatnonzero((row == X).all(1))[0] for row in batch.inputs["input"]]]
    one = trainer()
    rows = one.fit(X, Y, sample_weight=W, validation=0.25, progress=False).rows
    expected = one.evaluate(batch.inputs["input"], batch.targets, sample_weight=weights)["loss"]
    assert rows[0]["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_validation_data_without_the_column_are_not_weighted(tmp_path):
    data, names = csv(tmp_path)
    one = trainer()
    rows = one.fit(data, validation=(X, Y), progress=False, **names).rows
    assert rows[0]["val_loss"] == one.evaluate(X, Y)["loss"]
    frame = pytest.importorskip("pandas").DataFrame(X, columns=list("abcd")).assign(label=Y)
    rows = one.fit(data, validation=frame, progress=False, **names).rows
    assert rows[0]["val_loss"] == pytest.approx(one.evaluate(X, Y)["loss"], rel=1e-6)


def test_weights_of_a_padded_last_batch_in_evaluation():
    fixed = examples.mlp((4, 8, 3))
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 5
    one = onnxtrain.Trainer(fixed, loss="cross_entropy")
    assert one.evaluate(X, Y, sample_weight=W)["loss"] == pytest.approx(
        trainer().evaluate(X, Y, sample_weight=W)["loss"], rel=1e-5
    )


def two_outputs():
    model = examples.mlp((4, 8, 3))
    model.graph.output.append(onnx.helper.make_tensor_value_info("second", 1, ("batch", 3)))
    model.graph.node.append(onnx.helper.make_node("Identity", [model.graph.output[0].name], ["second"]))
    return model


def test_two_losses_and_a_column_of_weights_in_a_table(tmp_path):
    model = two_outputs()
    first = model.graph.output[0].name
    losses = {first: "cross_entropy", "second": "cross_entropy"}
    frame = pytest.importorskip("pandas").DataFrame(X, columns=list("abcd"))
    frame = frame.assign(**{"weight": W, first: Y, "second": (Y + 1) % 3})
    one, other = (onnxtrain.Trainer(model, loss=losses, optimizer="sgd(lr=0.1)") for _ in range(2))
    one.fit(frame, sample_weight="weight", batch_size=5, shuffle=False, progress=False)
    targets = {first: Y, "second": (Y + 1) % 3}
    other.fit(X, targets, sample_weight=W, batch_size=5, shuffle=False, progress=False)
    for name, array in other.get_weights().items():
        np.testing.assert_allclose(one.parameters[name], array, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (lambda: trainer().fit(X, Y, sample_weight="w"), "sample_weight is 'w', but the inputs have no column of this"),
        (lambda: trainer().fit({"input": X, "y": Y}, sample_weight="w"), "has no array 'w': it has 'input' and 'y'"),
        (lambda: trainer().fit((X, Y, W), sample_weight=W), "sample_weight is given, too; leave one out"),
        (lambda: trainer().fit([(X, W, Y)], sample_weight="w"), "batch 0 is a tuple of arrays without names, but"),
        (
            lambda: trainer().fit({"input": X, "y": Y, "w": -W}, sample_weight="w"),
            "'w' is float32 of shape .* at least",
        ),
        (
            lambda: trainer().fit([{"input": X, "y": Y, "w": -W}], sample_weight="w"),
            "'w' of batch 0 is float32 of shape .12,.; it needs one finite number of at least 0 per example",
        ),
        (lambda: trainer().evaluate(X, Y, sample_weight=W[:5]), "have different|different lengths"),
    ],
)
def test_refusals(fit, message):
    with pytest.raises(DataError, match=message):
        fit()


def test_a_table_without_the_column_says_what_it_has(tmp_path):
    for make in (csv, pandas):
        with raises_sentence("no_column", what="importance", columns="'a', 'b', 'weight'"):
            trainer().fit(make(tmp_path)[0], target="label", sample_weight="importance")
