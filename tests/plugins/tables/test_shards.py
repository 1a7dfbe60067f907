"""Tables in many files: equal to their rows as arrays, never all in memory, shuffled by the seed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from onnxtrain.tables import Shards

import onnxtrain
from onnxtrain import examples
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.data.naming import Wanted
from onnxtrain.errors import DataError
from onnxtrain.plugins.tables.shards import are_shards
from onnxtrain.plugins.tables.stream import in_batches, mixed

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4))
KINDS = np.array(["bird", "cat", "dog"])[X[:, :3].argmax(1)]
SPEC = TensorSpec("input", np.dtype(np.float32), ("N", 4))
FORMS = (".parquet", ".csv", ".arrow")


def write(path, rows, order="abcd", **more):
    columns = {name: X[rows, "abcd".index(name)] for name in order} | {"kind": KINDS[rows]} | more
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=7)


@pytest.fixture(params=FORMS)
def folder(request, tmp_path):
    pytest.importorskip("pyarrow.csv")
    (tmp_path / "shards" / "more").mkdir(parents=True)
    for number in range(3):
        place = tmp_path / "shards" / ("more" if number == 2 else ".")
        order = "abcd" if number != 1 else "dbca"  # columns are found by name
        write(place / f"{number}{request.param}", slice(20 * number, 20 * number + 20), order)
    (tmp_path / "shards" / "_SUCCESS").touch()
    return tmp_path / "shards"


def trainer(**options):
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", seed=1, **options)


def losses(history):
    return [(row["loss"], row.get("val_loss")) for row in history.rows]


def ids(batches):
    """The rows that the batches have, by their first column."""
    places = {np.float32(value): row for row, value in enumerate(X[:, 0])}
    return [places[value] for batch in batches for value in batch.inputs["input"][:, 0]]


def test_training_on_shards_equals_training_on_their_rows(folder):
    ours, theirs = trainer(), trainer()
    options = {"epochs": 2, "batch_size": 9, "shuffle": False, "validation": 0.2, "progress": False}
    found = losses(ours.fit(folder, target="kind", schedule="cosine", **options))
    assert found == losses(theirs.fit(X, KINDS, schedule="cosine", **options))
    assert ours.labels == theirs.labels == ("bird", "cat", "dog")
    assert ours.columns == {"input": tuple("abcd")}
    ending = next(folder.glob("0.*")).suffix
    listed = sorted(folder.rglob(f"?{ending}"))
    for data in (folder, str(folder / f"**/?{ending}"), listed, Shards(listed)):
        np.testing.assert_array_equal(ours.predict(data), theirs.predict(X))
    assert ours.evaluate(folder, target="kind", metrics="accuracy") == theirs.evaluate(X, KINDS, metrics="accuracy")


def test_an_epoch_has_every_row_once_in_an_order_of_the_seed(tmp_path):
    for number in range(6):
        write(tmp_path / f"{number}.parquet", slice(10 * number, 10 * number + 10))
    data = open_dataset(Shards(tmp_path, buffer=20), [SPEC], target="kind")
    assert (data.size, data.batch_count(8)) == (60, 8)
    epochs = [ids(data.batches(8, shuffle=True, seed=3, epoch=epoch)) for epoch in (0, 1)]
    again = open_dataset(Shards(tmp_path, buffer=20), [SPEC], target="kind")
    assert epochs[0] == ids(again.batches(8, shuffle=True, seed=3))
    assert epochs[0][16:] == ids(again.batches(8, shuffle=True, seed=3, start=2))
    assert epochs[0] != epochs[1] != ids(again.batches(8, shuffle=True, seed=4, epoch=1))
    assert all(sorted(epoch) == [*range(60)] for epoch in epochs)
    near = np.abs(np.diff(epochs[0])) == 1
    assert near.mean() < 0.2  # neighbors are apart
    assert ids(data.batches(8)) == [*range(60)]


def test_rows_of_a_buffer_are_uniform():
    """Each row is equally likely at each place if the buffer holds all."""
    counts = np.zeros((6, 6))
    for seed in range(600):
        blocks = ({None: np.arange(start, start + 2)} for start in (0, 2, 4))
        order = np.concatenate([rows[None] for rows in mixed(blocks, 6, np.random.default_rng(seed))])
        counts[np.arange(6), order] += 1
    assert np.abs(counts - 100).max() < 50


def test_batches_have_one_size():
    blocks = [{None: np.arange(size)} for size in (3, 10, 1, 4)]
    assert [len(rows[None]) for rows in in_batches(blocks, 4)] == [4, 4, 4, 4, 2]


def test_held_out_rows_are_not_trained_on(tmp_path):
    for number in range(3):
        write(tmp_path / f"{number}.parquet", slice(20 * number, 20 * number + 20))
    from onnxtrain.data import split_validation

    data = open_dataset(Shards(tmp_path), [SPEC], target="kind")
    for shuffle in (True, False):
        train, validation = split_validation(data, 0.25, seed=1, shuffle=shuffle)
        assert (train.size, validation.size) == (45, 15)
        assert sorted(ids(train.batches(7, shuffle=True)) + ids(validation.batches(7))) == [*range(60)]
    assert ids(validation.batches(7)) == [*range(45, 60)]
    assert len({data.fingerprint(), train.fingerprint(), validation.fingerprint()}) == 3


def test_row_groups_are_not_kept(tmp_path):
    """20 shards of 2 MB, of which a reading holds the buffer and about one row group."""
    rows = RNG.normal(size=(65_536, 4))
    for number in range(20):
        parquet.write_table(pa.table(dict(zip("abcd", rows.T, strict=True))), tmp_path / f"{number}.parquet",
                            row_group_size=8192, use_dictionary=False, compression=None)  # fmt: skip
    data = open_dataset(Shards(tmp_path, buffer=1000), [SPEC], need_target=False)
    before, most = pa.total_allocated_bytes(), 0
    for batch in data.batches(4096, shuffle=True):
        most = max(most, pa.total_allocated_bytes() - before)
        assert batch.inputs["input"].base is None or batch.inputs["input"].base.nbytes < 2**20
    assert data.size == 20 * 65_536
    assert most < 8 * 8192 * 4 * 8  # a few row groups of 262 kB, not 42 MB


def test_ranks_train_their_shares_of_the_same_batches(tmp_path):
    for number in range(3):
        write(tmp_path / f"{number}.parquet", slice(20 * number, 20 * number + 20))
    data = open_dataset(Shards(tmp_path), [SPEC], target="kind")
    shares = [
        [*data.shared(lambda number, rows, rank=rank: slice(rank, rows, 2)).batches(8, shuffle=True)] for rank in (0, 1)
    ]
    whole = [*data.batches(8, shuffle=True)]
    for one, two, batch in zip(*shares, whole, strict=True):
        assert (one.total, one.content) == (two.total, two.content) == (batch.size, one.content)
    assert sorted(ids(shares[0] + shares[1])) == [*range(60)]


def test_resuming_reads_on_where_it_stopped(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(3):
        write(tmp_path / "data" / f"{number}.parquet", slice(20 * number, 20 * number + 20))
    options = {"target": "kind", "batch_size": 7, "progress": False, "schedule": "constant"}
    whole = trainer()
    whole.fit(tmp_path / "data", epochs=3, **options)
    for epochs, resume in ((1, False), (3, True)):
        part = trainer()
        part.fit(tmp_path / "data", epochs=epochs, checkpoint=tmp_path / "kept", resume=resume, **options)
    np.testing.assert_array_equal(part.get_weights(flat=True), whole.get_weights(flat=True))
    write(tmp_path / "data" / "2.parquet", slice(20, 40))
    with pytest.raises(onnxtrain.errors.CheckpointError, match="data"):
        trainer().fit(tmp_path / "data", epochs=4, checkpoint=tmp_path / "kept", resume=True, **options)


def test_weights_and_inputs_by_name(tmp_path):
    for number in range(2):
        rows = slice(30 * number, 30 * number + 30)
        write(tmp_path / f"{number}.parquet", rows, trust=np.linspace(0, 1, 60)[rows], input=list(X[rows]))
    ours, theirs = trainer(), trainer()
    options = {"epochs": 2, "batch_size": 9, "shuffle": False, "progress": False}
    found = losses(ours.fit(tmp_path, target="kind", sample_weight="trust", **options))
    assert found == losses(theirs.fit(X, KINDS, sample_weight=np.linspace(0, 1, 60), **options))


def test_missing_targets_of_any_file_are_left_out(tmp_path):
    """None in the first, all in the second: the first rows do not decide, and no missing one becomes a number."""
    y = np.where(RNG.random(60) < 0.5, None, 3)
    y[:20], y[20:40] = None, 4
    for number in range(3):
        rows = slice(20 * number, 20 * number + 20)
        write(tmp_path / f"{number}.parquet", rows, kind=pa.array(list(y[rows]), pa.int64()))
    numbers, places = y.astype(np.float64), {np.float32(value): row for row, value in enumerate(X[:, 0])}
    ours, theirs = (onnxtrain.Trainer(examples.mlp((4, 8, 1)), loss="mse", seed=1) for _ in range(2))
    options = {"epochs": 2, "batch_size": 9, "shuffle": False, "progress": False}
    with pytest.warns(onnxtrain.errors.TrainingHint, match=f"{np.isnan(numbers).sum()} of 60 targets are missing"):
        found = losses(ours.fit(Shards(tmp_path), target="kind", **options))
    with pytest.warns(onnxtrain.errors.TrainingHint):
        assert found == losses(theirs.fit(X, numbers, **options))
    for batch in ours.open_data(Shards(tmp_path, buffer=5), target="kind").batches(8, shuffle=True, seed=2):
        expected = [numbers[places[value]] for value in batch.inputs["input"][:, 0]]
        np.testing.assert_array_equal(batch.targets[:, 0], expected)


def test_labels_of_two_outputs(tmp_path):
    """Texts in columns named like the outputs, with a missing one."""
    import onnx

    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
      f (float[N, 4] input) => (float[N, 3] kind, float[N, 1] big) <float[1, 1] w = {2}, int64[2] axes = {1, 1},
        int64[1] zero = {0}, int64[1] one = {1}, int64[1] three = {3}> {
        kind = Slice(input, zero, three, one)  first = Slice(input, zero, one, one)  big = MatMul(first, w) }""")
    big = np.where(X[:, 1] > 0, "yes", "no").astype(object)
    big[40] = None
    for number in range(2):
        rows = slice(30 * number, 30 * number + 30)
        write(tmp_path / f"{number}.parquet", rows, big=pa.array(list(big[rows])))
    trainer = onnxtrain.Trainer(model, loss={"kind": "cross_entropy", "big": "bce"})
    data = trainer.open_data(Shards(tmp_path))
    assert trainer.labels == {"kind": ("bird", "cat", "dog"), "big": ("no", "yes")}
    (batch,) = data.batches(60)
    np.testing.assert_array_equal(np.array(["bird", "cat", "dog"])[batch.inputs["kind"]], KINDS)
    expected = np.where(big == "yes", 1.0, np.where(big == "no", 0.0, np.nan).astype(np.float64))
    np.testing.assert_array_equal(batch.inputs["big"][:, 0], expected)


