"""``predict`` to CSV and Parquet: labels and probabilities, or raw outputs."""

from __future__ import annotations

import csv
import json
import tarfile

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.training.inference.prediction_table import prediction_table, write_table
from sentences import raises_sentence

FLAGS = ("predict", "model.onnx", "--data", "test.npz")


def lines(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.fixture
def scores(files):
    return onnxtrain.predict(files / "model.onnx", np.load(files / "test.npz")["input"]).astype(np.float64)


@pytest.fixture
def softmax(scores):
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def test_outputs_as_they_are(files, success, scores):
    out = success(*FLAGS, "--output", "p.csv").out
    found = lines(files / "p.csv")
    assert [*found[0]] == ["example", "logits[0]", "logits[1]", "logits[2]"]
    assert [row["example"] for row in found] == [str(index) for index in range(30)]
    values = np.array([[row[f"logits[{index}]"] for index in range(3)] for row in found], np.float32)
    np.testing.assert_array_equal(values, scores.astype(np.float32))
    assert "lines" in out
    assert "30" in out


def test_probabilities_where_they_are_asked_for(files, success, softmax):
    success(*FLAGS, "--output", "p.csv", "--probabilities")
    found = lines(files / "p.csv")
    assert [*found[0]] == ["example", "label", "probability", "p(0)", "p(1)", "p(2)"]
    np.testing.assert_allclose([[float(row[f"p({index})"]) for index in range(3)] for row in found], softmax, rtol=1e-9)
    assert [int(row["label"]) for row in found] == softmax.argmax(1).tolist()
    np.testing.assert_allclose([float(row["probability"]) for row in found], softmax.max(1), rtol=1e-9)


def test_labels_of_a_model_that_was_trained_on_texts(files, success, softmax):
    (files / "model.labels.json").write_text(json.dumps(["ant", "bee, honey", "kätzchen"]))
    success(*FLAGS, "--output", "p.csv")
    found = lines(files / "p.csv")
    assert [row["label"] for row in found] == [["ant", "bee, honey", "kätzchen"][index] for index in softmax.argmax(1)]
    assert "p(bee, honey)" in found[0]


def test_parquet(files, success, softmax):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    (files / "model.labels.json").write_text(json.dumps(["ant", "bee", "cow"]))
    success(*FLAGS, "--output", "p.parquet")
    table = parquet.read_table(files / "p.parquet")
    assert table.column_names == ["example", "label", "probability", "p(ant)", "p(bee)", "p(cow)"]
    np.testing.assert_allclose(table["p(bee)"].to_numpy(), softmax[:, 1])
    assert table["label"].to_pylist() == [["ant", "bee", "cow"][index] for index in softmax.argmax(1)]


def test_pictures_are_named(files, success):
    image = pytest.importorskip("PIL.Image")
    flat = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 1, 2, 2] image) => (float[N, 4] y) { y = Flatten(image) }'
    )
    onnx.save(flat, files / "flat.onnx")
    (files / "pictures" / "inner").mkdir(parents=True)
    image.new("L", (2, 2), 255).save(files / "pictures" / "b.png")
    image.new("L", (2, 2), 0).save(files / "pictures" / "inner" / "a.png")
    success("predict", "flat.onnx", "--data", "pictures", "--output", "p.csv")
    found = lines(files / "p.csv")
    assert [(row["file"], float(row["y[0]"])) for row in found] == [
        ("pictures/b.png", 1.0),
        ("pictures/inner/a.png", 0.0),
    ]


def test_labels_are_those_of_the_output_that_was_trained(files, success, run):
    model = onnx.load(files / "model.onnx")
    hidden = model.graph.node[0].output[0]
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info(hidden, onnx.TensorProto.FLOAT, ["N", None]))
    onnx.save(onnx.shape_inference.infer_shapes(model), files / "two.onnx")
    points, classes = onnxtrain.examples.points()
    texts = np.array(["ant", "bee", "cow"])[classes]
    trainer = onnxtrain.Trainer(files / "two.onnx", loss="cross_entropy", output="logits", optimizer="adam(lr=0.01)")
    trainer.fit(points, texts, epochs=3, progress=False)
    trainer.save(files / "tuned.onnx")
    assert json.loads((files / "tuned.labels.json").read_text()) == {
        "labels": ["ant", "bee", "cow"],
        "output": "logits",
    }
    np.savez(files / "points.npz", input=points, target=texts)
    success("predict", "tuned.onnx", "--data", "points.npz", "--output", "p.csv")
    assert [row["label"] for row in lines(files / "p.csv")] == trainer.predict(points, labels=True).tolist()
    measured = ("evaluate", "tuned.onnx", "--data", "points.npz", "--loss", "cross_entropy")
    success(*measured, "--prediction", "logits")
    found = run(*measured)
    assert found.code == 2
    said = f"the labels beside the model are the classes of its output 'logits', but the loss reads '{hidden}'; give"
    assert said in " ".join(found.err.split())
    assert onnxtrain.Trainer(files / "tuned.onnx", loss="cross_entropy").labels is None
    again = onnxtrain.Trainer(files / "tuned.onnx", loss="cross_entropy", output="logits")
    assert again.labels == ("ant", "bee", "cow")
    again.save(files / "again.onnx")
    assert (files / "again.labels.json").read_text() == (files / "tuned.labels.json").read_text()


