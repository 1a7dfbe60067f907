"""The job: methods, thresholds, rounds, masks, the report, bad input."""

from __future__ import annotations

import json
import pickle
import warnings
import xml.etree.ElementTree as Tree

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain.errors import ModelError, OptionError, TrainingHint
from onnxtrain.operators import SSGD, Adagrad, Adam, Momentum
from sentences import raises_sentence, warns_sentence

SVG = "{http://www.w3.org/2000/svg}"


def digits():
    found = load_digits()
    x, y = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


TRAIN, TEST = digits()


def model():
    return onnxtrain.examples.mlp((64, 40, 10))


def prune(**options):
    settings = {
        "loss": "softmax_cross_entropy",
        "validation": TEST,
        "epochs": 6,
        "fine_tune_epochs": 3,
        "rounds": 1,
        "optimizer": SSGD(0.05, alpha=0.9, max_scale=5.0),
        **({} if "accuracy_drop" in options else {"sparsity": 0.9}),
        **options,
    }
    return onnxtrain.prune(settings.pop("model", None) or model(), settings.pop("data", TRAIN), **settings)


def accuracy_of(path, x, y):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return float(np.mean(session.run(None, {session.get_inputs()[0].name: x})[0].argmax(axis=1) == y))


@pytest.mark.parametrize("method", ["ssgd", "magnitude", "random"])
def test_methods(method, tmp_path):
    lines = []
    result = prune(method=method, progress=lines.append, save=tmp_path / "pruned.onnx")
    assert (result.size, result.non_zeros) == (2960, 296)
    assert result.compression == pytest.approx(10)
    assert result.accuracy_before < 0.3
    assert result.accuracy_trained > 0.85
    assert result.accuracy_after > (0.4 if method == "random" else 0.8)
    assert accuracy_of(tmp_path / "pruned.onnx", *TEST) == pytest.approx(result.accuracy_after)
    written = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "pruned.onnx").graph.initializer}
    for row in result.layers:
        assert np.count_nonzero(written[row.name]) == row.non_zeros
        assert not written[row.name][~result.masks[row.name]].any()
        assert row.max_scale == (pytest.approx(5.0) if method == "ssgd" else None)
    assert np.count_nonzero(written["layer1.bias"]) > 0
    assert sum(line.startswith("training: epoch") for line in lines) == 6
    assert lines[6].startswith("cut 1 of 1: 90.00% zeros")
    assert sum(line.startswith("fine-tuning: epoch") for line in lines) == 3


def test_magnitude_beats_random():
    magnitude, random = (prune(method=method, sparsity=0.95).accuracy_after for method in ("magnitude", "random"))
    assert magnitude > random


def test_layer_scope_gives_every_tensor_its_share():
    result = prune(allocation="uniform", epochs=1, fine_tune_epochs=0)
    assert [row.non_zeros for row in result.layers] == [256, 40]


def test_rounds_cut_on_a_cubic_schedule():
    result = prune(rounds=3)
    wanted = [0.9 * (1 - (1 - part / 3) ** 3) for part in (1, 2, 3)]
    assert [point.sparsity for point in result.points] == pytest.approx(wanted, abs=1e-3)
    assert result.sparsity == pytest.approx(0.9)


def test_rounds_start_from_the_zeros_of_the_model():
    first = prune(sparsity=0.5, epochs=1, fine_tune_epochs=0)
    result = prune(model=first.model(), rounds=3)
    wanted = [0.9 - 0.4 * (1 - part / 3) ** 3 for part in (1, 2, 3)]
    assert [point.sparsity for point in result.points] == pytest.approx(wanted, abs=2e-3)


def test_the_sparsest_model_within_an_accuracy_drop():
    result = prune(accuracy_drop=0.02)
    kept = [probe for probe in result.probes if probe.accepted]
    assert all(probe.accuracy >= result.accuracy_trained - 0.02 for probe in kept)
    assert all(probe.accuracy < result.accuracy_trained - 0.02 for probe in result.probes if not probe.accepted)
    assert result.sparsity == pytest.approx(max(probe.sparsity for probe in kept), abs=1e-6)
    assert 0.3 < result.sparsity < 0.99
    assert result.accuracy_after >= result.accuracy_trained - 0.02
    at_once = max(probe.sparsity for probe in kept if not probe.fine_tuned)
    assert 1 - result.sparsity < 0.7 * (1 - at_once)  # fine-tuning makes up for more zeros than a cut alone allows
    assert "searched (zeros: accuracy with fine-tuning)" in result.text()


