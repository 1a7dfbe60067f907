"""Loggers write the values of a history, read back with their packages where installed."""

import json
import math
import struct
import subprocess
import sys

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors import OptionError
from onnxtrain.training.callbacks import (
    Callback,
    JsonLinesLogger,
    MLflowLogger,
    TensorBoardLogger,
    TrainingState,
    WandbLogger,
)
from sentences import raises_sentence

X, Y = np.eye(4, dtype=np.float32)[np.arange(12) % 4], np.arange(12) % 3
STEPS = 3  # in an epoch


class Breaks(Callback):
    def on_epoch_end(self, state):
        raise RuntimeError("broken")


def fit(*callbacks, epochs=2, **options):
    trainer = onnxtrain.Trainer(examples.mlp((4, 3)), loss="cross_entropy", optimizer="adamw(lr=0.25)")
    validation = {"validation": (X, Y), "metrics": "accuracy"}
    return trainer.fit(X, Y, batch_size=5, epochs=epochs, callbacks=callbacks, progress=False, **validation, **options)


def expected(history, name):
    return pytest.approx(dict(zip(history.column("step"), history.column(name), strict=True)), rel=1e-6)


def test_json_lines_are_complete_after_every_epoch(tmp_path):
    path = tmp_path / "log.jsonl"

    seen = []

    class Reads(Callback):
        def on_epoch_end(self, state):
            seen.append(len(path.read_text().splitlines()))

    history = fit(JsonLinesLogger(path), Reads())
    assert [json.loads(line) for line in path.read_text().splitlines()] == history.rows
    assert seen == [1, 2]


def test_json_lines_hold_no_nan_and_continue_after_a_restart(tmp_path):
    first, state = JsonLinesLogger(tmp_path / "log.jsonl"), TrainingState(epoch=1, loss=math.nan)
    first.on_epoch_end(state)
    second = JsonLinesLogger(tmp_path / "log.jsonl")
    second.resume(first.record())
    second.on_epoch_end(TrainingState(epoch=2, loss=0.5))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["loss"]) for line in lines] == [(1, None), (2, 0.5)]
    with pytest.raises(OptionError, match=r"log\.jsonl' cannot be written"):
        JsonLinesLogger(tmp_path / "missing" / "log.jsonl").on_fit_begin(state)


@pytest.mark.parametrize(
    ("logger", "package"),
    [(TensorBoardLogger, "tensorboard"), (MLflowLogger, "mlflow"), (WandbLogger, "wandb")],
)
def test_a_package_that_is_missing_is_named(logger, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else pytest.fail(name))
    sentence = rf"{logger.__name__} needs the package {package}; install it: pip install {package}\."
    with pytest.raises(OptionError, match=sentence):
        logger("x")


def test_no_package_is_imported_before_it_is_used():
    program = (
        "import sys, onnxtrain.training.callbacks; print({'tensorboard', 'mlflow', 'wandb', 'rich'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def test_callbacks_are_closed_in_any_case():
    closed = []

    class Closing(Callback):
        def close(self):
            closed.append(self)

    class Foreign:
        def on_fit_end(self, state):
            pass

        def close(self):
            pytest.fail("nobody asked for it")

    subject = Closing()
    fit(subject, Foreign(), epochs=1)
    with pytest.raises(RuntimeError, match="broken"):
        fit(subject, Breaks())
    assert closed == [subject, subject]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs onnxtrain[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = fit(TensorBoardLogger(tmp_path, every=2), epochs=3)
    found = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
    assert scalars["training/loss"] == expected(history, "loss")
    assert scalars["training/learning_rate"] == expected(history, "learning_rate")
    assert scalars["validation/loss"] == expected(history, "val_loss")
    assert scalars["validation/accuracy"] == expected(history, "val_accuracy")
    assert list(scalars["training/epoch"].values()) == [1, 2, 3]
    assert list(scalars["step/loss"]) == [2, 4, 6, 8]


def test_tensorboard_refuses_invalid_arguments(tmp_path):
    pytest.importorskip("tensorboard", reason="needs onnxtrain[tensorboard]")
    with raises_sentence("logger_every", what="every", got=0):
        TensorBoardLogger(tmp_path, every=0)
    (tmp_path / "file").touch()
    with raises_sentence("logger_cannot_write", what=tmp_path / "file/below"):
        fit(TensorBoardLogger(tmp_path / "file" / "below"))


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs onnxtrain[mlflow]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    yield mlflow
    mlflow.end_run()


def metric(mlflow, run_id, name):
    return {m.step: m.value for m in mlflow.MlflowClient().get_metric_history(run_id, name)}


def test_mlflow(mlflow):
    logger = MLflowLogger("tuning", run_name="first")
    history = fit(logger)
    run = mlflow.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert mlflow.get_experiment(run.info.experiment_id).name == "tuning"
    assert run.data.params["optimizer"] == "AdamW"
    assert float(run.data.params["learning_rate"]) == 0.25
    assert run.data.params["batch_size"] == "5"
    assert metric(mlflow, logger.run_id, "training/loss") == expected(history, "loss")
    assert metric(mlflow, logger.run_id, "validation/accuracy") == expected(history, "val_accuracy")
    assert mlflow.active_run() is None


def test_mlflow_continues_an_active_run(mlflow):
    logger = MLflowLogger()
    with mlflow.start_run() as run:
        fit(logger)
        assert mlflow.active_run().info.run_id == run.info.run_id == logger.run_id


def test_mlflow_marks_a_failed_run_and_continues_it(mlflow, tmp_path):
    logger = MLflowLogger()
    folder = tmp_path / "checkpoints"
    with pytest.raises(RuntimeError, match="broken"):
        fit(logger, Breaks(), checkpoint=folder, checkpoint_every=1)
    assert mlflow.get_run(logger.run_id).info.status == "FAILED"
    again = MLflowLogger()
    history = fit(again, checkpoint=folder, resume=True)
    assert again.run_id == logger.run_id
    assert mlflow.get_run(again.run_id).info.status == "FINISHED"
    assert metric(mlflow, again.run_id, "training/loss") == expected(history, "loss")


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs onnxtrain[wandb]")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.finish()


def logged(folder):
    """Read the values by step from the file of an offline run: protocol buffers in a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("run-*.wandb")
    data, place, whole, found = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        place += -place % 32768 if 32768 - place % 32768 < 7 else 0
        if kind in (1, 4):  # a whole record, or its last chunk
            record, whole = Record.FromString(whole), b""
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    return found


def test_wandb(wandb, tmp_path):
    with pytest.raises(OptionError, match="every of WandbLogger is 0"):
        WandbLogger(every=0)
    seen = []

    class Looks(Callback):
        def on_epoch_end(self, state):
            seen.append((wandb.run.project, wandb.run.name, wandb.run.config["optimizer"]))

    history = fit(WandbLogger("tuning", name="first", every=2), Looks())
    assert wandb.run is None
    assert seen == [("tuning", "first", "AdamW")] * 2
    found = logged(tmp_path)
    assert found["training/loss"] == expected(history, "loss")
    assert found["validation/accuracy"] == expected(history, "val_accuracy")
    assert list(found["step/loss"]) == [2, 4, 6]


def test_wandb_continues_an_open_run(wandb):
    run = wandb.init(project="mine")
    logger = WandbLogger()
    fit(logger)
    assert wandb.run is run
    assert logger.run_id == run.id
    assert logger.record() == {"run_id": run.id}
