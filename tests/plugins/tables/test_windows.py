"""Windows in the order of time: those of NumPy's sliding_window_view, scaled as scikit-learn's StandardScaler does."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import onnx
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from onnxtrain.tables import Windows

import onnxtrain
from onnxtrain import layers
from onnxtrain.data import TensorSpec, split_validation
from onnxtrain.data.naming import Wanted
from onnxtrain.errors import DataError, OptionError
from onnxtrain.training.examples import mlp

RNG = np.random.default_rng(0)
ROWS = 90
TABLE = {
    "temperature": RNG.normal(20, 5, ROWS),
    "load": 500 + 100 * np.sin(np.arange(ROWS) / 6),
    "wind": RNG.normal(size=ROWS),
}
WINDOW, HORIZON = 8, 3
CUT = 72  # of validation=0.2


def model(shape=f"N, {WINDOW}, 3", outputs=HORIZON):
    found = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f (float[{shape}] x) => (float[N, 24] y) {{ y = Flatten(x) }}'
    )
    return onnxtrain.append(found, layers.Linear(outputs))


def trainer(**options):
    return onnxtrain.Trainer(options.pop("model", model()), loss="mse", optimizer="adam(lr=0.01)", seed=1)


def by_hand(rows, targets=(1,), scaler=None, columns=(0, 1, 2)):
    """Return inputs and targets of rows [T, F], scaled by the first CUT rows of the table."""
    values = np.stack([*TABLE.values()], axis=1)
    mean, std = (scaler.mean_, scaler.scale_) if scaler else (values[:CUT].mean(0), values[:CUT].std(0))
    scaled = (rows - mean) / std
    x = sliding_window_view(scaled[:-HORIZON, columns], WINDOW, axis=0).swapaxes(1, 2)
    y = sliding_window_view(scaled[WINDOW:, targets], HORIZON, axis=0).swapaxes(1, 2)
    return x, y[..., 0] if len(targets) == 1 else y


def test_training_equals_that_on_windows_by_hand(tmp_path):
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    values = np.stack([*TABLE.values()], axis=1)
    scaler = preprocessing.StandardScaler().fit(values[:CUT])
    ours, theirs = trainer(), trainer()
    options = {"epochs": 3, "batch_size": 16, "progress": False}
    rows = ours.fit(Windows(TABLE, WINDOW, HORIZON), target="load", validation=0.2, **options).rows
    train, held_out = by_hand(values[:CUT], scaler=scaler), by_hand(values[CUT:], scaler=scaler)
    expected = theirs.fit(*train, validation=held_out, **options).rows
    np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in expected], rtol=1e-6)
    np.testing.assert_allclose([row["val_loss"] for row in rows], [row["val_loss"] for row in expected], rtol=1e-6)
    ours.save(tmp_path / "tuned.onnx")
    windows = sliding_window_view(scaler.transform(values), WINDOW, axis=0).swapaxes(1, 2)
    forecast = theirs.predict(windows) * scaler.scale_[1] + scaler.mean_[1]
    assert forecast.shape == (ROWS - WINDOW + 1, HORIZON)  # also that of the last rows
    for found in (
        ours.predict(Windows(TABLE, WINDOW, HORIZON)),
        onnxtrain.predict(tmp_path / "tuned.onnx", Windows(TABLE, WINDOW, HORIZON)),
    ):
        np.testing.assert_allclose(found, forecast, rtol=1e-5)
    later = {name: column[CUT:] for name, column in TABLE.items()}
    measured = onnxtrain.evaluate(tmp_path / "tuned.onnx", Windows(later, WINDOW, HORIZON), target="load", loss="mse")
    np.testing.assert_allclose(measured["loss"], expected[-1]["val_loss"], rtol=1e-6)


def dataset(table=None, target="load", shape=("N", WINDOW, 3), need_target=True, horizon=HORIZON):
    spec = TensorSpec("x", np.dtype(np.float32), shape)
    source = Windows(TABLE if table is None else table, WINDOW, horizon)
    return source.dataset(Wanted([spec], target, need_target))


def everything(data):
    (batch,) = data.batches(1000)
    return batch.inputs["x"], batch.targets


def test_no_value_is_on_both_sides_of_the_cut():
    """Row t has the value t in the only column, so that windows say which rows they have."""
    table = {"load": np.arange(100.0)}
    for shuffle in (True, False):
        train, validation = split_validation(dataset(table, shape=("N", WINDOW, 1)), 0.2, seed=3, shuffle=shuffle)
        mean, std = np.arange(80.0).mean(), np.arange(80.0).std()
        ours, theirs = ([np.round(part * std + mean) for part in everything(data)] for data in (train, validation))
        assert max(part.max() for part in ours) == 79
        assert min(part.min() for part in theirs) == 80
        assert theirs[1].max() == 99
        assert (len(ours[0]), len(theirs[0])) == (80 - WINDOW - HORIZON + 1, 20 - WINDOW - HORIZON + 1)
    assert train.kept == validation.kept
    assert train.kept["windows"]["mean"] == {"load": mean}


@pytest.mark.parametrize(
    ("target", "shape", "columns", "form"),
    [
        ("load", ("N", WINDOW, 3), (0, 1, 2), (HORIZON,)),
        ("load,wind", ("N", "T", "F"), (0, 1, 2), (HORIZON, 2)),
        (["wind", "load"], ("N", WINDOW, 2), (2, 1), (HORIZON, 2)),
        ("load", ("N", WINDOW), (1,), (HORIZON,)),
        ("load", ("N", WINDOW, 1), (1,), (HORIZON,)),
        ("load", ("N", 3, WINDOW), (0, 1, 2), (HORIZON,)),
    ],
)
def test_forms_of_inputs_and_targets(target, shape, columns, form):
    inputs, targets = everything(dataset(target=target, shape=shape))
    values = np.stack([*TABLE.values()], axis=1)
    names = target.split(",") if isinstance(target, str) else target
    values = (values - values.mean(0)) / values.std(0)
    x = sliding_window_view(values[:-HORIZON, columns], WINDOW, axis=0)  # [N, F, T]
    x = x[:, 0] if len(shape) == 2 else x if shape[1:] == (3, WINDOW) else x.swapaxes(1, 2)
    places = [[*TABLE].index(name) for name in names]
    y = sliding_window_view(values[WINDOW:, places], HORIZON, axis=0).swapaxes(1, 2).reshape(len(x), *form)
    np.testing.assert_allclose(inputs, x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(targets, y, rtol=1e-5, atol=1e-6)


def test_columns_beside_the_input_are_targets():
    """As where several target columns are named one by one."""
    specs = [TensorSpec("x", np.dtype(np.float32), ("N", WINDOW, 3))]
    specs += [TensorSpec(name, np.dtype(np.float32), beside=True) for name in ("load", "wind")]
    (batch,) = Windows(TABLE, WINDOW, HORIZON).dataset(Wanted(specs, need_target=False)).batches(1000)
    np.testing.assert_array_equal(batch.targets, everything(dataset(target="load,wind"))[1])


def test_one_step_ahead_and_several_targets_in_their_units():
    ours = onnxtrain.Trainer(model(outputs=2), loss="mse", seed=1)
    ours.fit(Windows(TABLE, WINDOW, 1), target="load,temperature", epochs=1, progress=False)
    assert everything(dataset(target="load,temperature", horizon=1))[1].shape == (ROWS - WINDOW, 2)
    values = np.stack([*TABLE.values()], axis=1)
    x = sliding_window_view((values - values.mean(0)) / values.std(0), WINDOW, axis=0).swapaxes(1, 2)
    expected = ours.predict(x) * values.std(0)[[1, 0]] + values.mean(0)[[1, 0]]
    np.testing.assert_allclose(ours.predict(Windows(TABLE, WINDOW, 1)), expected, rtol=1e-5)


def test_tables_with_dates():
    pandas = pytest.importorskip("pandas")
    arrow = pytest.importorskip("pyarrow")
    dates = pandas.date_range("2024-01-31", periods=ROWS, freq="h", tz="Europe/Berlin")
    frame = pandas.DataFrame({"when": dates, **TABLE})
    texts = pandas.DataFrame({"when": dates.tz_localize(None).astype(str), **TABLE})
    expected = everything(dataset())
    for table in (frame, texts, arrow.Table.from_pandas(frame)):
        for found, one in zip(everything(dataset(table)), expected, strict=True):
            np.testing.assert_array_equal(found, one)
    with pytest.raises(DataError, match="the column 'when' of the table goes back in time at row 1; sort the rows"):
        dataset(frame[::-1])


def test_a_constant_column_becomes_zero():
    inputs, _ = everything(dataset({**TABLE, "wind": np.full(ROWS, 0.1)}))
    np.testing.assert_allclose(inputs[..., 2], 0, atol=1e-12)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow.csv")
    from onnxtrain.cli import main

    monkeypatch.chdir(tmp_path)
    lines = [",".join(["date", *TABLE])]
    for row in range(ROWS):
        cells = [str(column[row]) for column in TABLE.values()]
        lines.append(",".join([f"2024-01-{1 + row // 24:02} {row % 24:02}:00", *cells]))
    (tmp_path / "load.csv").write_text("\n".join(lines))
    onnx.save(model(), "model.onnx")
    windows = ("--window", str(WINDOW), "--horizon", str(HORIZON))
    flags = ("--data", "load.csv", "--target", "load", "--loss", "mse")
    fit = ("fit", "model.onnx", *flags, "--epochs", "2", "--quiet", "--output", "tuned.onnx")
    assert main([*fit, *windows, "--validation", "0.2"]) == 0
    kept = json.loads((tmp_path / "tuned.labels.json").read_text())["kept"]["windows"]
    np.testing.assert_allclose([*kept["mean"].values()], [column[:CUT].mean() for column in TABLE.values()])
    assert main(["predict", "tuned.onnx", "--data", "load.csv", "--output", "p.npy"]) == 0
    np.testing.assert_array_equal(np.load("p.npy"), onnxtrain.predict("tuned.onnx", Windows(TABLE, WINDOW, HORIZON)))
    assert main(["evaluate", "tuned.onnx", *flags, *windows, "--json"]) == 0
    capsys.readouterr()
    assert main([*fit, "--window", "8"]) == 2
    assert "--window and --horizon go together; give both" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", "model.onnx", *flags, *windows]) == 2
    assert "nothing says how those of the training were scaled" in " ".join(capsys.readouterr().err.split())


def test_mistakes():
    def check(sentence, *arguments, **options):
        with pytest.raises((DataError, OptionError), match=sentence):
            dataset(*arguments, **options)

    check("the table has the columns 'temperature', 'load', 'wind'; say which is the target", target=None)
    check("the table has no column 'lod' with numbers: it has 'temperature'", target="lod")
    check("has 10 rows here, but a window and its horizon take 11; give more rows", {"load": np.arange(10.0)},
          shape=("N", WINDOW, 1))  # fmt: skip
    check("has 3 columns with numbers .* but the input 'x' is .batch, 8, 7.; give as many columns", shape=("N", 8, 7))
    check("the column 'load' of the table has no value at row 2", {"load": np.array([1, 2, np.nan, 4])},
          shape=("N", WINDOW, 1))  # fmt: skip
    check("the column 'x' of the table holds texts, which are neither numbers nor dates", {**TABLE, "x": ["a"] * ROWS})
    check("the table of windows is a ndarray; give a path", np.zeros((9, 3)))
    with pytest.raises(DataError, match="horizon is 0; it needs a number of rows of at least 1"):
        Windows(TABLE, 8, 0)
    tuned = trainer()
    tuned.fit(Windows(TABLE, WINDOW, HORIZON), target="load", progress=False)
    with pytest.raises(DataError, match=r"windows have 7 rows .* but the model was trained on 8 and 3; give these"):
        tuned.predict(Windows(TABLE, 7, HORIZON))
    with pytest.raises(DataError, match="has no column 'wind': it has 'load', 'temperature'; the model reads"):
        tuned.predict(Windows({name: TABLE[name] for name in ("load", "temperature")}, WINDOW, HORIZON))


def test_a_failed_validation_leaves_no_scales():
    """Scales of all rows would tell the training about those that the next call holds out."""
    ours = trainer()
    with pytest.raises(DataError, match="has 1 rows here, but a window and its horizon take 11"):
        ours.fit(Windows(TABLE, WINDOW, HORIZON), target="load", validation=0.01, progress=False)
    ours.fit(Windows(TABLE, WINDOW, HORIZON), target="load", validation=0.2, progress=False)
    assert ours.data_adapter.names.kept["windows"]["mean"]["load"] == TABLE["load"][:CUT].mean()


def test_what_a_tuned_model_takes(tmp_path):
    tuned = trainer()
    windows = Windows(TABLE, WINDOW, HORIZON)
    tuned.fit(windows, target="load", validation=0.2, progress=False)
    for call in (tuned.fit, tuned.evaluate):
        with pytest.raises(DataError, match="the target of the table is 'wind', but the model was trained on 'load'"):
            call(windows, target="wind")
    tuned.save(tmp_path / "tuned.onnx")
    np.testing.assert_array_equal(onnxtrain.predict(tmp_path / "tuned.onnx", TABLE), tuned.predict(windows))
    with pytest.raises(DataError, match="read 'x', 'load', 'wind', 'temperature'; they need one input and one target"):
        trainer().fit(windows, target=["load", "wind"], sample_weight="temperature")


def test_files_of_windows(tmp_path):
    pytest.importorskip("pyarrow.csv")
    for number in (2, 10):
        (tmp_path / f"{number}.csv").write_text("a\n" + "\n".join(map(str, np.arange(12) + number)) + "\n")
    with pytest.raises(DataError, match=r"has the files '10.csv' and '2.csv' in this order, by name, .* give a list"):
        dataset(tmp_path, "a", ("N", WINDOW, 1))
    (tmp_path / "10.csv").write_text("a\n0.5\n" * 1)  # behind integers
    found = dataset([tmp_path / "2.csv", tmp_path / "10.csv"], "a", ("N", WINDOW, 1))
    np.testing.assert_array_equal(found._raw["a"], [*range(2, 14), 0.5])


def test_a_checkpoint_has_the_scales(tmp_path):
    first = trainer()
    first.fit(Windows(TABLE, WINDOW, HORIZON), target="load", validation=0.2, checkpoint=tmp_path, progress=False)
    other = trainer()
    other.load_checkpoint(tmp_path)
    windows = Windows(TABLE, WINDOW, HORIZON)
    np.testing.assert_array_equal(first.predict(windows), other.predict(windows))
    again = trainer()
    options = {"target": "load", "validation": 0.2, "checkpoint": tmp_path, "progress": False}
    again.fit(windows, epochs=2, resume=True, **options)
    assert again.data_adapter.names.kept == first.data_adapter.names.kept


@pytest.mark.parametrize("kind", ["date_range", "period_range"])
def test_an_index_of_dates_that_goes_back_is_refused(kind):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(TABLE, index=getattr(pandas, kind)("2024-01-01", periods=ROWS, freq="h"))
    ours, theirs = trainer(), trainer()
    ours.fit(Windows(table, WINDOW, HORIZON), target="load", epochs=1, progress=False)
    theirs.fit(Windows(TABLE, WINDOW, HORIZON), target="load", epochs=1, progress=False)
    np.testing.assert_array_equal(ours.get_weights(flat=True), theirs.get_weights(flat=True))
    with pytest.raises(DataError, match="the index of the table goes back in time; sort the rows by it"):
        trainer().fit(Windows(table[::-1], WINDOW, HORIZON), target="load", epochs=1, progress=False)


@pytest.mark.parametrize("as_index", [False, True])
@pytest.mark.parametrize(
    ("removed", "sentence"),
    [
        (
            slice(20, 40),
            "has a gap from 2024-01-20.* to 2024-02-10.* at row 20, and windows go across it; fill the gap",
        ),
        (slice(0, 0), "repeats the date 2024-01-01.* at row 1, and windows go across it; give the rows of each series"),
        (slice(5, 7), None),  # a weekend
    ],
)
def test_windows_hint_at_gaps_and_at_several_series(removed, sentence, as_index):
    pandas = pytest.importorskip("pandas")
    dates = pandas.date_range("2024-01-01", periods=80)
    if sentence and "repeats" in sentence:
        dates = dates.repeat(2)
    table = pandas.DataFrame({"load": np.arange(float(len(dates))), "when": dates})
    table = table.drop(index=table.index[removed])
    table = table.set_index("when") if as_index else table
    trainer = onnxtrain.Trainer(mlp((WINDOW, 8, 1)), loss="mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Windows(table, WINDOW, 1), target="load", epochs=1, progress=False)
    found = [str(each.message) for each in caught if "windows go across" in str(each.message)]
    assert len(found) == bool(sentence)
    assert not sentence or re.search(sentence, found[0])