def test_a_class_before_the_scores_is_not_taken_for_them(files, success):
    """As skl2onnx writes them."""
    text = """<ir_version: 8, opset_import: ["": 18]> f (float[N, 2] x) => (int64[N] label, float[N, 2] scores) {
        label = ArgMax <axis = 1, keepdims = 0> (x)  scores = Softmax(x)
    }"""
    onnx.save(onnx.parser.parse_model(text), files / "class.onnx")
    np.savez(files / "x.npz", x=np.log(np.array([[1, 3], [1, 1]], np.float32)))
    success("predict", "class.onnx", "--data", "x.npz", "--output", "p.csv", "--probabilities")
    assert [float(row["p(1)"]) for row in lines(files / "p.csv")] == pytest.approx([0.75, 0.5])


def test_lines_of_skipped_pictures_are_left_out(files, run):
    image = pytest.importorskip("PIL.Image")
    flat = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 1, 1, 1] image) => (float[N, 1] y) { y = Flatten(image) }'
    )
    onnx.save(flat, files / "flat.onnx")
    (files / "pictures" / ".ipynb_checkpoints").mkdir(parents=True)
    for name, grey in (("a", 255), ("c", 51), (".ipynb_checkpoints/c-checkpoint", 51)):
        image.new("L", (1, 1), grey).save(files / "pictures" / f"{name}.png")
    (files / "pictures" / "b.png").write_bytes(b"no image")
    with tarfile.open(files / "pictures.tar", "w") as archive:
        for name in "abc":
            archive.add(files / "pictures" / f"{name}.png", f"{name}.png")
    for data, folder in (("pictures", "pictures/"), ("pictures.tar", "")):
        found = run("predict", "flat.onnx", "--data", data, "--skip-broken", "--output", "p.csv")
        assert found.code == 0, found.err
        rows = [(row["file"], float(row["y"])) for row in lines(files / "p.csv")]
        assert rows == [(f"{folder}a.png", 1.0), (f"{folder}c.png", pytest.approx(0.2))]


@pytest.mark.parametrize(
    ("scores", "kind", "expected"),
    [
        (np.array([[0.2, 0.8], [1.0, 0.0]]), None, [0.8, 0.0]),  # distributions already
        (np.array([[0.2, 0.7]]), "distribution", [0.7]),  # of 8 bits
        (np.log([[0.25, 0.75]]), "logits", [0.75]),
        (np.array([[1 - np.log(3), np.log(3)]]), "logits", [9 / (9 + np.e)]),  # they sum to 1 by chance
        (np.array([[0.0], [np.log(3)], [-1000.0]]), None, [0.5, 0.75, 0.0]),
        (np.array([0.0, 1.0]), "logits", [0.5, np.e / (1 + np.e)]),
        (np.array([0.25, 1.0]), "independent", [0.25, 1.0]),
        (np.array([[1000.0, 0.0]]), None, [0.0]),
    ],
)
def test_forms_of_scores(scores, kind, expected):
    found = prediction_table({"y": scores}, labels=["no", "yes"], kind=kind)
    expected = np.array(expected)
    if kind == "distribution":
        np.testing.assert_array_equal(found["p(yes)"], expected)
        return
    np.testing.assert_allclose(found["p(yes)"], expected, atol=1e-12)
    np.testing.assert_allclose(found["p(no)"] + found["p(yes)"], 1)


ENDINGS = {
    "logits": ("y = MatMul(x, w)", lambda z: 1 / (1 + np.exp(-z))),
    "with a bias": ("z = MatMul(x, w) y = Add(z, b)", lambda z: 1 / (1 + np.exp(-z))),
    "sigmoid": ("z = MatMul(x, w) y = Sigmoid(z)", lambda z: 1 / (1 + np.exp(-z))),
    "sigmoid in 8 bits": (
        "z = MatMul(x, w) s = Sigmoid(z) q = QuantizeLinear(s, scale, zero) y = DequantizeLinear(q, scale, zero)",
        lambda z: np.round(255 / (1 + np.exp(-z))) / 255,
    ),
    "behind a reshape": ("z = MatMul(x, w) s = Sigmoid(z) y = Reshape(s, shape)", lambda z: 1 / (1 + np.exp(-z))),
    "by hand": (
        "z = MatMul(x, w) n = Neg(z) e = Exp(n) t = Sum(e, one) y = Div(one, t)",
        lambda z: 1 / (1 + np.exp(-z)),
    ),
    "logarithm": ("z = MatMul(x, w) s = Sigmoid(z) y = Log(s)", lambda z: 1 / (1 + np.exp(-z))),
}


