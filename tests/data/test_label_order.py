"""The order of labels stays with a model: a subset of labels keeps its indices, and a hint reports ambiguity."""

from __future__ import annotations

import io
import tarfile
import warnings

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import examples, layers
from onnxtrain.errors import DataError, TrainingHint
from sentences import raises_sentence

LOSS = "cross_entropy"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 4)).astype(np.float32)
LABELS = X[:, :3].argmax(1)
NAMES = np.array(["cow", "elk", "fox"])
QUIET = {"epochs": 12, "batch_size": 8, "progress": False}


def table_trainer(classes):
    return onnxtrain.Trainer(examples.mlp((4, 8, classes)), loss=LOSS, optimizer="adam(lr=0.05)")


def picture_trainer(classes):
    flat = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (float[N, 1, 2, 2] image) => (float[N, 4] y) { y = Flatten(image) }'
    )
    return onnxtrain.Trainer(onnxtrain.append(flat, layers.Linear(classes)), loss=LOSS, optimizer="adam(lr=0.05)")


def pixels(index):
    """Return an image of the first four values of an example."""
    image = pytest.importorskip("PIL.Image")
    shades = np.clip(128 + 50 * X[index], 0, 255).astype(np.uint8)
    content = io.BytesIO()
    image.fromarray(shades.reshape(2, 2)).save(content, "png")
    return content.getvalue()


def csv(folder, rows):
    lines = [f"{','.join(map(str, X[row]))},{NAMES[LABELS[row]]}" for row in rows]
    (folder / "d.csv").write_text("\n".join(["a,b,c,d,kind", *lines]))
    return {"data": folder / "d.csv", "target": "kind"}


def parquet(folder, rows):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    kinds = arrow.array(NAMES[LABELS[rows]]).dictionary_encode()
    made = arrow.table({**dict(zip("abcd", X[rows].T, strict=True)), "kind": kinds})
    pyarrow.parquet.write_table(made, folder / "d.parquet")
    return {"data": folder / "d.parquet", "target": "kind"}


def class_labels(folder, rows):
    datasets = pytest.importorskip("datasets")
    names = list(NAMES[np.unique(LABELS[rows])])
    features = datasets.Features(
        {"input": datasets.Sequence(datasets.Value("float32")), "kind": datasets.ClassLabel(names=names)}
    )
    indices = [names.index(NAMES[label]) for label in LABELS[rows]]
    return {"data": datasets.Dataset.from_dict({"input": list(X[rows]), "kind": indices}, features), "target": "kind"}


def pictures(folder, rows):
    for row in rows:
        (folder / "p" / NAMES[LABELS[row]]).mkdir(parents=True, exist_ok=True)
        (folder / "p" / NAMES[LABELS[row]] / f"{row}.png").write_bytes(pixels(row))
    return {"data": folder / "p"}


def tar(folder, rows):
    with tarfile.open(folder / "d.tar", "w") as archive:
        for row in rows:
            for name, content in ((f"{row}.png", pixels(row)), (f"{row}.cls", NAMES[LABELS[row]].encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return {"data": folder / "d.tar"}


FORMS = {
    "arrays": (table_trainer, lambda folder, rows: {"data": (X[rows], NAMES[LABELS[rows]])}),
    "csv": (table_trainer, csv),
    "parquet": (table_trainer, parquet),
    "class labels": (table_trainer, class_labels),
    "pictures": (picture_trainer, pictures),
    "tar": (picture_trainer, tar),
}
ALL = np.arange(30)
SOME = np.flatnonzero(LABELS != 0)


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def folders(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in names]


def test_data_with_fewer_labels_are_read_in_the_order_that_was_kept(form, tmp_path):
    make, write = form
    whole, part = folders(tmp_path, "whole", "part")
    trainer = make(3)
    trainer.fit(**write(whole, ALL), checkpoint=tmp_path / "kept", **QUIET)
    some = write(part, SOME)
    expected = trainer.evaluate(**some, metrics="accuracy")
    trainer.save(tmp_path / "tuned.onnx")
    fresh = onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS)
    assert fresh.evaluate(**some, metrics="accuracy") == expected
    assert onnxtrain.evaluate(tmp_path / "tuned.onnx", **some, loss=LOSS, metrics="accuracy") == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS).fit(**some, progress=False)  # of known labels no hint
    restored = make(3)
    restored.load_checkpoint(tmp_path / "kept")
    assert restored.evaluate(**some, metrics="accuracy") == expected