def test_a_trained_model_is_cut_as_it_is():
    trainer = onnxtrain.Trainer(model(), loss="softmax_cross_entropy", optimizer=Adam(0.01))
    trainer.fit(TRAIN, epochs=3)
    given = onnx.ModelProto()
    given.CopyFrom(model())
    for tensor in given.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.array(trainer.parameters[tensor.name]), tensor.name))
    result = prune(model=given, method="magnitude", epochs=0, fine_tune_epochs=0, sparsity=0.5)
    for name, mask in result.masks.items():
        np.testing.assert_array_equal(result.values[name], np.where(mask, trainer.parameters[name], 0))
    np.testing.assert_array_equal(result.values["layer1.bias"], trainer.parameters["layer1.bias"])
    assert result.accuracy_before == result.accuracy_trained


def test_fresh_weights_are_drawn_by_the_seed():
    first, again, other = (prune(fresh=True, epochs=0, fine_tune_epochs=0, seed=seed) for seed in (1, 1, 2))
    for name in first.given:
        np.testing.assert_array_equal(first.values[name], again.values[name])
        assert (first.values[name] != other.values[name]).any()
        deviation = np.std(first.values[name][first.masks[name]])
        assert deviation > np.sqrt(2 / first.given[name].shape[1])  # the largest tenth of a normal distribution


@pytest.mark.parametrize("rule", [Adam(0.01), Momentum(0.05)], ids=["adam", "momentum"])
def test_other_rules_get_promotion(rule):
    result = prune(optimizer=rule, epochs=2)
    assert "sparsity=Sparsity(" in result.optimizer
    assert result.accuracy_after > 0.6


def test_patterns_choose_tensors():
    result = prune(tensors="layer1.*", epochs=1, fine_tune_epochs=1)
    assert {row.name for row in result.layers} == {"layer1.weight", "layer1.bias"}
    assert np.count_nonzero(result.values["layer2.weight"]) == 400


def test_a_model_without_classes_is_measured_by_its_loss():
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    y = x[:, :2] * 2
    result = prune(
        model=onnxtrain.examples.mlp((4, 16, 2)),
        data=(x, y),
        validation=0.2,
        loss="mean_squared_error",
        sparsity=0.5,
        epochs=10,
        optimizer=SSGD(0.01, alpha=0.9),
    )
    assert result.metric == "loss"
    assert result.accuracy_after < result.accuracy_before
    assert "loss on validation data" in result.text()
    with raises_sentence("accuracy_drop_needs_classifier"):
        prune(model=onnxtrain.examples.mlp((4, 16, 2)), data=(x, y), loss="mean_squared_error", accuracy_drop=0.1)


def test_storage(tmp_path):
    result = prune(epochs=1, fine_tune_epochs=0, sparsity=0.95)
    paths = {storage: tmp_path / f"{storage}.onnx" for storage in ("dense", "sparse")}
    for storage, path in paths.items():
        result.save(path, storage=storage)
        assert path.stat().st_size == getattr(result.sizes, storage)
    assert result.sizes.sparse < 0.3 * result.sizes.dense
    assert result.sizes.dense_gzip < result.sizes.dense
    assert accuracy_of(paths["dense"], *TEST) == accuracy_of(paths["sparse"], *TEST) == result.accuracy_after
    assert len(result.model(storage="sparse").graph.sparse_initializer) == 2
    assert [row.sparsity > 0.5 for row in onnxtrain.inspect(paths["sparse"]).initializers if len(row.shape) == 2] == [
        True,
        True,
    ]


