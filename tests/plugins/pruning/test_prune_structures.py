"""prune(structure=...) returns a smaller dense model that is fine-tuned."""

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import NumericalError, OptionError
from onnxtrain.training.examples import mlp, points

LOSS = {"loss": "softmax_cross_entropy"}
SHORT = {"epochs": 1, "fine_tune_epochs": 1}


def hidden(model):
    return {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}["layer1.weight"][0]


def test_hidden_units_go_and_the_accuracy_stays():
    result = onnxtrain.prune(
        mlp((4, 32, 3)), points(), **LOSS, structure="hidden", sparsity=0.7, epochs=10, fine_tune_epochs=10
    )
    assert result.sparsity >= 0.69
    assert hidden(result.model()) <= 10
    assert result.accuracy_after > 0.85
    assert result.multiply_adds[1] < 0.35 * result.multiply_adds[0]
    assert f"removed {32 - hidden(result.model())} hidden" in result.text()
    assert "save bytes, not time" not in result.text()


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("method", ["magnitude", "random", "ssgd"])
def test_methods_and_allocations(method, allocation):
    result = onnxtrain.prune(
        mlp((4, 16, 12, 3)),
        points(),
        **LOSS,
        **SHORT,
        structure=("hidden", "heads"),
        flops=0.5,
        method=method,
        allocation=allocation,
    )
    before, after = result.multiply_adds
    assert 0.35 * before < after <= 0.5 * before
    if allocation == "uniform":
        sizes = {tensor.name: tuple(tensor.dims) for tensor in result.model().graph.initializer}
        assert 8 <= sizes["layer1.weight"][0] <= 13
        assert 6 <= sizes["layer2.weight"][0] <= 10


def test_the_least_important_go_first():
    model = mlp((4, 8, 3))
    for tensor in model.graph.initializer:
        array = np.ones(tensor.dims, np.float32)
        if tensor.name.startswith("layer1"):
            array[[2, 5]] = 1e-3
        if tensor.name == "layer2.weight":
            array[:, [2, 5]] = 1e-3
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    how = {"epochs": 0, "fine_tune_epochs": 0, "method": "magnitude"}
    result = onnxtrain.prune(model, points(), **LOSS, **how, structure="hidden", sparsity=0.2)
    assert np.flatnonzero(~result.masks["layer1.bias"]).tolist() == [2, 5]


