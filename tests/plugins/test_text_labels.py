"""Text labels wherever a loss has classes or pairs: of one output, of several, from arrays and from tables."""

import json

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from frames import Frame
from onnxtrain import examples
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses import LOSSES

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype(np.float32)
NUMBERS = np.arange(24) % 3
KINDS = np.array(["bird", "cat", "dog"])[NUMBERS]
ANSWERS = np.where(X[:, 0] > 0, "yes", "no")

WITHOUT_NAMES = {
    "next_token": "token ids, which a tokenizer makes of texts",
    "ctc": "sequences of labels",
    "transducer": "sequences of labels",
    "dice": "masks, whose pixels are numbers",
    "tversky": "masks, whose pixels are numbers",
    "yolo": "boxes with classes as numbers",
    "detr": "boxes with classes as numbers",
    "ordinal": "grades, whose order their names do not tell",
}
"""Losses with classes whose targets are not one name per example."""


def linear(**widths):
    """A model of x [N, 4] with a linear output of each width."""
    kind = onnx.TensorProto.FLOAT
    nodes = [helper.make_node("MatMul", ["x", f"w_{name}"], [name]) for name in widths]
    outputs = [helper.make_tensor_value_info(name, kind, ["N", width]) for name, width in widths.items()]
    weights = [
        numpy_helper.from_array(RNG.normal(size=(4, width)).astype(np.float32), f"w_{name}")
        for name, width in widths.items()
    ]
    graph = helper.make_graph(
        nodes, "heads", [helper.make_tensor_value_info("x", kind, ["N", 4])], outputs, initializer=weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def has_names(loss):
    return "indices" in loss.target_kinds or loss.predicts == "binary"


NAMED = [name for name, loss in LOSSES.items() if has_names(loss) and name not in WITHOUT_NAMES]


def model_for(name):
    if name in ("arcface", "cosface"):
        return onnxtrain.append(examples.mlp((4, 8, 5)), onnxtrain.layers.Cosine(3))
    return examples.mlp((4, 8, 1 if LOSSES[name].predicts == "binary" else 3))


def test_the_list_of_losses_without_names_is_needed():
    assert set(WITHOUT_NAMES) <= set(LOSSES)
    assert {"binary_cross_entropy", "binary_focal", "triplet", "info_nce", "arcface", "multiple_negatives"} <= {*NAMED}


@pytest.mark.parametrize("name", [name for name in NAMED if name not in ("multiple_negatives", "distillation")])
def test_every_loss_with_classes_or_pairs_takes_names(name):
    binary = LOSSES[name].predicts == "binary"
    texts, numbers = (ANSWERS, (ANSWERS == "yes").astype(np.int64)) if binary else (KINDS, NUMBERS)
    first, second = (onnxtrain.Trainer(model_for(name), loss=name) for _ in range(2))
    for form in (texts, texts.tolist(), texts[:, None]):
        first.fit(X, form, batch_size=12, shuffle=False, progress=False)
        second.fit(X, numbers, batch_size=12, shuffle=False, progress=False)
    np.testing.assert_array_equal(first.get_weights(flat=True), second.get_weights(flat=True))
    expected = second.evaluate(X, numbers)
    assert first.evaluate(X, texts) == expected
    assert first.train_step(X, texts) == second.train_step(X, numbers)
    if LOSSES[name].equal_labels:
        assert first.labels is None
        first.evaluate(X, np.char.add("new ", texts))  # other people, the same loss
    else:
        assert first.labels == (("no", "yes") if binary else ("bird", "cat", "dog"))
        assert set(first.predict(X, labels=True)) <= {*first.labels}


def test_the_order_of_grades_is_given():
    grades, names = ["low", "mid", "top"], np.array(["low", "mid", "top"])[NUMBERS]
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 2)), loss="ordinal")
    for call in (trainer.fit, trainer.evaluate):
        with pytest.raises(DataError, match="whose order the loss ordinal learns; set it first, trainer"):
            call(X, np.char.replace(names, "mid", "middle"))
    trainer.labels = grades
    assert trainer.evaluate(X, names) == onnxtrain.Trainer(trainer.model(), loss="ordinal").evaluate(X, NUMBERS)


def test_pairs_of_texts_may_be_named():
    """A document of another example with the same label is left out of its negatives."""
    x = RNG.normal(size=(6, 2, 4)).astype(np.float32)
    found = [
        onnxtrain.Trainer(examples.mlp((4, 3)), loss="multiple_negatives").train_step(x, labels)
        for labels in (np.array(["a", "b", "a", "c", "b", "d"]), np.array([0, 1, 0, 2, 1, 3]))
    ]
    assert found[0] == found[1]


