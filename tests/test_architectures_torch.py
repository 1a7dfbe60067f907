"""Gradients of many architectures, exported in every way, against PyTorch's in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.losses import SoftmaxCrossEntropy
from zoo.gradients import ARCHITECTURES, OTHER_SIZES, SIZES, Architecture, Elements, Oracle, export, oracle
from zoo.model_functions import in_functions

pytest.importorskip("torch")
# torch.cond warns about the parameters that its branches read, which has no bearing on the export.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")]

QUICK = [
    ("lstm_language_model", "torchscript", True),
    ("transformer_decoder", "torchscript", True),
    ("llama", "torchscript", True),
    ("mixed_unet", "dynamo", True),
    ("wavenet", "torchscript", True),
    ("graph_scatter_add", "dynamo", True),
    ("variational_autoencoder", "torchscript", False),
    ("scripted_loop", "torchscript", True),
    ("scripted_layers", "torchscript", True),
    ("bag_of_words_mean", "dynamo", True),
]


def run_gradients(
    entry: Architecture, model: onnx.ModelProto, sizes: Mapping[str, int], expected: Oracle, names: list[str]
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradient for the named initializers."""
    inputs = entry.example(sizes)
    if entry.loss == "output":
        result = onnxtrain.gradient(model, xs=names)
        session = onnxruntime.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])
        loss, *gradients = session.run(None, inputs)
        return float(loss), dict(zip(names, gradients, strict=True))
    axis = entry.class_axis
    loss = SoftmaxCrossEntropy(axis=axis) if entry.loss == "softmax_cross_entropy" else entry.loss
    # With alpha = 0 and T = 0 the momentum V is the gradient.
    training = onnxtrain.training_model(model, loss=loss, optimizer=onnxtrain.Momentum(1.0, alpha=0.0))
    session = onnxtrain.TrainingSession(training)
    target = entry.target(expected.output_shape)
    result = session.step({**inputs, "target": target, "learning_rate": np.float32(1.0)})
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    return float(result["loss"]), {name: session.state.get(f"{name}/V", np.zeros(shapes[name])) for name in names}


def worst_error(
    entry: Architecture, model: onnx.ModelProto, sizes: Mapping[str, int], expected: Oracle | None = None
) -> float:
    """The largest error of a parameter's gradient relative to its norm; the loss is checked, too."""
    expected = oracle(entry, sizes) if expected is None else expected
    elements = Elements(entry.build())
    positions = elements.positions(model)
    loss, gradients = run_gradients(entry, model, sizes, expected, list(positions))
    assert loss == pytest.approx(expected.loss, rel=1e-4)
    return elements.worst_error(gradients, positions, expected.gradients)


def check(name: str, exporter: str, dynamic: bool, folder: Path) -> float:
    """Gradients of an export equal torch's; a dynamic one is checked at sizes that it was not exported with."""
    entry = ARCHITECTURES[name]
    path = export(entry, folder / f"{name}.onnx", exporter, dynamic)
    error = worst_error(entry, onnx.load(path), entry.other_sizes(exporter) if dynamic else SIZES)
    assert error < (1e-6 if entry.double else 2e-3)
    return error


@pytest.mark.parametrize(("name", "exporter", "dynamic"), QUICK)
def test_gradients_equal_torch(name: str, exporter: str, dynamic: bool, tmp_path: Path) -> None:
    check(name, exporter, dynamic, tmp_path)


def _matrix():
    for name, entry in ARCHITECTURES.items():
        for exporter in entry.exporters:
            for dynamic in (True, False):
                form = "dynamic" if dynamic else "static"
                yield pytest.param(name, exporter, dynamic, id=f"{name}-{exporter}-{form}")