@pytest.mark.thorough
def test_a_speedup_is_measured():
    how = {"epochs": 0, "fine_tune_epochs": 0}
    model = mlp((4, 4000, 1000, 3))
    result = onnxtrain.prune(model, points(), **LOSS, **how, structure="hidden", speedup=1.5)
    assert result.speedup >= 1.5
    assert result.removed_structures > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "hidden"}, "structure= needs one target: sparsity=, flops= or speedup=; it got none of them"),
        ({"structure": "hidden", "flops": 0.5, "sparsity": 0.5}, "it got sparsity= and flops="),
        (
            {"structure": "rows", "flops": 0.5},
            "structure is 'rows'; it needs to be one or several of 'channels', 'heads'",
        ),
        ({"structure": "hidden", "flops": 1.5}, "flops is 1.5; it needs a fraction above 0 and below 1"),
        ({"structure": "hidden", "speedup": 0.5}, "speedup is 0.5; it needs a factor above 1"),
        (
            {"structure": "hidden", "flops": 0.99},
            "The target cannot be reached: with all structures removed that may go",
        ),
        ({"structure": "hidden", "speedup": 900.0}, "speedup=900.0 cannot be reached"),
        ({"structure": "heads", "flops": 0.5}, "The model has no heads to remove; choose another structure="),
        ({"structure": "hidden", "flops": 0.5, "rounds": 2}, "rounds= is an option for single weights"),
        ({"structure": "hidden", "flops": 0.5, "storage": "sparse"}, "storage= is an option for single weights"),
        ({"structure": "hidden", "flops": 0.5, "epochs": -1}, "epochs is -1; it needs a number of at least 0"),
        ({"structure": "hidden", "flops": 0.5, "method": "best"}, "method is 'best'; it needs to be one of"),
        ({"structure": "hidden", "flops": 0.5, "masks": "keep"}, "masks= holds single weights at zero"),
        ({"structure": "hidden", "flops": 0.5, "block": (4, 1)}, "block= is an option for single weights"),
        ({"structure": "hidden", "flops": 0.5, "n_m": (2, 4)}, "n_m= is an option for single weights"),
        (
            {"structure": "hidden", "flops": 0.5, "allocation": "flops"},
            "structure= needs 'global' or 'uniform'; flops=",
        ),
        ({"structure": "hidden", "flops": "0.5"}, "flops is '0.5'; it needs a fraction above 0 and below 1"),
        ({"structure": "hidden", "sparsity": "0.5"}, "sparsity is '0.5'; it needs a fraction above 0 and below 1"),
        ({"structure": "hidden", "speedup": "2"}, "speedup is '2'; it needs a factor above 1"),
        ({"structure": [], "flops": 0.5}, "structure= is empty; give 'channels', 'heads', 'hidden', or several of"),
        ({"sparsity": 0.5, "lora": onnxtrain.Lora(rank=2)}, "lora= freezes the model's own weights"),
        ({"structure": 3, "flops": 0.5}, "structure is 3; it needs to be one or several of 'channels'"),
        ({"flops": 0.5}, "flops= is a target for whole structures; give structure=, or sparsity= for single weights"),
        ({"speedup": 2.0}, "speedup= is a target for whole structures"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(OptionError, match=message):
        onnxtrain.prune(mlp((4, 16, 3)), points(), **LOSS, **{"epochs": 0, "fine_tune_epochs": 0, **options})


def test_quantized_weights():
    quantized = onnxtrain.quantize(mlp((4, 32, 3)), points()[0])
    how = {"qat": True, "structure": "hidden", "sparsity": 0.5, **SHORT}
    result = onnxtrain.prune(quantized, points(), **LOSS, **how)
    assert all(np.isfinite(row.threshold) for row in result.layers)
    shapes = {tuple(tensor.dims) for tensor in result.model().graph.initializer if tensor.data_type == 3}
    assert max(max(shape, default=0) for shape in shapes) < 32


def test_settings_follow_from_the_data():
    lines = []
    how = {"structure": "hidden", "flops": 0.5, "epochs": 2, "progress": lines.append}
    onnxtrain.prune(mlp((4, 16, 3)), points(), **LOSS, **how)
    epochs = [line.split(",")[0] for line in lines if "epoch" in line]
    assert epochs == [f"{phase}: epoch {n} of 2" for phase in ("training", "fine-tuning") for n in (1, 2)]


@pytest.mark.parametrize("target", [{"sparsity": 0.5}, {"structure": "hidden", "flops": 0.5}])
def test_a_training_that_diverges_starts_again(monkeypatch, target):
    """The loss of the first training is NaN; with an optimizer of one's own that is an error."""
    fit, rates, lines = onnxtrain.Trainer.fit, [], []

    def diverging(trainer, *arguments, **options):
        rates.append(trainer.config.optimizer.learning_rate)
        if rates[-1] > 0.01:
            raise NumericalError("The loss became nan.")
        return fit(trainer, *arguments, **options)

    monkeypatch.setattr(onnxtrain.Trainer, "fit", diverging)
    onnxtrain.prune(mlp((4, 16, 3)), points(), **LOSS, **SHORT, **target, progress=lines.append)
    assert [round(rate, 4) for rate in rates] == [0.025, 0.0083, 0.0083]
    assert "the training diverged; it starts again with a learning rate of 0.0083" in lines
    with pytest.raises(NumericalError, match="The loss became nan"):
        onnxtrain.prune(mlp((4, 16, 3)), points(), **LOSS, **SHORT, **target, optimizer=onnxtrain.SSGD(0.02))


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp((4, 16, 3)), "model.onnx")
    x, y = points()
    np.savez("train.npz", input=x, target=y)
    line = ["prune", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--structure", "hidden"]
    assert main([*line, "--flops", "0.5", "--epochs", "1", "--fine-tune-epochs", "1", "-o", "small.onnx"]) == 0
    assert hidden(onnx.load("small.onnx")) == 8
    assert "8 hidden" in " ".join(capsys.readouterr().out.split())
