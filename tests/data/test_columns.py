"""Tables are read by column names: the order of columns does not matter, other names are refused."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import onnx
import pytest

import onnxtrain
from frames import Frame
from onnxtrain import examples
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.data.naming import in_order
from onnxtrain.errors import CheckpointError, DataError
from sentences import raises_sentence

LOSS = "cross_entropy"
RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 5)).astype(np.float32)
LABELS = X[:, :3].argmax(1)
TEXTS = np.array(["ash", "elm", "oak"])[LABELS]
NAMES = ("b", "a", "height", "10", "e")
SETTINGS = {"epochs": 2, "batch_size": 7, "progress": False}


def columns(order=NAMES, rows=slice(None), target="kind"):
    """Columns in an order; the target is where its name is in it, or the last."""
    known = dict(zip(NAMES, X[rows].T, strict=True)) | {target: TEXTS[rows]}
    return {name: known[name] for name in (order if target in order or target is None else (*order, target))}


def csv(path, table):
    lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
    path.with_suffix(".csv").write_text("\n".join(lines) + "\n")
    return path.with_suffix(".csv")


def parquet(path, table):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table(table), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def feather(path, table):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.feather

    pyarrow.feather.write_feather(arrow.table(table), str(path.with_suffix(".feather")))
    return path.with_suffix(".feather")


FORMS = {
    "csv": csv,
    "parquet": parquet,
    "feather": feather,
    "frame": lambda path, table: Frame(table),
    "pandas": lambda path, table: pytest.importorskip("pandas").DataFrame(table),
    "polars": lambda path, table: pytest.importorskip("polars").DataFrame(table),
    "pyarrow": lambda path, table: pytest.importorskip("pyarrow").table(table),
    "hugging face": lambda path, table: pytest.importorskip("datasets").Dataset.from_dict(table),
}
IN_MEMORY = ("frame", "pandas", "polars", "pyarrow")


def new_trainer(seed=5):
    return onnxtrain.Trainer(examples.mlp((5, 8, 3)), loss=LOSS, optimizer="adam(lr=0.01)", seed=seed)


def permuted(seed):
    """The columns and the target in a random order."""
    return [str(name) for name in np.random.default_rng(seed).permutation([*NAMES, "kind"])]


def without(table, *names):
    return {name: values for name, values in table.items() if name not in names}


@pytest.mark.sampled("seed")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_any_order_gives_the_same_bits(form, seed, tmp_path):
    """In evaluate, predict and validation, by the same trainer and by fresh ones."""
    make = FORMS[form]
    first = make(tmp_path / "first", columns())
    trainer = new_trainer()
    rows = trainer.fit(first, target="kind", validation=make(tmp_path / "v", columns()), **SETTINGS).rows
    expected = trainer.evaluate(first, target="kind", metrics="accuracy")
    outputs = trainer.predict(X)
    trainer.save(tmp_path / "tuned.onnx")
    assert trainer.columns == {"input": NAMES}
    order = permuted(seed)
    data = make(tmp_path / "d", columns(order))
    bare = make(tmp_path / "bare", without(columns(order), "kind"))
    for each in (trainer, onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS), pickle.loads(pickle.dumps(trainer))):
        assert each.evaluate(data, target="kind", metrics="accuracy") == expected
        np.testing.assert_array_equal(each.predict(data), outputs)  # the target is known, and left out
        np.testing.assert_array_equal(each.predict(bare), outputs)
    measured = onnxtrain.evaluate(tmp_path / "tuned.onnx", data, loss=LOSS, target="kind", metrics="accuracy")
    assert measured == expected
    np.testing.assert_array_equal(onnxtrain.predict(tmp_path / "tuned.onnx", data), outputs)
    again = new_trainer()
    assert again.fit(first, target="kind", validation=data, **SETTINGS).rows == rows


@pytest.mark.sampled("seed")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_a_training_is_resumed_with_columns_in_any_order(form, seed, tmp_path):
    make = FORMS[form]
    change = "data" if form == "hugging face" else ()  # whose hashes differ
    whole = new_trainer()
    whole.fit(make(tmp_path / "first", columns()), target="kind", **SETTINGS | {"epochs": 3})
    part = new_trainer()
    part.fit(make(tmp_path / "first", columns()), target="kind", checkpoint=tmp_path / "kept", **SETTINGS)
    again = new_trainer()
    data = make(tmp_path / "d", columns(permuted(seed)))
    again.fit(data, target="kind", checkpoint=tmp_path / "kept", resume=True, change=change, **SETTINGS | {"epochs": 3})
    np.testing.assert_array_equal(again.get_weights(flat=True), whole.get_weights(flat=True))
    assert again.columns == {"input": NAMES}
    other = make(tmp_path / "other", without(columns(), "e") | {"f": X[:, 4]})
    with pytest.raises(DataError, match="lacks 'e' and has 'f' besides"):
        new_trainer().fit(other, target="kind", checkpoint=tmp_path / "kept", resume=True, epochs=4, progress=False)
    loaded = new_trainer()
    loaded.load_checkpoint(tmp_path / "kept")
    assert (loaded.columns, loaded.data_adapter.names) == (again.columns, again.data_adapter.names)


@pytest.mark.parametrize("form", FORMS)
def test_other_columns_are_refused_by_name(form, tmp_path):
    make = FORMS[form]
    trainer = new_trainer()
    trainer.fit(make(tmp_path / "first", columns()), target="kind", **SETTINGS)
    trainer.save(tmp_path / "tuned.onnx")
    values = columns()
    for other, message in (
        (without(values, "height") | {"width": X[:, 2]}, "lacks 'height' and has 'width' besides"),
        (without(values, "height", "a"), "lacks 'a', 'height'"),
        (values | {"more": X[:, 0]}, "has 'more' besides"),
    ):
        data = make(tmp_path / "other", other)
        for call in (
            lambda data: trainer.evaluate(data, target="kind"),
            trainer.predict,
            lambda data: new_trainer().fit(
                make(tmp_path / "first", columns()), target="kind", validation=data, progress=False
            ),
            lambda data: trainer.fit(data, target="kind", progress=False),
            lambda data: onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS).fit(data, target="kind", progress=False),
            lambda data: onnxtrain.evaluate(tmp_path / "tuned.onnx", data, loss=LOSS, target="kind"),
            lambda data: onnxtrain.predict(tmp_path / "tuned.onnx", data),
        ):
            with raises_sentence("other_columns", what="input", wanted=("b", "a", "height", "10", "e"), has=message):
                call(data)


@pytest.mark.parametrize("form", IN_MEMORY)
@pytest.mark.parametrize("wrap", ["pair", "mapping", "batches", "loader"])
def test_tables_of_inputs_alone(form, wrap, tmp_path):
    """Beside an array of targets, under the name of the input, and in batches."""

    def data(order):
        def table(rows=slice(None)):
            return FORMS[form](tmp_path, without(columns(order, rows), "kind"))

        slices = [slice(start, start + 10) for start in range(0, 40, 10)]
        return {
            "pair": lambda: (table(), TEXTS),
            "mapping": lambda: {"input": table(), "kind": TEXTS},
            "batches": lambda: [(table(rows), TEXTS[rows]) for rows in slices],
            "loader": lambda: lambda: ({"input": table(rows), "kind": LABELS[rows]} for rows in slices),
        }[wrap]()

    trainer = new_trainer()
    trainer.fit(data(NAMES), **SETTINGS)
    assert trainer.columns == {"input": NAMES}
    expected = trainer.evaluate(data(NAMES))
    for seed in range(3):
        assert trainer.evaluate(data(permuted(seed))) == expected
        again = new_trainer()
        again.fit(data(NAMES), validation=data(permuted(seed)), **SETTINGS)
        np.testing.assert_array_equal(again.get_weights(flat=True), trainer.get_weights(flat=True))
    with pytest.raises(DataError, match="lacks 'e'"):
        trainer.evaluate(data([name for name in NAMES if name != "e"]))


def test_steps_read_tables_by_name():
    one, other = new_trainer(), new_trainer()
    for seed in range(3):
        table = Frame(without(columns(permuted(seed) if seed else NAMES), "kind"))
        assert one.train_step(table, LABELS) == other.train_step(X, LABELS)
    assert one.columns == {"input": NAMES}
    with pytest.raises(DataError, match="lacks 'a'"):
        one.train_step(Frame(without(columns(), "kind", "a")), LABELS)


def test_batches_of_one_iterable_have_one_order():
    mixed = [
        (
            {"input": Frame(without(columns(permuted(start) if start else NAMES, slice(start, start + 10)), "kind"))},
            rows,
        )
        for start, rows in ((start, LABELS[start : start + 10]) for start in range(0, 40, 10))
    ]
    plain = [({"input": X[start : start + 10]}, LABELS[start : start + 10]) for start in range(0, 40, 10)]
    one, other = new_trainer(), new_trainer()
    assert one.fit(mixed, **SETTINGS).rows == other.fit(plain, **SETTINGS).rows


def test_data_without_names_go_by_position():
    trainer = new_trainer()
    trainer.fit(Frame(columns()), target="kind", **SETTINGS)
    expected = trainer.predict(X)
    np.testing.assert_array_equal(trainer.predict({"input": X}), expected)
    counted = Frame(dict(enumerate(X.T)))  # as pandas calls the columns of an array
    np.testing.assert_array_equal(trainer.predict(counted), expected)
    by_array = new_trainer()
    by_array.fit(X, LABELS, **SETTINGS)
    assert by_array.columns == {}
    counting = new_trainer()
    counting.fit(counted, LABELS, **SETTINGS)
    turned = Frame({name: X[:, name] for name in (3, 0, 4, 1, 2)})
    np.testing.assert_array_equal(counting.predict(turned), counting.predict(X))


def test_one_input_for_each_column(tmp_path):
    """Names of inputs decide, as of the models that skl2onnx writes for columns."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 1] a, float[N, 1] b) => (float[N, 2] y)'
        "<float[2, 2] weight = {1, -1, 0.5, 2}> { x = Concat <axis = 1> (a, b)  y = MatMul(x, weight) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    classes = LABELS % 2
    table = {"b": X[:, 1], "kind": classes, "a": X[:, 0]}
    expected = onnxtrain.predict(model, (X[:, :1], X[:, 1:2]))
    for form in FORMS:
        data = FORMS[form](tmp_path / "d", table)
        np.testing.assert_array_equal(onnxtrain.predict(tmp_path / "m.onnx", data), expected)
        trainer = onnxtrain.Trainer(tmp_path / "m.onnx", loss=LOSS)
        measured = trainer.evaluate(data, target="kind")
        assert measured == trainer.evaluate(((X[:, :1], X[:, 1:2]), classes))
        if form in IN_MEMORY:
            assert trainer.evaluate(FORMS[form](tmp_path, without(table, "kind")), classes) == measured
        with pytest.raises(DataError, match="no columns for the inputs 'a'"):
            trainer.evaluate(FORMS[form](tmp_path / "d", {"c": X[:, 0], "b": X[:, 1], "kind": classes}), target="kind")