def test_a_sparse_file_is_trained_and_pruned_again(tmp_path):
    prune(epochs=1, fine_tune_epochs=0, storage="sparse", save=tmp_path / "sparse.onnx")
    trainer = onnxtrain.Trainer(tmp_path / "sparse.onnx", loss="softmax_cross_entropy")
    trainer.set_masks({name: array != 0 for name, array in trainer.parameters.items() if array.ndim == 2})
    trainer.fit(TRAIN, epochs=1)
    trainer.save(tmp_path / "tuned.onnx")
    tuned = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "tuned.onnx").graph.initializer}
    assert sum(np.count_nonzero(array) for array in tuned.values() if array.ndim == 2) <= 296
    assert accuracy_of(tmp_path / "tuned.onnx", *TEST) == trainer.evaluate(TEST, metrics=["accuracy"])["accuracy"]
    again = prune(model=tmp_path / "sparse.onnx", sparsity=0.95, epochs=0, fine_tune_epochs=1)
    assert again.non_zeros == 148
    again.save(tmp_path / "again.onnx", storage="sparse")
    assert accuracy_of(tmp_path / "again.onnx", *TEST) == again.accuracy_after


def test_report(tmp_path):
    result = prune(epochs=2, rounds=2, fine_tune_epochs=1, report=tmp_path / "report")
    text = (tmp_path / "report" / "report.txt").read_text()
    for wanted in ("layer1.weight", "64", "90.00%", "compression of weights: 10.0x", "save bytes, not time", "gzip"):
        assert wanted in text
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert found["non_zeros"] == sum(row["non_zeros"] for row in found["layers"]) == 296
    assert found["accuracy_after"] == result.accuracy_after
    assert found["sizes"]["sparse"] == result.sizes.sparse
    assert [point["sparsity"] for point in found["points"]] == [point.sparsity for point in result.points]
    assert (tmp_path / "report" / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_the_charts_show_the_numbers():
    from onnxtrain.plugins.pruning.report import charts, counted

    result = prune(epochs=2, fine_tune_epochs=0)
    accuracy, layers, _ = (Tree.fromstring(chart.svg()) for chart in charts(result))
    texts = {element.text for element in accuracy.iter(f"{SVG}text")}
    assert f"result: {100 * result.accuracy_after:.4g} % at 90 % zeros" in texts
    bars = [float(bar.get("width")) for bar in layers.iter(f"{SVG}rect")]
    shares = [part / whole for whole, part in zip(bars[::2], bars[1::2], strict=True)]
    assert shares == pytest.approx([row.sparsity for row in result.layers], abs=1e-3)
    before, after, _ = counted(result)
    assert (before.sum(), after.sum()) == (result.size, result.non_zeros)


def test_an_emptied_layer_is_named():
    with warns_sentence("cut_leaves_nothing", sparsity="99.90%", tensor="'layer2.weight'") as caught:
        prune(model=lopsided(), sparsity=0.999, epochs=0, fine_tune_epochs=1, method="magnitude")
    assert len(caught) == 1


def lopsided():
    """The second layer's weights are all smaller than the first's."""
    found = model()
    for tensor in found.graph.initializer:
        if tensor.name == "layer2.weight":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1e-4), tensor.name))
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, "sparsity is 1.0; it needs a fraction of zeros of at least 0 and below 1"),
        ({"sparsity": -0.1}, "sparsity is -0.1; it needs"),
        ({"sparsity": float("nan")}, "sparsity is nan; it needs"),
        ({"sparsity": None}, "needs either sparsity= or accuracy_drop=, not both"),
        ({"sparsity": 0.5, "accuracy_drop": 0.1}, "needs either sparsity= or accuracy_drop="),
        ({"accuracy_drop": 0.1, "validation": None}, "accuracy_drop= is measured on validation data, which is missing"),
        ({"accuracy_drop": -1.0}, "accuracy_drop is -1.0; it needs a fraction"),
        ({"method": "lottery"}, "method is 'lottery'; it needs to be one of 'ssgd', 'magnitude', 'random'"),
        ({"allocation": "block"}, "allocation is 'block'; it needs to be one of 'uniform', 'global', 'flops'"),
        ({"storage": "zip"}, "storage is 'zip'; it needs to be 'dense' or 'sparse'"),
        ({"epochs": -1}, "epochs is -1; it needs a number of at least 0"),
        ({"rounds": 0}, "rounds is 0; it needs a number of at least 1"),
        ({"rounds": 9}, "rounds is 9, but there are 6 epochs to cut after"),
        ({"tensors": "conv*"}, r"tensors='conv\*' matches no parameter that is trained"),
        ({"freeze": "*.weight"}, "The model has nothing to prune: no parameter that is trained has rank 2 or more"),
        ({"optimizer": Adagrad()}, "method='ssgd' promotes sparsity, which Adagrad with these settings does not"),
        ({"optimizer": SSGD().plain()}, "method='ssgd' promotes sparsity, which SSGD with these settings"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(OptionError, match=message):
        prune(**options)


@pytest.mark.parametrize("argument", ["save", "report"])
def test_paths_are_checked_before_the_training(argument, tmp_path):
    lines = []
    with pytest.raises((ModelError, OptionError), match="there is no folder"):
        prune(**{argument: tmp_path / "nowhere" / "x"}, progress=lines.append)
    assert not lines
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="which is a file; it needs a folder"):
        prune(report=tmp_path / "file")


