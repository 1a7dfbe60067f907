"""A pruning never ends below the cut alone, says what it lost, and reads every form of data and weights."""

import importlib
import warnings
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import NumericalError, OptionError
from onnxtrain.operators import SSGD, Adam
from onnxtrain.plugins.pruning.job import PruningWarning
from onnxtrain.plugins.pruning.recipe import DEFAULT_OPTIMIZER
from sentences import warns_sentence

LOSS = {"loss": "softmax_cross_entropy"}
TARGETS = [{"structure": "hidden", "flops": 0.5}, {"sparsity": 0.8}]
ALONE = {"epochs": 0, "fine_tune_epochs": 0}
SHORT = {"epochs": 2, "fine_tune_epochs": 3}


def digits():
    found = load_digits()
    x, y = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    return (x[:1000], y[:1000]), (x[1000:1400], y[1000:1400])


TRAIN, TEST = digits()


@pytest.fixture(scope="module")
def trained():
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((64, 64, 10)), **LOSS, optimizer=Adam(3e-3))
    trainer.fit(TRAIN, epochs=8)
    return trainer.model()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rate", [0.025, 0.6])
def test_the_result_is_never_below_the_cut_alone(trained, monkeypatch, target, rate):
    """With a default rate that is far too high the trainings start again, at a third each."""
    lines = []
    rule = replace(DEFAULT_OPTIMIZER, learning_rate=rate)
    monkeypatch.setattr(
        importlib.import_module("onnxtrain.plugins.pruning.prune"), "choose_optimizer", lambda sparsity: rule
    )
    how = {**LOSS, **target, "validation": TEST}
    alone = onnxtrain.prune(trained, TRAIN, **how, **ALONE)
    result = onnxtrain.prune(trained, TRAIN, **how, epochs=5, fine_tune_epochs=10, progress=lines.append)
    assert result.accuracy_after >= max(alone.accuracy_after, result.points[-1].value)
    assert result.accuracy_after > result.accuracy_before - 0.02
    assert not result.shortfall
    again = [line for line in lines if "starts again with a learning rate of" in line]
    assert bool(again) == (rate > 0.1)
    assert not again or f"{rate / 3:.2g}" in again[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rate", [3.0, 1e30])
def test_a_fine_tuning_of_the_user_that_does_harm_is_not_saved(trained, target, rate):
    """The best point is kept, the cut included, whatever the rate; the training before it is left out, too."""
    how = {**LOSS, **target, "validation": TEST, "optimizer": SSGD(3.0), "fine_tune_optimizer": SSGD(rate)}
    alone = onnxtrain.prune(trained, TRAIN, **how, **ALONE)
    assert onnxtrain.prune(trained, TRAIN, **how, **SHORT).accuracy_after >= alone.accuracy_after


def test_a_loss_may_become_nan_with_a_rate_of_the_user(trained):
    with pytest.raises(NumericalError):
        onnxtrain.prune(trained, TRAIN, **LOSS, sparsity=0.5, **SHORT, optimizer=SSGD(1e30))


def test_a_lost_model_is_named_and_the_command_fails(trained, tmp_path, capsys):
    onnx.save(trained, tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", input=TRAIN[0], target=TRAIN[1])
    slow = SSGD(1e-9)
    with pytest.warns(PruningWarning, match="was reached before the cut"):
        result = onnxtrain.prune(
            trained, TRAIN, **LOSS, sparsity=0.97, epochs=0, fine_tune_epochs=1, fine_tune_optimizer=slow
        )
    assert "fine-tuning did not make up for it" in " ".join(result.text().split())
    line = ["prune", str(tmp_path / "model.onnx"), "--data", str(tmp_path / "train.npz"), "--loss", LOSS["loss"]]
    line += ["--epochs", "0", "--fine-tune-epochs", "1", "--lr", "1e-9", "-o", str(tmp_path / "small.onnx")]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main([*line, "--sparsity", "0.97"]) == 1
    assert (tmp_path / "small.onnx").exists()
    assert "was reached before the cut" in capsys.readouterr().err
    assert main([*line, "--sparsity", "0.1"]) == 0


@pytest.mark.parametrize("target", TARGETS)
def test_data_that_can_be_read_once(trained, target):
    """It is kept in memory, also without validation data."""
    batches = ((TRAIN[0][at : at + 50], TRAIN[1][at : at + 50]) for at in range(0, 1000, 50))
    result = onnxtrain.prune(trained, batches, **LOSS, **target, **SHORT)
    assert result.accuracy_after > 0.9


@pytest.mark.parametrize(
    "form", [{"block": (4, 1)}, {"block": (1, 4)}, {"allocation": "uniform"}, {"method": "random"}]
)
def test_kept_zeros_inside_of_blocks_count(trained, form):
    first = onnxtrain.prune(trained, TRAIN, **LOSS, sparsity=0.8, **ALONE).model()
    result = onnxtrain.prune(first, TRAIN, **LOSS, sparsity=0.9, **form, masks="keep", epochs=2, fine_tune_epochs=0)
    assert result.sparsity == pytest.approx(0.9, abs=0.005)
    zeros = {tensor.name: numpy_helper.to_array(tensor) == 0 for tensor in first.graph.initializer}
    assert all(not result.values[name][zeros[name]].any() for name in result.masks)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"structure": "heads", "flops": 0.5}, "The model has no heads"),
        ({"structure": "hidden", "flops": 0.99}, "The target cannot be reached"),
        ({"structure": "hidden", "speedup": 900.0}, "cannot be reached"),
    ],
)
def test_targets_that_cannot_be_reached_are_refused_before_the_training(trained, monkeypatch, target, message):
    monkeypatch.setattr(onnxtrain.Trainer, "fit", None)
    with pytest.raises(OptionError, match=message):
        onnxtrain.prune(trained, TRAIN, **LOSS, **target)


