"""Old public names work for one more version, and name their replacement."""

import json
import operator
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import callbacks
from onnxtrain.cli import main
from onnxtrain.config import choose_distributed, choose_precision
from onnxtrain.errors import ArgumentError, OptionError
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


OLD_OPTIONS = {
    "state_dtype": ("8bit", "precision", onnxtrain.Precision(states="8bit")),
    "compute": ("float32", "precision", onnxtrain.Precision(compute="float32")),
    "master_weights": (False, "precision", onnxtrain.Precision(master_weights=False)),
    "options": (onnxtrain.RuntimeOptions(threads=1), "runtime", onnxtrain.RuntimeOptions(threads=1)),
    "free_batch": (True, "dynamic_batch", True),
    "shard_states": (True, "distributed", onnxtrain.Distributed(shard_states=True)),
}


@pytest.mark.parametrize("old", OLD_OPTIONS)
def test_an_old_option_of_a_trainer_is_the_new_one(old):
    value, new, expected = OLD_OPTIONS[old]
    model = onnxtrain.examples.mlp((4, 8, 3))
    with pytest.warns(DeprecationWarning, match=f"The argument '{old}' of Trainer is now .*{new}") as found:
        made = onnxtrain.Trainer(model, loss="mse", **{old: value})
    assert getattr(made.config, new) == expected
    assert found[0].filename == __file__
    with pytest.raises(ArgumentError, match=f"Trainer has both '{new}' and '{old}', its old name"):
        onnxtrain.Trainer(model, loss="mse", **{old: value, new: None})


def test_old_options_of_processes():
    several = onnxtrain.distributed.Single()
    with pytest.warns(DeprecationWarning, match="of Trainer is now distributed=") as found:
        made = onnxtrain.Trainer(
            onnxtrain.examples.mlp((4, 3)), loss="mse", parallel=several, shard_states=True, shard_gradients=True
        )
    assert len(found) == 3
    assert made.config.distributed == onnxtrain.Distributed(several, shard_states=True, shard_gradients=True)


def test_old_options_of_a_training_model_and_of_pruning(data):
    model = onnxtrain.examples.mlp((4, 8, 3))
    with pytest.warns(DeprecationWarning, match="The argument 'compute' of training_model"):
        onnxtrain.training_model(model, loss="cross_entropy", optimizer="sgd", compute="float32")
    with pytest.warns(DeprecationWarning, match="The argument 'options'") as found:
        onnxtrain.prune(
            model,
            data,
            loss="cross_entropy",
            sparsity=0.5,
            epochs=1,
            fine_tune_epochs=0,
            options=onnxtrain.RuntimeOptions(threads=1),
        )
    assert found[0].filename == __file__


def test_the_old_name_of_a_dynamic_batch():
    model = onnxtrain.examples.mlp((4, 8, 3))
    with pytest.warns(DeprecationWarning, match="onnxtrain.free_batch is now onnxtrain.dynamic_batch"):
        assert onnxtrain.free_batch(model) == onnxtrain.dynamic_batch(model)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, onnxtrain.Precision()),
        ("bfloat16", onnxtrain.Precision("bfloat16")),
        ("states=int8, master_weights=false", onnxtrain.Precision(states="8bit", master_weights=False)),
        ("compute=bfloat16", onnxtrain.Precision("bfloat16")),
    ],
)
def test_number_formats_as_text(given, expected):
    assert choose_precision(given) == expected


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: choose_precision(16), "precision is 16; it needs onnxtrain.Precision"),
        (lambda: choose_precision("bf16, 8bit"), "precision is 'bf16, 8bit'"),
        (lambda: choose_precision("16-mixed"), "precision is '16-mixed'|compute is '16-mixed'"),
        (lambda: choose_precision("state=8bit"), "Precision has no argument 'state'; the nearest is 'states'"),
        (lambda: choose_distributed(2), "distributed is 2; it needs a communicator"),
        (lambda: choose_distributed("nccl"), "distributed is 'nccl'; as text it is 'mpi'"),
        (lambda: onnxtrain.Distributed(shard_gradients=True), "give shard_states=True, too"),
    ],
)
def test_formats_and_processes_that_are_refused(call, sentence):
    with pytest.raises(OptionError, match=sentence):
        call()


FIT = ["fit", "m.onnx", "--data", "d.npz", "--loss", "cross_entropy", "--epochs", "1", "--output", "tuned.onnx"]
OLD_FLAGS = {
    "--compute": ("float32", "--precision 'compute=float32'"),
    "--state-dtype": ("8bit", "--precision 'states=8bit'"),
    "--no-master-weights": (None, "--precision 'master_weights=False'"),
    "--free-batch": (None, "--dynamic-batch"),
}