def test_names_are_kept_with_the_trainer_the_run_and_the_model(tmp_path):
    trainer = new_trainer()
    table = Frame(columns() | {"trust": np.ones(40)})
    trainer.fit(table, target="kind", sample_weight="trust", run=tmp_path / "run", **SETTINGS)
    record = {"columns": {"input": list(NAMES)}, "left_out": ["kind", "trust"], "labels": ["ash", "elm", "oak"]}
    assert {key: json.loads((tmp_path / "run" / "run.json").read_text())[key] for key in record} == record
    trainer.save(tmp_path / "tuned.onnx")
    assert json.loads((tmp_path / "tuned.labels.json").read_text()) == record
    before, after = new_trainer().model(), onnx.load(tmp_path / "tuned.onnx")
    assert before.metadata_props == after.metadata_props
    for other in (
        copy.deepcopy(trainer),
        pickle.loads(pickle.dumps(trainer)),
        trainer.rebuilt(),
        onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS),
    ):
        assert other.data_adapter.names == trainer.data_adapter.names
    np.testing.assert_array_equal(trainer.predict(table), trainer.predict(X))  # weights are no inputs
    by_numbers = new_trainer()
    by_numbers.fit(X, LABELS, **SETTINGS)
    by_numbers.save(tmp_path / "tuned.onnx")
    assert not (tmp_path / "tuned.labels.json").exists()  # it was another model's