def in_another_form(model):
    """The model as PyTorch's exporter writes it without optimization: weights behind nodes, a bias computed."""
    text = """<ir_version: 8, opset_import: ["": 18]> f (float[n, 64] input) => (float[n, 10] output) {
        t = Transpose<perm = [1, 0]>(w1) a = MatMul(input, t) k = Identity(b1) b = Add(a, k) r = Relu(b)
        c = Cast<to = 1>(w2) u = Transpose(c) d = MatMul(r, u) e = Squeeze(b2) output = Add(d, e) }"""
    given = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    made = parser.parse_model(text)
    arrays = {"w1": given["layer1.weight"], "b1": given["layer1.bias"], "w2": given["layer2.weight"]}
    arrays["b2"] = given["layer2.bias"][None]
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return made


def test_weights_behind_other_nodes_are_cut_as_others_are(trained):
    how = {**LOSS, "structure": "hidden", "flops": 0.7, "validation": TEST, **ALONE}
    plain, other = (onnxtrain.prune(model, TRAIN, **how) for model in (trained, in_another_form(trained)))
    assert other.multiply_adds == plain.multiply_adds
    assert other.masks["w1"].shape == plain.masks["layer1.weight"].shape
    np.testing.assert_array_equal(other.masks["w1"], plain.masks["layer1.weight"])
    for name, twin in (("w1", "layer1.weight"), ("w2", "layer2.weight"), ("b1", "layer1.bias")):
        np.testing.assert_allclose(other.values[name], plain.values[twin], rtol=1e-4, atol=1e-6)
    assert other.accuracy_after == plain.accuracy_after


def test_a_fixed_batch_gets_one_hint_for_all_trainings():
    model = onnxtrain.examples.mlp((64, 10))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_value = 4
    data = TRAIN[0][:40], TRAIN[1][:40]
    with warns_sentence("fixed_batch", size="4 examples", step=4, wanted=8) as caught:
        onnxtrain.prune(model, data, **LOSS, sparsity=0.5, batch_size=8, **SHORT)
    assert len([one for one in caught if "fixed batch" in str(one.message)]) == 1