COMPUTED_FROM_PARAMETERS = ("rnn_language_model-dynamo-static", "rnn_relu-dynamo-static")
"""Exports that lack a use of a parameter: of the first step from a state of zeros, the exporter stored the result."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "exporter", "dynamic"), list(_matrix()))
def test_gradients_equal_torch_for_every_export(
    name: str, exporter: str, dynamic: bool, tmp_path: Path, record_property, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.id in COMPUTED_FROM_PARAMETERS:
        model = export(ARCHITECTURES[name], tmp_path / "model.onnx", exporter, dynamic)
        assert any("The exporter computed linear_1" in hint for hint in onnxtrain.inspect(model).hints)
    else:
        record_property("error", check(name, exporter, dynamic, tmp_path))


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "mean_squared_error", "mean_absolute_error", "huber"])
def test_every_loss_of_values_equals_torch(loss: str, tmp_path: Path) -> None:
    entry = dataclasses.replace(ARCHITECTURES["neural_ode"], loss=loss)
    path = export(entry, tmp_path / "model.onnx", "torchscript", dynamic=True)
    assert worst_error(entry, onnx.load(path), OTHER_SIZES) < 2e-5


@pytest.mark.parametrize(
    ("name", "exporter"),
    [
        ("lstm_language_model", "torchscript"),
        ("llama", "torchscript"),
        ("scripted_loop", "torchscript"),
        ("variational_autoencoder", "torchscript"),
    ],
)
def test_gradients_through_model_functions_equal_torch(name: str, exporter: str, tmp_path: Path) -> None:
    entry = ARCHITECTURES[name]
    model = in_functions(onnx.load(export(entry, tmp_path / "model.onnx", exporter, dynamic=True)))
    assert worst_error(entry, model, entry.other_sizes(exporter)) < 2e-3


NOT_IN_FUNCTIONS = {
    "mixed_unet": "ONNX Runtime takes no Resize to computed sizes in a function",
    "dense_pyramid": "ONNX Runtime takes no Resize to computed sizes in a function",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_IN_FUNCTIONS])
def test_gradients_through_model_functions_equal_torch_for_every_model(name: str, tmp_path: Path) -> None:
    entry = ARCHITECTURES[name]
    exporter = entry.exporters[0]
    model = in_functions(onnx.load(export(entry, tmp_path / "model.onnx", exporter, dynamic=True)))
    assert worst_error(entry, model, entry.other_sizes(exporter)) < 2e-3


def optimized(path: Path) -> onnx.ModelProto:
    """The model as ONNX Runtime's own optimizer writes it, with operators of its own."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("vision_transformer", "BiasGelu"),
        ("transformer_decoder", "FusedMatMul"),
        ("text_conv_net", "FusedConv"),
        ("highway", "FusedGemm"),
        ("llama", "QuickGelu"),
    ],
)
def test_gradients_of_what_the_runtime_optimized_equal_torch(name: str, operator: str, tmp_path: Path) -> None:
    entry = ARCHITECTURES[name]
    model = optimized(export(entry, tmp_path / "model.onnx", "torchscript", dynamic=True))
    assert operator in {node.op_type for node in model.graph.node if node.domain}
    assert worst_error(entry, model, entry.other_sizes("torchscript")) < 2e-3


FOLDED = ("separable_net", "decoder", "radial_basis")
"""The optimizer merges weights of these into others."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FOLDED])
def test_gradients_of_what_the_runtime_optimized_equal_torch_for_every_model(name: str, tmp_path: Path) -> None:
    entry = ARCHITECTURES[name]
    exporter = entry.exporters[0]
    model = optimized(export(entry, tmp_path / "model.onnx", exporter, dynamic=True))
    assert worst_error(entry, model, entry.other_sizes(exporter)) < 2e-3


def test_what_nothing_reads_is_no_part_of_the_gradient(tmp_path: Path) -> None:
    entry = ARCHITECTURES["two_heads"]
    gradients = oracle(entry).gradients
    zero = {name for name, gradient in gradients.items() if not gradient.any()}
    assert zero == {f"{layer}.{kind}" for layer in ("second", "unused") for kind in ("weight", "bias")}
    path = export(entry, tmp_path / "model.onnx", "torchscript", dynamic=True)
    assert worst_error(entry, onnx.load(path), SIZES) < 2e-5


def test_wrong_and_missing_gradients_are_found() -> None:
    entry = ARCHITECTURES["highway"]
    module = entry.build()
    gradients = oracle(entry).gradients
    tensors = [onnx.numpy_helper.from_array(p.detach().numpy().T, name) for name, p in module.named_parameters()]
    model = onnx.helper.make_model(onnx.helper.make_graph([], "parameters", [], [], tensors))
    elements = Elements(module)
    positions = elements.positions(model)
    assert set(positions) == set(gradients)
    transposed = {name: gradient.T for name, gradient in gradients.items()}
    assert elements.worst_error(transposed, positions, gradients) == 0
    wrong = transposed | {"head.weight": 1.1 * transposed["head.weight"]}
    assert elements.worst_error(wrong, positions, gradients) == pytest.approx(0.1)
    del positions["head.bias"]
    with pytest.raises(AssertionError, match=r"head\.bias is in no initializer"):
        elements.worst_error(transposed, positions, gradients)