def test_an_unknown_order_is_not_guessed(form, tmp_path):
    make, write = form
    (part,) = folders(tmp_path, "part")
    some, trainer = write(part, SOME), make(3)
    message = "targets are the labels 'elk', 'fox', but the model has 3 classes, and their classes are unknown"
    with pytest.raises(DataError, match=message):
        trainer.evaluate(**some)
    assert trainer.labels is None
    onnx.save(trainer.model(), tmp_path / "bare.onnx")
    with pytest.raises(DataError, match=message):
        onnxtrain.evaluate(tmp_path / "bare.onnx", **some, loss=LOSS)


def test_a_head_of_more_classes_trains_with_a_hint(form, tmp_path):
    make, write = form
    whole, part = folders(tmp_path, "whole", "part")
    trainer = make(10)
    message = r"has 10 classes, but the targets have 3 labels \('cow', 'elk', 'fox'\)"
    with pytest.warns(TrainingHint, match=message) as caught:
        trainer.fit(**write(whole, ALL), **QUIET | {"epochs": 1})
    assert len(caught) == 1
    assert trainer.hints[-1] == str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(**write(part, SOME), **QUIET | {"epochs": 1})  # it was said
        named = make(10)
        named.labels = [*"abcdefg", "cow", "elk", "fox"]
        named.fit(**write(whole, ALL), **QUIET | {"epochs": 1})


def test_labels_that_a_model_does_not_know_are_refused_by_name(form, tmp_path):
    make, write = form
    whole, part = folders(tmp_path, "whole", "part")
    trainer = make(2)
    trainer.fit(**write(part, SOME), **QUIET | {"epochs": 1})
    trainer.save(tmp_path / "tuned.onnx")
    for each in (trainer, onnxtrain.Trainer(tmp_path / "tuned.onnx", loss=LOSS)):
        for call in (each.evaluate, each.fit):
            with raises_sentence("unknown_label", what="targets", got="cow", wanted=["elk", "fox"]):
                call(**write(whole, ALL))


def test_a_training_continues_with_data_of_fewer_labels(form, tmp_path):
    """By the order that the checkpoint has, where the data may change."""
    make, write = form
    whole, part = folders(tmp_path, "whole", "part")
    make(3).fit(**write(whole, ALL), checkpoint=tmp_path / "kept", **QUIET | {"epochs": 1})
    again, some = make(3), write(part, SOME)
    again.fit(**some, checkpoint=tmp_path / "kept", resume=True, change="data", **QUIET | {"epochs": 2})
    assert again.labels == tuple(NAMES)


def test_class_labels_without_an_example_count():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"input": datasets.Sequence(datasets.Value("float32")), "kind": datasets.ClassLabel(names=[*NAMES])}
    )
    data = datasets.Dataset.from_dict({"input": list(X[SOME]), "kind": LABELS[SOME]}, features)
    trainer = table_trainer(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(data, target="kind", progress=False)
    assert trainer.labels == ("cow", "elk", "fox")
    two = table_trainer(2)
    two.fit(data, target="kind", progress=False)
    assert two.labels == ("elk", "fox")
    unknown = datasets.Dataset.from_dict({"input": list(X[:2]), "kind": [-1, 1]}, features)
    with raises_sentence("label_without_name", what="kind", got=-1, wanted=3):
        trainer.evaluate(unknown, target="kind")
