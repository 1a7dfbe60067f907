"""Old public names work for one version more, and say the new one."""

import json

import numpy as np
import pytest

import onnxtrain
from onnxtrain import callbacks
from onnxtrain.errors import ArgumentError
from onnxtrain.renamed import MetricValues


def trainer():
    return onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="cross_entropy", optimizer="adam(lr=0.01)")


@pytest.fixture
def data():
    return np.random.default_rng(0).standard_normal((24, 4), np.float32), np.arange(24) % 3


@pytest.mark.parametrize(("old", "new"), [("minimum_delta", "min_delta")])
@pytest.mark.parametrize("callback", [callbacks.EarlyStopping, callbacks.ReduceOnPlateau])
def test_an_old_argument_is_the_new_one(callback, old, new):
    with pytest.warns(DeprecationWarning, match=f"The argument '{old}' of {callback.__name__} is now '{new}'") as found:
        made = callback(**{old: 0.25})
    assert getattr(made, new) == 0.25
    assert found[0].filename == __file__  # the line of the caller
    with pytest.warns(DeprecationWarning, match="is now min_delta"):
        assert getattr(made, old) == 0.25
    with pytest.raises(ArgumentError, match="'min_delta' twice: 'minimum_delta' is its old name"):
        callback(min_delta=0.1, minimum_delta=0.1)


def test_the_lowest_rate_has_its_old_name():
    with pytest.warns(DeprecationWarning, match="'min_lr'"):
        assert callbacks.ReduceOnPlateau(minimum_rate=0.5).min_lr == 0.5


def test_metrics_are_found_by_their_old_names(data, tmp_path):
    x, y = data
    history = trainer().fit(x, y, validation=0.25, metrics="accuracy", epochs=2, run=tmp_path / "run")
    row = history.rows[-1]
    assert {"val_loss", "val_accuracy"} <= set(row)
    with pytest.warns(DeprecationWarning, match="The metric 'validation_accuracy' is now 'val_accuracy'"):
        assert row["validation_accuracy"] == row["val_accuracy"]
    with pytest.warns(DeprecationWarning, match="'val_loss'"):
        assert history.column("validation_loss") == history.column("val_loss")
    with pytest.warns(DeprecationWarning, match="'val_loss'"):
        assert row.get("validation_loss") == row["val_loss"]
    assert "validation_loss" in row
    assert "validation_f1" not in row
    assert row.get("f1", 2.0) == 2.0
    with pytest.raises(KeyError, match="f1"):
        row["f1"]
    assert "val_loss" in (tmp_path / "run" / "metrics.csv").read_text()


def test_metric_values_are_a_dictionary():
    values = MetricValues({"loss": 1.0, "val_loss": 2.0})
    assert json.loads(json.dumps(values)) == {"loss": 1.0, "val_loss": 2.0}
    assert dict(values) == values


def test_a_metric_is_monitored_by_its_old_name(data, tmp_path):
    x, y = data
    with pytest.warns(DeprecationWarning, match="'val_loss'"):
        stopping = callbacks.EarlyStopping("validation_loss", patience=1, min_delta=10.0)
    history = trainer().fit(x, y, validation=0.25, epochs=9, callbacks=[stopping])
    assert len(history.rows) == 2
    with pytest.warns(DeprecationWarning, match="'val_accuracy'"):
        trainer().fit(x, y, validation=0.25, metrics="accuracy", checkpoint=tmp_path, save_best="validation_accuracy")
    assert (tmp_path / "best.onnx").exists()


def test_settings_of_an_earlier_version_are_the_same():
    from onnxtrain.training.checkpoints.fingerprint import differences

    old = {"early_stopping": [{"monitor": "validation_loss", "minimum_delta": 0.0, "patience": 3}]}
    new = {"early_stopping": [{"monitor": "val_loss", "min_delta": 0.0, "patience": 3}]}
    assert not differences(old, new)
    old["early_stopping"][0]["minimum_delta"] = 1.0
    assert "early_stopping" in differences(old, new)