@pytest.mark.parametrize(
    "text", ["[]", "7", '{"labels": "ab"}', '{"columns": {"input": "ab"}}', '{"columns": []}', "{}", '{"other": []}']
)
def test_invalid_label_files_are_refused(text, tmp_path):
    onnx.save(examples.mlp((5, 8, 3)), tmp_path / "tuned.onnx")
    (tmp_path / "tuned.labels.json").write_text(text)
    with raises_sentence("labels_file", what=f"'{tmp_path}/tuned.labels.json'"):
        onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS)


@pytest.mark.plugins
def test_models_that_are_made_of_a_trained_one_keep_its_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(examples.mlp((5, 8, 3)), "given.onnx")
    csv(tmp_path / "d", columns())
    adapting = onnxtrain.Trainer("given.onnx", loss=LOSS, lora=onnxtrain.Lora(rank=2, targets="*"))
    adapting.fit("d.csv", target="kind", **SETTINGS)
    adapting.save("adapter.onnx_adapter")
    onnxtrain.adapters.merge_adapter("given.onnx", "adapter.onnx_adapter", "merged.onnx")
    onnxtrain.prune("given.onnx", "d.csv", loss=LOSS, target="kind", sparsity=0.5, epochs=1, save="pruned.onnx")
    assert onnxtrain.Trainer("merged.onnx", loss=LOSS).data_adapter.names == adapting.data_adapter.names
    assert onnxtrain.Trainer("pruned.onnx", loss=LOSS).data_adapter.names == adapting.data_adapter.names
    lora = onnxtrain.Lora(rank=2, adapter="adapter.onnx_adapter")
    assert onnxtrain.Trainer("given.onnx", loss=LOSS, lora=lora).data_adapter.names == adapting.data_adapter.names


