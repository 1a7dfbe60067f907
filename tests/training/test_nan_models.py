"""NaN in training: inputs are refused, and NaN weights are not kept."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain import Lora, examples
from onnxtrain.data.conversion import all_finite
from onnxtrain.errors import NumericalError
from onnxtrain.training.callbacks import EarlyStopping, SaveBest
from sentences import raises_sentence

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
LABELS = np.arange(40) % 3
ENORMOUS = "sgd(lr=1e38)"


def trainer(**options):
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), **{"loss": "cross_entropy", **options})


class Breaks:
    """Set weights to NaN at the end of an epoch, before later callbacks read them."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_end(self, state):
        if state.epoch >= self.epoch:
            state.weights["layer2.bias"] = np.full(3, np.nan, np.float32)


def test_a_training_that_ends_in_nan_is_not_saved(tmp_path):
    subject = trainer(optimizer=ENORMOUS)
    with pytest.raises(NumericalError, match="The loss became nan at step"):
        subject.fit(X, LABELS, epochs=5, progress=False)
    for write in (lambda: subject.save(tmp_path / "m.onnx"), subject.model):
        with raises_sentence("weight_not_finite", name="'layer1.weight'", value="nan", count=32, size=32):
            write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m.onnx", "m.onnx_adapter", "folder"])
def test_adapters_and_averages_that_are_nan_are_not_saved(tmp_path, name):
    subject = trainer(lora=Lora(rank=2, targets="layer1"), train="layer2.bias")
    subject.set_weights({"layer2.bias": np.full(3, np.inf, np.float32)})
    with raises_sentence("weight_not_finite", name="'layer2.bias'", value="inf", count=3, size=3):
        subject.save(tmp_path / name)
    averaged = trainer(ema=0.5, optimizer=ENORMOUS)
    with pytest.raises(NumericalError):
        averaged.fit(X, LABELS, epochs=5, progress=False)
    averaged.set_weights({key: np.zeros_like(value) for key, value in averaged.get_weights().items()})
    averaged.save(tmp_path / "live.onnx")
    with pytest.raises(NumericalError, match="holds nan"):
        averaged.save(tmp_path / "averaged.onnx", ema=True)


def test_infinite_values_of_the_file_are_saved_unchanged(tmp_path):
    model = examples.mlp((4, 8, 3))
    (bias,) = [tensor for tensor in model.graph.initializer if tensor.name == "layer2.bias"]
    bias.ClearField("float_data")
    bias.raw_data = np.array([0, -np.inf, 0], np.float32).tobytes()
    subject = onnxtrain.Trainer(model, loss="cross_entropy", freeze="layer1.*")
    subject.save(tmp_path / "m.onnx")
    np.testing.assert_array_equal(subject.get_weights()["layer2.bias"], [0, -np.inf, 0])


@pytest.mark.parametrize("monitor", ["loss", "val_accuracy", "val_hits", "val_loss"])
def test_save_best_and_early_stopping_never_keep_weights_that_are_nan(tmp_path, monitor):
    def hits(y_true, y_pred):
        return 1.0

    best, stop = SaveBest(tmp_path / "best.onnx", monitor), EarlyStopping(monitor, patience=9)
    subject = trainer(optimizer="sgd(lr=0.1)")
    given = {"validation": (X, LABELS), "metrics": ["accuracy", hits], "progress": False, "epochs": 1}
    subject.fit(X, LABELS, callbacks=[Breaks(1), best, stop], **given)
    assert (best.best_epoch, stop.best_epoch, stop.best_weights) == (None, None, {})
    assert list(tmp_path.iterdir()) == []


def test_no_checkpoint_holds_weights_that_are_nan(tmp_path):
    subject = trainer()
    with pytest.raises(NumericalError, match=r"The weight 'layer2\.bias' holds nan"):
        subject.fit(X, LABELS, callbacks=[Breaks(3)], epochs=5, checkpoint=tmp_path, progress=False)
    again = trainer()
    again.load_checkpoint(tmp_path)
    assert all(map(all_finite, again.get_weights().values()))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_refuses_inputs_that_are_nan_as_fit_does(value):
    wrong = X.copy()
    wrong[3, 1] = value
    subject = trainer()
    before = subject.get_weights(flat=True)
    with raises_sentence("holds_at_example", value=str(value), example=3):
        subject.train_step(wrong, LABELS)
    with raises_sentence("holds_at_example", value=str(value), example=3):
        subject.fit(wrong, LABELS, progress=False)
    np.testing.assert_array_equal(subject.get_weights(flat=True), before)


def test_all_finite_looks_at_every_type():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int64, bool):
        array = np.ones((3, 5), dtype)
        assert all_finite(array)
        if np.dtype(dtype).kind not in "ib":
            for value in (np.nan, np.inf, -np.inf):
                array[1, 2] = value
                assert not all_finite(array)
            array[1] = [np.inf, -np.inf, 1, 1, 1]
            assert not all_finite(array)
    assert all_finite(np.full(10, 1e308))