def test_the_names_of_a_binary_model_stay_with_it(tmp_path):
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 1)), loss="bce")
    trainer.fit(X, ANSWERS, validation=(X, ANSWERS), metrics="accuracy,f1", progress=False)
    trainer.save(tmp_path / "tuned.onnx")
    assert json.loads((tmp_path / "tuned.labels.json").read_text()) == ["no", "yes"]
    again = onnxtrain.Trainer(tmp_path / "tuned.onnx", loss="bce")
    np.testing.assert_array_equal(again.predict(X, labels=True), trainer.predict(X, labels=True))
    expected = trainer.evaluate(X, ANSWERS, metrics="accuracy,confusion_matrix")
    found = onnxtrain.evaluate(tmp_path / "tuned.onnx", (X, ANSWERS), loss="bce", metrics="accuracy,confusion_matrix")
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize(
    ("width", "targets", "message"),
    [
        (
            1,
            KINDS,
            r"are the labels 'bird', 'cat', 'dog', but the loss binary_cross_entropy asks one yes-or-no question",
        ),
        (3, ANSWERS, r"labels 'no', 'yes', but the loss binary_cross_entropy asks 3 yes-or-no questions per example"),
        (1, np.full(24, "yes"), "all targets have the same label, 'yes'"),
    ],
)
def test_names_that_a_binary_loss_cannot_tell_apart(width, targets, message):
    with pytest.raises(DataError, match=message):
        onnxtrain.Trainer(examples.mlp((4, 8, width)), loss="bce").fit(X, targets)


HEADS = {"species": "softmax_cross_entropy", "price": "mse", "risk": "bce"}
TABLE = {
    **{f"f{index}": X[:, index] for index in range(4)},
    "species": KINDS,
    "price": X[:, 1],
    "risk": np.where(X[:, 2] > 0, "low", "high"),
}


def heads_as(form, folder):
    if form == "arrays":
        return {"x": X, **{name: TABLE[name] for name in HEADS}}
    if form == "frame":
        return Frame(TABLE)
    if form == "hugging face":
        return pytest.importorskip("datasets").Dataset.from_dict(TABLE)
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(TABLE), folder / "d.parquet")
        return folder / "d.parquet"
    rows = zip(*TABLE.values(), strict=True)
    (folder / "d.csv").write_text("\n".join([",".join(TABLE), *(",".join(map(str, row)) for row in rows)]))
    return folder / "d.csv"


@pytest.mark.parametrize("form", ["arrays", "frame", "csv", "parquet", "hugging face"])
def test_heads_of_several_kinds_have_names_of_their_own(form, tmp_path):
    trainer = onnxtrain.Trainer(linear(species=3, price=1, risk=1), loss=HEADS)
    data = heads_as(form, tmp_path)
    metrics = {"species": "accuracy", "risk": "accuracy", "price": "mae"}
    trainer.fit(data, validation=data, metrics=metrics, batch_size=12, progress=False)
    assert trainer.labels == {"species": ("bird", "cat", "dog"), "risk": ("high", "low")}
    found = trainer.predict(X, labels=True)
    assert {*found["species"]} <= {"bird", "cat", "dog"}
    assert {*found["risk"]} <= {"high", "low"}
    assert found["price"].dtype == np.float32
    right = trainer.evaluate(data, metrics=metrics)
    assert right["species_accuracy"] == np.mean(found["species"] == KINDS)
    assert right["risk_accuracy"] == np.mean(found["risk"] == TABLE["risk"])
    trainer.save(tmp_path / "tuned.onnx")
    again = onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=HEADS)
    assert again.labels == trainer.labels
    assert again.train_step(X, {name: TABLE[name] for name in HEADS}) > 0
    alone = onnxtrain.Trainer(tmp_path / "tuned.onnx", loss="bce", output="risk")
    assert alone.labels == ("high", "low")


def test_labels_of_several_outputs_are_set_by_output():
    trainer = onnxtrain.Trainer(linear(species=3, risk=1), loss={"species": "softmax_cross_entropy", "risk": "bce"})
    with pytest.raises(OptionError, match="but 2 outputs have losses; give a mapping with species, risk"):
        trainer.labels = ["a", "b"]
    trainer.labels = {"species": ["dog", "cat", "bird"], "risk": ["low", "high"]}
    assert trainer.train_step(X, {"species": KINDS, "risk": TABLE["risk"]}) > 0
    assert trainer.labels["species"] == ("dog", "cat", "bird")
    with pytest.raises(OptionError, match="but 1 outputs have losses; give a list"):
        onnxtrain.Trainer(examples.mlp((4, 3)), loss="softmax_cross_entropy").labels = {"logits": ["a", "b", "c"]}