def test_two_columns_of_one_name_are_refused():
    with pytest.raises(DataError, match="the table has two columns 'a'"):
        new_trainer().predict(pytest.importorskip("pandas").DataFrame(X, columns=[*"abcda"]))


def test_an_order_of_columns_takes_linear_time():
    """Twenty thousand columns: a search of each among all would be 400 million comparisons."""
    names = [f"column {index}" for index in range(20_000)]
    spec = TensorSpec("x", np.dtype(np.float32), (None, 20_000), columns=tuple(reversed(names)))
    assert in_order(names, spec, "the table") == names[::-1]


def test_a_dataset_that_was_opened_before_comes_into_order():
    spec = TensorSpec("input", np.dtype(np.float32), (None, 5))
    trainer = new_trainer()
    trainer.fit(Frame(columns()), target="kind", **SETTINGS)
    opened = open_dataset(Frame(columns(permuted(1))), [spec], target="kind")
    assert trainer.evaluate(opened) == trainer.evaluate(X, TEXTS)


@pytest.mark.plugins
def test_estimators_read_frames_by_name(tmp_path):
    pandas = pytest.importorskip("pandas")
    classifier, trainer = onnxtrain.sklearn.OnnxClassifier, new_trainer()
    trainer.fit(Frame(columns()), target="kind", **SETTINGS)
    trainer.save(tmp_path / "tuned.onnx")

    def frame(order):
        return pandas.DataFrame({name: X[:, NAMES.index(name)] for name in order})

    settings = {"epochs": 2, "random_state": 1}
    expected = classifier(tmp_path / "tuned.onnx", **settings).fit(frame(NAMES), TEXTS)
    order = ["e", "a", "10", "b", "height"]
    other = classifier(tmp_path / "tuned.onnx", **settings).fit(frame(order), TEXTS)
    np.testing.assert_array_equal(other.predict_proba(frame(order)), expected.predict_proba(frame(NAMES)))
    other.save(tmp_path / "again.onnx")
    again = onnxtrain.Trainer(tmp_path / "again.onnx", loss=LOSS)
    assert (again.columns, again.labels) == ({"input": NAMES}, ("ash", "elm", "oak"))
    with pytest.raises(DataError, match="lacks 'b' and has 'c' besides"):
        classifier(tmp_path / "tuned.onnx", **settings).fit(frame(NAMES).rename(columns={"b": "c"}), TEXTS)
    fresh = classifier(epochs=1).fit(frame(order), TEXTS)
    assert fresh.trainer_.columns == {"input": tuple(order)}


def test_checkpoints_of_other_columns_are_refused(tmp_path):
    """The trainer reads other names from the file beside its model."""
    trainer = new_trainer()
    trainer.fit(X, LABELS, checkpoint=tmp_path / "kept", **SETTINGS)
    named = new_trainer()
    named.fit(Frame(columns()), target="kind", checkpoint=tmp_path / "named", **SETTINGS)
    other = new_trainer()
    other.fit(Frame({f"x{name}": X[:, index] for index, name in enumerate(NAMES)} | {"kind": TEXTS}), target="kind")
    with pytest.raises(CheckpointError, match="columns is"):
        other.fit(X, TEXTS, checkpoint=tmp_path / "named", resume=True, epochs=3, progress=False)


def test_prediction_leaves_a_target_column_of_texts_aside():
    trainer = onnxtrain.Trainer(examples.mlp((5, 3)), loss=LOSS)
    np.testing.assert_array_equal(trainer.predict(Frame(columns()), target="kind"), trainer.predict(X))