def test_the_command_line(tmp_path, monkeypatch):
    import onnx

    from onnxtrain.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "held").mkdir()
    for number in range(3):
        write(tmp_path / f"part-{number}.csv", slice(20 * number, 20 * number + 20))
    write(tmp_path / "held" / "0.csv", slice(0, 60))
    onnx.save(examples.mlp((4, 8, 3)), "model.onnx")
    flags = ("--data", "part-*.csv", "--target", "kind", "--loss", "cross_entropy")
    assert main(["fit", "model.onnx", *flags, "--validation", "held/*.csv", "--quiet", "--output", "tuned.onnx"]) == 0
    assert json.loads((tmp_path / "tuned.labels.json").read_text())["labels"] == ["bird", "cat", "dog"]
    assert main(["predict", "tuned.onnx", "--data", "part-*.csv", "--output", "p.npy"]) == 0
    np.testing.assert_array_equal(np.load("p.npy"), onnxtrain.predict("tuned.onnx", X))


def test_a_stream_of_columns(tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
    options = {"epochs": 2, "batch_size": 9, "shuffle": False, "progress": False}
    expected = losses(trainer().fit(X, KINDS, **options))
    table = datasets.Dataset.from_dict({name: X[:, place] for place, name in enumerate("abcd")} | {"kind": KINDS})
    ours = trainer()
    assert losses(ours.fit(table.to_iterable_dataset(num_shards=3), target="kind", **options)) == expected
    np.testing.assert_array_equal(ours.predict(table.to_iterable_dataset(), target="kind"), ours.predict(X))
    names = ["cat", "dog", "bird"]  # numbers of classes, of a column of lists
    features = datasets.Features(
        {"x": datasets.List(datasets.Value("float64")), "kind": datasets.ClassLabel(names=names)}
    )
    classes = [names.index(kind) for kind in KINDS]
    stream = datasets.Dataset.from_dict({"x": X, "kind": classes}, features=features).to_iterable_dataset()
    named = trainer()
    named.fit(stream, target="kind", **options)
    assert named.labels == tuple(names)
    shuffled = [
        losses(trainer().fit(table.to_iterable_dataset(), target="kind", epochs=2, progress=False)) for _ in range(2)
    ]
    assert shuffled[0] == shuffled[1]
    with pytest.raises(onnxtrain.errors.OptionError, match="a fraction for validation needs data"):
        trainer().fit(stream, target="kind", validation=0.2)


def test_what_are_shards(tmp_path):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "labels.csv").touch()
    (tmp_path / "mixed" / "1.png").touch()
    for other in (["a", "b"], [], [1.0], "d.csv", tmp_path / "mixed", tmp_path / "absent", "d/*.tar", {"a": 1}, None):
        assert not are_shards(other)
    for data in (["a.csv", "b.csv"], "d/*.parquet", "part-?.csv", (tmp_path / "a.pq",)):
        assert are_shards(data)


