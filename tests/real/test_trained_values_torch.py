"""Trainable parameters of PyTorch exports equal ``named_parameters()`` (140 modules, both exporters, both batches)."""

from __future__ import annotations

import onnx
import pytest

import onnxtrain
from sentences import warns_sentence
from zoo.exported_modules import MODULES
from zoo.exporting import differences, export

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::onnxtrain.errors.TrainingHint"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SAMPLE = [
    ("lstm", "dynamo", True),
    ("gru", "dynamo", False),
    ("gru cell", "dynamo", False),
    ("gru with learned state", "dynamo", True),
    ("lstm with learned states", "dynamo", True),
    ("conv and group norm", "dynamo", False),
    ("group norm without affine", "dynamo", True),
    ("group norm", "torchscript", False),
    ("instance norm without affine", "dynamo", True),
    ("layer norm without affine", "dynamo", False),
    ("batch norm without affine", "dynamo", False),
    ("normalized images", "torchscript", True),
    ("rotary of few positions", "dynamo", True),
    ("class token and positions", "dynamo", True),
    ("prelu by channel", "torchscript", False),
    ("logit scale", "torchscript", True),
    ("BERT", "dynamo", True),
    ("ViT", "torchscript", True),
]


def check(name: str, exporter: str, free: bool, folder) -> None:
    """Check a module with distinct parameters for a dynamic batch size, and an untrained one for a fixed size."""
    case = MODULES[name]
    parameters, model = export(
        torch, case, folder / "model.onnx", exporter, free=free and exporter in case.free, fresh=not free
    )
    assert differences(parameters, model) == []


@pytest.mark.parametrize(("name", "exporter", "free"), SAMPLE)
def test_trainable_parameters_equal_named_parameters(name, exporter, free, tmp_path):
    check(name, exporter, free, tmp_path)


ALL = [
    (name, exporter, free) for name, case in MODULES.items() for exporter in case.exporters for free in (True, False)
]


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "exporter", "free"), [case for case in ALL if case not in SAMPLE])
def test_trainable_parameters_of_every_module(name, exporter, free, tmp_path):
    check(name, exporter, free, tmp_path)


def test_there_are_many_modules():
    assert len(MODULES) >= 120
    assert len(ALL) >= 400


@pytest.fixture(scope="module")
def dropped(tmp_path_factory):
    """Return an untrained vision transformer, as the newer exporter writes it by default, and its parameters."""
    return export(torch, MODULES["ViT"], tmp_path_factory.mktemp("vit") / "m.onnx", "dynamo", free=True, fresh=True)


def test_biases_that_the_exporter_omitted_are_named(dropped):
    _, model = dropped
    with warns_sentence("exporter_left_out", biases="2 biases"):
        trainer = onnxtrain.Trainer(model, loss="mse")
    (hint,) = [hint for hint in trainer.hints if "left out" in hint]
    # Biases of Conv and Gemm; zeros that an Add reads are merged, with another hint.
    assert "(model.vit.embeddings.patch_embeddings.projection.bias, model.classifier.bias)" in hint
    assert hint in onnxtrain.inspect(model).hints


def test_nothing_is_omitted_without_optimizing(tmp_path):
    parameters, model = export(
        torch, MODULES["two linear"], tmp_path / "m.onnx", "dynamo", free=True, fresh=True, optimize=False
    )
    assert len(onnxtrain.Trainer(model, loss="mse").parameters) == len(parameters)
    assert not [hint for hint in onnxtrain.inspect(model).hints if "left out" in hint]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("optimize", [True, False])
def test_parameters_and_buffers_are_those_of_the_program_whatever_their_names(optimize, fresh, tmp_path):
    case = MODULES["names that mislead"]
    parameters, model = export(torch, case, tmp_path / "m.onnx", "dynamo", free=True, fresh=fresh, optimize=optimize)
    assert set(onnxtrain.Trainer(model, loss="mse").parameters) == set(parameters)
    reasons = {row.name: row.reason for row in onnxtrain.inspect(model).initializers if not row.trainable}
    assert reasons["1.proj"] == "a buffer of a PyTorch module"
    assert onnxtrain.Trainer(model, loss="mse", train="1.proj").parameters.keys() == {"1.proj"}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("optimize", [True, False])
def test_declared_parameters_are_trained_before_names_and_values_are_asked(optimize, fresh, tmp_path):
    case = MODULES["parameters that meet the input"]
    parameters, model = export(torch, case, tmp_path / "m.onnx", "dynamo", free=True, fresh=fresh, optimize=optimize)
    assert differences(parameters, model) == []
    found = onnxtrain.inspect(model)
    assert found.trainable_size == sum(array.size for array in parameters.values())
    assert not found.surprises


def test_gates_of_a_layer_are_not_shared(tmp_path):
    """As `optimize=False` writes them, slices of each weight meet in one node."""
    for fresh in (True, False):
        case = MODULES["lstm of two layers"]
        _, model = export(torch, case, tmp_path / "m.onnx", "dynamo", free=True, fresh=fresh, optimize=False)
        assert onnxtrain.inspect(model).hints == ()


@pytest.mark.parametrize("optimize", [True, False])
def test_tensors_in_the_code_of_an_inner_module_stay(optimize, tmp_path):
    """The exporter names them by the module's path (`0.1.lifted_tensor_0`), or by the operator that it folded."""
    case = MODULES["literals of an inner module"]
    parameters, model = export(torch, case, tmp_path / "m.onnx", "dynamo", free=True, fresh=False, optimize=optimize)
    assert differences(parameters, model) == []
    assert set(onnxtrain.Trainer(model, loss="mse").parameters) == set(parameters)


def test_a_constant_initial_state_stays(tmp_path):
    """Each example is predicted alike, whatever its position in the batch."""
    _, model = export(torch, MODULES["lstm"], tmp_path / "m.onnx", "dynamo", free=False, fresh=True)
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="adam(lr=0.1)")
    x, y = MODULES["lstm"].example(torch)[0].numpy(), None
    one = x[:1].repeat(2, 0)
    y = trainer.predict(x)
    for _ in range(5):
        trainer.train_step(x, y + 1)
    first, second = trainer.predict(one)
    assert (first == second).all()


def test_cells_that_are_unrolled_are_shared_on_purpose(tmp_path):
    for fresh in (True, False):
        _, model = export(torch, MODULES["gru cell"], tmp_path / "m.onnx", "dynamo", free=True, fresh=fresh)
        for tensor in model.graph.initializer:
            if tensor.name.startswith("cell.bias"):
                tensor.CopyFrom(onnx.numpy_helper.from_array(0 * onnx.numpy_helper.to_array(tensor), tensor.name))
        shared = [hint for hint in onnxtrain.inspect(model).hints if "is shared by" in hint]
        (hint,) = shared
        assert hint.endswith(" and 1 more: training ties them.")