def pruned_mlp(fraction=0.8):
    model = onnxtrain.examples.mlp((6, 10, 3), seed=1)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).copy()
        if array.ndim == 2:
            array[np.abs(array) < np.quantile(np.abs(array), fraction)] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


def zeros_of(weights):
    return {name: np.flatnonzero(array == 0).tolist() for name, array in weights.items() if array.ndim == 2}


def test_a_pruned_model_keeps_its_zeros_where_that_is_asked_for():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(60, 6)).astype(np.float32), random.integers(0, 3, 60)
    model = pruned_mlp()
    sentence = r"72 of 90 elements of layer1.weight, layer2.weight are zero.*masks='keep' keeps them zero"
    with pytest.warns(TrainingHint, match=sentence):
        dense = onnxtrain.Trainer(model, loss="cross_entropy")
    before = zeros_of(dense.get_weights())
    assert sum(map(len, before.values())) == 72
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingHint)
        sparse = onnxtrain.Trainer(model, loss="cross_entropy", masks="keep")
        onnxtrain.Trainer(model, loss="cross_entropy", optimizer="ssgd(lr=0.1)")
        onnxtrain.Trainer(onnxtrain.examples.mlp((6, 10, 3)), loss="cross_entropy")
    for trainer in (dense, sparse):
        trainer.fit(x, y, epochs=1, progress=False)
    assert sum(map(len, zeros_of(dense.get_weights()).values())) < 60
    assert zeros_of(sparse.get_weights()) == before
    again = pickle.loads(pickle.dumps(sparse))
    again.fit(x, y, epochs=1, progress=False)
    assert zeros_of(again.get_weights()) == before
    dense.set_weights(sparse.get_weights())
    dense.set_masks("keep")
    dense.fit(x, y, epochs=1, progress=False)
    assert zeros_of(dense.get_weights()) == before


def test_few_zeros_of_a_tensor_are_kept_beside_a_pruned_one():
    """A cut across all tensors leaves few zeros in some of them."""
    model, random = pruned_mlp(), np.random.default_rng(0)
    few = next(tensor for tensor in model.graph.initializer if tensor.name == "layer2.weight")
    array = random.normal(size=(3, 10)).astype(np.float32)
    array[1, 4] = 0
    few.CopyFrom(onnx.numpy_helper.from_array(array, few.name))
    sparse = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="sgd(lr=0.5)", masks="keep")
    before = zeros_of(sparse.get_weights())
    assert len(before["layer2.weight"]) == 1
    sparse.fit(random.normal(size=(60, 6)).astype(np.float32), random.integers(0, 3, 60), epochs=2, progress=False)
    assert zeros_of(sparse.get_weights()) == before


def test_masks_that_keep_nothing_are_refused():
    model = onnxtrain.examples.mlp((6, 10, 3))
    with raises_sentence("no_zeros_to_keep", what="masks", got="keep"):
        onnxtrain.Trainer(model, loss="cross_entropy", masks="keep")
    with raises_sentence("masks_option", what="masks", got="hold", wanted="keep"):
        onnxtrain.Trainer(model, loss="cross_entropy", masks="hold")
    frozen = onnxtrain.Trainer(model, loss="cross_entropy", train="layer2.weight")
    with raises_sentence("no_zeros_to_keep", what="masks", got="keep"):
        frozen.set_masks("keep")