def with_ending(nodes, columns=1):
    weights = ", ".join(["0.5"] * columns)
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> f (float[N, 1] x) => (float[N, {columns}] y) '
        f"<float[1, {columns}] w = {{{weights}}}, float[{columns}] b = {{{', '.join(['0'] * columns)}}}, "
        f"float one = {{1}}, "
        f"float scale = {{{1 / 255}}}, uint8 zero = {{0}}, int64[2] shape = {{-1, {columns}}}> {{ {nodes} }}"
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_answer_to_an_example_does_not_depend_on_the_others(files, success, ending):
    nodes, expected = ENDINGS[ending]
    onnx.save(with_ending(nodes), files / "one.onnx")
    x = np.array([[0.4], [-3.0], [5.0]], np.float32)
    rows = []
    for name, part in (("all", x), ("first", x[:1])):
        np.savez(files / f"{name}.npz", x=part)
        success("predict", "one.onnx", "--data", f"{name}.npz", "--output", f"{name}.csv", "--probabilities")
        rows.append(lines(files / f"{name}.csv"))
    assert rows[0][0] == rows[1][0]
    np.testing.assert_allclose([float(row["p(1)"]) for row in rows[0]], expected(x[:, 0] / 2), atol=1e-6)
    assert rows[0][0]["label"] == "1"


def test_outputs_that_do_not_tell_what_they_are_are_refused(files, run):
    np.savez(files / "x.npz", x=np.array([[0.4]], np.float32))
    for columns, nodes, said in (
        (1, "z = MatMul(x, w) y = Abs(z)", "the output 'y' has values from 0 to 1, which may be logits or probabilit"),
        (3, "z = MatMul(x, w) y = Sigmoid(z)", "holds 3 independent probabilities, not scores of classes of which one"),
    ):
        onnx.save(with_ending(nodes, columns), files / "open.onnx")
        found = run("predict", "open.onnx", "--data", "x.npz", "--output", "p.csv", "--probabilities")
        assert found.code == 2
        assert said in " ".join(found.err.split())


def test_other_outputs():
    found = prediction_table({"a": np.arange(2.0), "b": np.arange(8).reshape(2, 2, 2), "c": np.array([["x"], ["y"]])})
    assert [*found] == ["example", "a", "b[0,0]", "b[0,1]", "b[1,0]", "b[1,1]", "c"]
    with raises_sentence("output_without_examples", what="b", got=(3,)):
        prediction_table({"a": np.zeros(2), "b": np.zeros(3)})
    with raises_sentence("no_scores_for_probabilities", what="a", got=(2, 3), dtype="int64"):
        prediction_table({"a": np.zeros((2, 3), int)}, probabilities=True)
    with pytest.raises(OptionError, match="has 3 classes, but there are 4 labels"):
        prediction_table({"a": np.zeros((2, 3))}, labels=[*"wxyz"])
    fewer = prediction_table({"a": np.zeros((2, 3))}, labels=["x", "y"])
    assert [*fewer] == ["example", "label", "probability", "p(x)", "p(y)", "p(2)"]


def test_mistakes(files, run, monkeypatch):
    assert (
        "--output is 'p.txt'; it needs a file that ends in .csv, .parquet, .npz, .npy."
        in run(*FLAGS, "-o", "p.txt").err
    )
    assert "--probabilities go to a .csv or .parquet file" in run(*FLAGS, "-o", "p.npz", "--probabilities").err
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    result = run(*FLAGS, "--output", "p.parquet")
    assert result.code == 2
    assert "writing Parquet needs pyarrow; install it: pip install pyarrow" in result.err
    assert not (files / "p.parquet").exists()


def test_labels_that_are_formulas_are_texts_in_csv(tmp_path):
    labels = ["=cmd|'/C calc'!A0", "@x", "-1"]
    table = prediction_table({"y": np.eye(3)}, labels=labels, kind="distribution")
    write_table(tmp_path / "t.csv", table)
    rows = list(csv.reader((tmp_path / "t.csv").read_text().splitlines()))
    assert [row[1] for row in rows[1:]] == ["'=cmd|'/C calc'!A0", "'@x", "-1"]
    assert not any(cell.startswith(("=", "@")) for row in rows for cell in row)