@pytest.mark.parametrize("old", OLD_FLAGS)
def test_an_old_flag_is_the_new_one_and_says_so(old, data, tmp_path, monkeypatch, capsys):
    value, new = OLD_FLAGS[old]
    monkeypatch.chdir(tmp_path)
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), "m.onnx")
    np.savez("d.npz", input=data[0], target=data[1])
    assert main([*FIT, old, *([] if value is None else [value])]) == 0
    warning = f"warning: {old} is now {new}; the old name goes with the next version.\n"
    assert capsys.readouterr().err == warning
    option, given = new.removeprefix("--").partition(" ")[::2]
    assert main([*FIT[:-1], "again.onnx", f"--{option}", *([given.strip("'")] if given else [])]) == 0
    assert capsys.readouterr().err == ""
    assert (tmp_path / "tuned.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()


def test_an_old_flag_beside_the_new_one_is_refused(capsys):
    assert main([*FIT, "--state-dtype", "8bit", "--precision", "bfloat16"]) == 2
    assert "--state-dtype is an old name for a part of --precision; leave it out." in capsys.readouterr().err


@pytest.mark.parametrize("name", onnxtrain.distributed.__all__)
def test_the_old_module_of_processes(name):
    if name not in onnxtrain.parallel.__all__:  # newer than the module
        with pytest.raises(AttributeError, match=r"it is now onnxtrain\.distributed"):
            getattr(onnxtrain.parallel, name)
        return
    with pytest.warns(DeprecationWarning, match=f"onnxtrain.parallel.{name} is now onnxtrain.distributed") as found:
        assert getattr(onnxtrain.parallel, name) is getattr(onnxtrain.distributed, name)
    assert found[0].filename == __file__


OLD_ATTRIBUTES = {
    "states": "_states",
    "table": "_objective.table",
    "statistics": "_objective.statistics",
    "sparsified": "_sparsified",
    "optimizer": "config.optimizer",
    "accumulate": "config.accumulate",
    "seed": "config.seed",
    "options": "config.runtime",
    "check_weights": "_check_weights",
    "open": "_open",
}


@pytest.mark.parametrize("old", OLD_ATTRIBUTES)
def test_an_old_attribute_of_a_trainer_still_works(old):
    made = trainer()
    with pytest.warns(DeprecationWarning, match=f"Trainer.{old} is now") as found:
        value = getattr(made, old)
    assert value == operator.attrgetter(OLD_ATTRIBUTES[old])(made)
    assert found[0].filename == __file__


SHOWN_ABOVE = {"validation_loss", "validation_accuracy", "minimum_delta", "minimum_rate", "parallel"}
SHOWN_ABOVE |= {"onnxtrain.free_batch", "trainer.trained", "trainer.weights", "onnxtrain.parallel"}
SHOWN_ABOVE |= {"Communicator.behind", "abandon"}  # in tests/distributed/test_overlap.py
SHOWN_ABOVE |= {"scope", "--scope"}  # in tests/pruning/test_sparse_forms.py


def test_every_old_name_of_the_page_is_shown_to_work():
    page = (Path(__file__).parents[1] / "docs" / "renamed_modules.md").read_text().partition("## Public names")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")][2:]
    names = set()
    for code in (part for row in rows for part in re.findall("`([^`]+)`", row)):
        names |= set(re.findall(r"(\w+)=", code)) or {code}
    names -= {"history", "monitor", "save_best", "metrics.csv"}  # where the names of metrics stand
    attributes = {f"trainer.{name}" for name in OLD_ATTRIBUTES}
    assert names == SHOWN_ABOVE | OLD_OPTIONS.keys() | OLD_FLAGS.keys() | attributes | {"shard_gradients"}


def test_old_ways_to_the_weights():
    made = trainer()
    with pytest.warns(DeprecationWarning, match=r"Trainer.trained is now parameters \(live views\)"):
        assert list(made.trained) == list(made.parameters)
    with pytest.warns(DeprecationWarning, match=r"Trainer.weights is now found by onnxtrain.inspect"):
        assert made.weights == made._objective.matmul_weights


def test_a_state_is_copied_and_loaded(data):
    one, other = trainer(), trainer()
    one.train_step(*data)
    state = one.state_dict()
    assert {"layer1.weight", "layer1.weight/V", "T"} <= set(state)
    kept = {name: array.tobytes() for name, array in state.items()}
    one.train_step(*data)
    assert {name: array.tobytes() for name, array in state.items()} == kept
    other.load_state_dict(state)
    other.train_step(*data)
    assert {n: a.tobytes() for n, a in other.state_dict().items()} == {
        n: a.tobytes() for n, a in one.state_dict().items()
    }
    del state["T"]
    with pytest.raises(OptionError, match=r"The state lacks 1 of .* values, such as 'T'; give all, or strict=False"):
        other.load_state_dict(state)
    other.load_state_dict(state, strict=False)
    with pytest.raises(OptionError, match="is not a parameter"):
        other.load_state_dict({"nothing": np.zeros(1)}, strict=False)


def test_sessions_take_their_options_as_runtime(data):
    options = onnxtrain.RuntimeOptions(threads=1)
    model, made = onnxtrain.examples.mlp((4, 8, 3)), trainer()
    calls = {
        "TrainingSession": lambda **given: onnxtrain.TrainingSession(made.training_model(), **given),
        "evaluate": lambda **given: onnxtrain.evaluate(model, data, loss="cross_entropy", **given),
        "predict": lambda **given: onnxtrain.predict(model, data[0], **given),
    }
    for label, call in calls.items():
        call(runtime=options)
        with pytest.warns(DeprecationWarning, match=f"The argument 'options' of {label} is now 'runtime'") as found:
            call(options=options)
        assert found[0].filename == __file__
