"""The names and signatures that users build on, and what importing the package costs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
import typing

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.graph.rule_registry import NEWEST
from onnxtrain.operators import OPTIMIZERS

pytestmark = pytest.mark.sampled(1)  # each case is cheap

PUBLIC = {
    "__version__",
    "flower",
    "ray",
    "sklearn",
    "audio",
    "tables",
    "torch",
    "EMA",
    "Group",
    "Lora",
    "RuntimeOptions",
    "Sparsity",
    "Trainer",
    "TrainingSession",
    "adapters",
    "backend",
    "custom_ops_library",
    "errors",
    "hub",
    "evaluate",
    "images",
    "examples",
    "dynamic_batch",
    "inference_mode",
    "Precision",
    "Distributed",
    "gradient",
    "jvp",
    "vjp",
    "hessian_vector_product",
    "jacobian",
    "per_example_gradients",
    "inspect",
    "append",
    "callbacks",
    "compile_sparse",
    "cut",
    "data",
    "kernels",
    "layer_decay",
    "layers",
    "losses",
    "metrics",
    "pruning",
    "schedules",
    "lower",
    "no_gradient",
    "operators",
    "distributed",
    "parallel",
    "predict",
    "prepend_mel",
    "prune",
    "replace_head",
    "shrink",
    "quantize",
    "register_callback",
    "register_command",
    "register_flags",
    "register_gradient",
    "register_loss",
    "register_metric",
    "register_pass",
    "register_reader",
    "testing",
    "text",
    "training_model",
    "unregister_gradient",
    *(entry.settings.__name__ for entry in OPTIMIZERS.values()),
}

SIGNATURES = {
    "gradient": "(model, y=None, xs=None, *, straight_through=False, recompute=())",
    "jvp": "(model, y=None, xs=None)",
    "vjp": "(model, y=None, xs=None)",
    "hessian_vector_product": "(model, y=None, xs=None)",
    "jacobian": "(model, y=None, xs=None, *, batch=False)",
    "per_example_gradients": "(model, y=None, xs=None, *, inputs=None)",
    "inspect": "(model, *, train=None, freeze=None, output=None)",
    "lower": "(training_model, *, entry=None, kernels=False, folder='')",
    "no_gradient": "(*operators, domain='', reason)",
    "register_gradient": "(*operators, domain='', since=1, until=NEWEST, broadcasts=False)",
    "unregister_gradient": "(operator, domain='')",
    "compile_sparse": "(model, path, *, sizes=None)",
    "custom_ops_library": "()",
    "training_model": "(model, *, loss, optimizer, accumulate=False, **options)",
    "Trainer": (
        "(model, *, loss, optimizer=None, train=None, freeze=None, groups=(), output=None, targets=None, "
        "batch_norm='frozen', dropout=False, clip_norm=None, accumulate=1, ema=None, lora=None, qat=False, seed=0, "
        "threads=None, precision=None, distributed=None, runtime=None, **advanced)"
    ),
    "Trainer.train_step": "(self, inputs, targets=None)",
    "Trainer.evaluate": "(self, data, *, target=None, batch_size=256, metrics=())",
    "Trainer.predict": "(self, data, *, batch_size=256)",
    "Trainer.save": "(self, path)",
    "Trainer.save_training_model": "(self, path)",
    "TrainingSession": "(training_model, *, runtime=None, folder='')",
    "TrainingSession.initialize": "(self)",
    "TrainingSession.step": "(self, feeds, *, entry=None)",
    "RuntimeOptions": (
        "(threads=None, providers=('CPUExecutionProvider',), memory_pattern=False, kernels=None, profile=None)"
    ),
    "Adam": (
        "(learning_rate=0.001, alpha=0.9, beta=0.999, epsilon=1e-06, norm_coefficient=0.0, norm_coefficient_post=0.0)"
    ),
    "Adagrad": "(learning_rate=0.01, decay_factor=0.0, epsilon=1e-06, norm_coefficient=0.0)",
    "Momentum": "(learning_rate=0.01, alpha=0.9, beta=1.0, mode='standard', norm_coefficient=0.0)",
    "SSGD": (
        "(learning_rate=0.01, measure='log-sum', reweighting='l2', epsilon=0.01, p=0.5, regularization=0.0, alpha=0.0, "
        "norm_coefficient=0.0, max_scale=0.0)"
    ),
    "Precision": "(compute='float32', states=None, master_weights=True)",
    "Distributed": "(communicator=None, shard_states=False, shard_gradients=False)",
    "operators.adam": "(R, T, *inputs, **attributes)",
    "operators.adagrad": "(R, T, *inputs, **attributes)",
    "operators.momentum": "(R, T, *inputs, **attributes)",
    "operators.ssgd": "(R, T, *inputs, **attributes)",
    "hub.push_to_hub": (
        "(model, repo, *, run=None, file='model.onnx', private=None, license=None, "
        "message='Upload a model trained with onnxtrain')"
    ),
    "testing.check_gradient": (
        "(model, inputs, *, wrt=None, opset=18, shapes='static', precision='double', runtime=True, directions=2, "
        "seed=0, step=None, tolerance=None)"
    ),
}

FIT = {
    "data": inspect.Parameter.empty,
    "y": None,
    "validation": None,
    "sample_weight": None,
    "target": None,
    "epochs": 1,
    "batch_size": 32,
    "schedule": None,
    "metrics": (),
    "shuffle": True,
    "callbacks": (),
    "progress": "auto",
    "checkpoint": None,
    "checkpoint_every": None,
    "keep": 3,
    "save_best": None,
    "resume": False,
    "change": (),
    "run": None,
    "prefetch": True,
    "augment": None,
    "ema": None,
    "cache_features": False,
}

RETURNS = {
    "gradient": onnx.ModelProto,
    "lower": onnx.ModelProto,
    "training_model": onnx.ModelProto,
    "Trainer.train_step": float,
    "Trainer.evaluate": dict[str, typing.Any],
    "Trainer.predict": np.ndarray | dict[str, np.ndarray],
    "Trainer.model": onnx.ModelProto,
    "Trainer.training_model": onnx.ModelProto,
    "predict": np.ndarray | dict[str, np.ndarray],
    "TrainingSession.step": dict[str, np.ndarray],
}


def find(name: str) -> typing.Any:
    value: typing.Any = onnxtrain
    for part in name.split("."):
        value = getattr(value, part)
    return value


def promised(text: str) -> dict[str, inspect.Parameter]:
    """The parameters of a signature given as text."""
    function = eval(f"lambda {text[1:-1]}: None", {"NEWEST": NEWEST})
    return dict(inspect.signature(function).parameters)


def hints(function: typing.Any) -> dict[str, typing.Any]:
    """Annotations; some types are only imported for type checkers."""
    lazy = {"LossLike": object, "Optimizer": object}
    return typing.get_type_hints(function.__init__ if isinstance(function, type) else function, localns=lazy)


def test_public_names():
    assert set(onnxtrain.__all__) == PUBLIC
    assert set(onnxtrain.__all__) <= set(dir(onnxtrain))
    for name in PUBLIC - {"flower", "ray", "sklearn"}:  # whose packages may be missing
        assert getattr(onnxtrain, name) is not None
    with pytest.raises(AttributeError, match="No onnxtrain attribute nonsense"):
        onnxtrain.nonsense  # noqa: B018


@pytest.mark.parametrize("name", sorted(onnxtrain._MODULES.keys() - {"flower", "ray", "torch"}))
def test_public_modules_are_imported_by_their_names(name):
    module = getattr(onnxtrain, name)
    own = module.__spec__
    assert importlib.import_module(f"onnxtrain.{name}") is module
    assert module.__spec__ is own
    assert own.name == f"onnxtrain.{onnxtrain._MODULES[name]}"


def test_modules_of_public_ones_are_imported_once():
    module = importlib.import_module("onnxtrain.callbacks.report")
    assert module is importlib.import_module("onnxtrain.training.callbacks.report")
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("onnxtrain.callbacks.nothing")
    with pytest.raises(ModuleNotFoundError, match="nonsense"):
        importlib.import_module("onnxtrain.nonsense")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    """Promised arguments exist, in this order and with these defaults; added ones are optional."""
    expected, found = promised(SIGNATURES[name]), inspect.signature(find(name)).parameters
    assert [parameter for parameter in found if parameter in expected] == list(expected)
    for parameter, wanted in expected.items():
        assert (found[parameter].kind, found[parameter].default) == (wanted.kind, wanted.default), parameter
    for parameter in found.keys() - expected.keys():
        assert found[parameter].default is not inspect.Parameter.empty, parameter


@pytest.mark.parametrize("name", RETURNS)
def test_return_types(name):
    assert hints(find(name))["return"] == RETURNS[name]


def test_fit_has_its_arguments():
    fit = onnxtrain.Trainer.fit
    assert inspect.isfunction(fit)
    parameters = {name: parameter.default for name, parameter in inspect.signature(fit).parameters.items()}
    assert parameters.pop("self") is inspect.Parameter.empty
    assert {name: parameters[name] for name in FIT} == FIT
    assert inspect.Parameter.empty not in {parameters[name] for name in parameters.keys() - FIT.keys()}


def test_everything_is_annotated():
    for name in SIGNATURES:
        function = find(name)
        parameters = {parameter for parameter in inspect.signature(function).parameters if parameter != "self"}
        assert parameters <= set(hints(function)), name


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Momentum", "SSGD"])
def test_optimizers_are_frozen_dataclasses(name):
    optimizer = find(name)()
    assert dataclasses.is_dataclass(optimizer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.learning_rate = 1.0
    attributes = {attribute.name for attribute in optimizer.schema.attributes}
    assert {field.name for field in dataclasses.fields(optimizer)} >= {"learning_rate", *attributes}


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_loads_nothing_heavy():
    heavy = ("numpy", "onnx", "onnx_ir", "onnxruntime", "cyclopts", "rich", "torch", "sklearn", "matplotlib")
    loaded = run_python(f"import sys, onnxtrain; print(*(m for m in {heavy} if m in sys.modules))")
    assert loaded.split() == []


def test_importing_the_package_is_quick():
    program = "import time; t = time.perf_counter(); import onnxtrain; print(time.perf_counter() - t)"
    assert min(float(run_python(program)) for _ in range(3)) < 0.3


def test_help_needs_no_runtime():
    """Help comes at once: no session, no scikit-learn, no plot."""
    heavy = ("onnxruntime", "torch", "sklearn", "matplotlib", "scipy")
    program = f"import sys; from onnxtrain.cli import main; main(['fit', '--help']); " \
        f"print('loaded:', *(m for m in {heavy} if m in sys.modules))"  # fmt: skip
    assert run_python(program).splitlines()[-1] == "loaded:"


def test_errors_have_one_base():
    classes = [value for value in vars(onnxtrain.errors).values() if isinstance(value, type)]
    assert len(classes) > 5
    assert all(issubclass(value, onnxtrain.errors.OnnxTrainError) for value in classes)