def check(sentence, data, **options):
    with pytest.raises(DataError, match=sentence):
        [*data.dataset(Wanted([SPEC], "kind", **options)).batches(8)]


def test_mistakes(tmp_path):
    check("matches no file; give a folder of tables, a list of paths, or a pattern", Shards(str(tmp_path / "*.csv")))
    write(tmp_path / "0.parquet", slice(0, 20))
    write(tmp_path / "1.csv", slice(0, 20))
    check("has CSV files beside others; it needs Parquet files, Arrow files or CSV files alone", Shards(tmp_path))
    (tmp_path / "1.csv").unlink()
    write(tmp_path / "1.parquet", slice(0, 20), "abc")
    check("1.parquet' lacks the columns 'd', which the first file of .* has", Shards(tmp_path))
    write(tmp_path / "1.parquet", slice(0, 20), d=[*X[:19, 3], None])
    check("the column 'd' has no value at example 39; fill it in", Shards(tmp_path))
    (tmp_path / "1.parquet").write_bytes(b"PAR1")
    check("cannot be read as a table", Shards(tmp_path))
    with pytest.raises(DataError, match="buffer is 0; it needs a number of rows of at least 1"):
        Shards(tmp_path, buffer=0)
    with pytest.raises(DataError, match="the table has 3 for a path; give a pattern, a folder, a path, or a list"):
        Shards(["a.csv", 3])
    with pytest.raises(DataError, match="encoding is 'utf-9', which is not a text encoding of Python"):
        Shards("*.csv", encoding="utf-9")
    (tmp_path / "1.parquet").unlink()
    (tmp_path / "0.parquet").unlink()
    (tmp_path / "a.csv").write_text("a,b,c,d,kind\n1,2,3,4,x\n1,2,3,five,y\n")
    check("the column 'd' holds string, not numbers", Shards(tmp_path))
    (tmp_path / "b.csv").write_text("a;b;c;d;kind\n1,5;2;3;4;x\n1;2;3;4;y\n")
    (batch,) = Shards([tmp_path / "b.csv"], decimal=",").dataset(Wanted([SPEC], "kind")).batches(8)
    assert batch.inputs["input"].tolist() == [[1.5, 2, 3, 4], [1, 2, 3, 4]]
