"""The configuration: a single list of options, value semantics, and the sessions that it rebuilds or keeps."""

import dataclasses
import inspect
import typing

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.cli.training_flags import Training
from onnxtrain.errors import ArgumentError, GradientError, OptionError
from onnxtrain.lowering import lower as lowering
from onnxtrain.lowering.training_info.build import build_entries
from onnxtrain.model_file.file import ModelFile
from onnxtrain.parameters.masks import Masks
from onnxtrain.runtime.session import TrainingSession
from onnxtrain.training.config import (
    AdvancedOptions,
    ModelOptions,
    Options,
    TrainingConfig,
    choose_distributed,
    choose_precision,
)
from onnxtrain.training.prepare import prepare

LOSS = "softmax_cross_entropy"
OPTIONS = set(typing.get_type_hints(Options))
ADVANCED = set(typing.get_type_hints(AdvancedOptions))
FIRST = OPTIONS - ADVANCED


def parameters(function):
    given = inspect.signature(function).parameters
    names = (name for name in given if name not in ("self", "model", "loss", "optimizer", "advanced"))
    return {name: given[name].default for name in names}


def defaults():
    fields = {field.name: field for field in dataclasses.fields(TrainingConfig)}
    return {
        name: fields[name].default_factory() if fields[name].default is dataclasses.MISSING else fields[name].default
        for name in fields
        if name not in ("model", "loss", "optimizer", "forms", "weighted", "packed", "held", "missed")
    }


def passed_on(function, name):
    (options,) = typing.get_args(typing.get_type_hints(function)[name])
    return options


def test_the_fields_are_the_options():
    assert set(defaults()) == OPTIONS
    for field in dataclasses.fields(TrainingConfig):
        if field.name in OPTIONS:
            assert field.metadata["doc"].endswith("."), field.name


def test_the_trainer_has_at_most_twenty_arguments_and_the_rest_by_name():
    own = parameters(onnxtrain.Trainer.__init__)
    assert set(own) == FIRST
    assert len(own) + 3 <= 20
    assert passed_on(onnxtrain.Trainer.__init__, "advanced") is AdvancedOptions
    empty = {"runtime": None, "precision": None, "distributed": None}  # a new object in every config
    assert own == {name: value for name, value in (defaults() | empty).items() if name in own}


@pytest.mark.plugins
def test_others_pass_the_options_on():
    assert passed_on(onnxtrain.prune, "options") is Options
    assert passed_on(onnxtrain.training_model, "options") is ModelOptions
    assert OPTIONS - set(typing.get_type_hints(ModelOptions)) == {"accumulate", "threads", "distributed", "runtime"}
    assert not OPTIONS & (set(parameters(onnxtrain.prune)) - {"options"})


def test_the_command_line_has_the_options_and_their_defaults():
    given = Training().arguments()
    elsewhere = {"accumulate", "threads", "sparsify", "runtime", "lora", "ema", "distributed"}
    assert set(given) == OPTIONS - elsewhere
    assert given.pop("masks") is None
    assert given == {name: value for name, value in defaults().items() if name in given}


@pytest.mark.plugins
def test_prune_takes_every_option_that_the_trainer_takes():
    y = np.arange(12) % 3
    given = {"seed": 1, "accumulate": 2, "clip_norm": 1.0, "threads": 1, "freeze": "*bias*"}
    model = examples.mlp((4, 8, 3))
    names = [tensor.name for tensor in model.graph.initializer]
    given["freeze"] = names[-1]
    data = np.eye(4, dtype=np.float32)[y], y
    result = onnxtrain.prune(model, data, loss=LOSS, sparsity=0.5, epochs=1, fine_tune_epochs=1, **given)
    frozen = onnx.numpy_helper.to_array(model.graph.initializer[-1])
    np.testing.assert_array_equal(result.given.get(names[-1], frozen), frozen)
    with pytest.raises(OptionError, match="accumulate is 0"):
        onnxtrain.prune(model, data, loss=LOSS, sparsity=0.5, accumulate=0)


def test_equal_arguments_make_equal_specifications():
    file = ModelFile.load(examples.mlp((4, 3)))
    one, other = (
        dataclasses.replace(
            TrainingConfig.of(
                examples.mlp((4, 3)), LOSS, train=["*", "*"], recompute="none", masks={"w": np.ones(3, bool)}
            ),
            model=file,
        )
        for _ in range(2)
    )
    assert one == other
    assert one != dataclasses.replace(other, masks=Masks({"w": np.zeros(3, bool)}))
    assert one != dataclasses.replace(other, seed=1)
    assert one != dataclasses.replace(other, model=ModelFile.load(examples.mlp((4, 3))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.seed = 1


def test_masks_are_a_value():
    mask = np.ones(3, bool)
    masks = Masks({"w": mask})
    mask[0] = False
    assert masks["w"].all()
    assert masks == {"w": np.ones(3, bool)} != Masks()
    assert hash(masks) == hash(Masks({"w": np.ones(3, bool)}))
    with pytest.raises(ValueError, match="read-only"):
        masks["w"][0] = False


@pytest.fixture
def built(monkeypatch):
    """Record the sessions that are built."""
    found = []
    whole = TrainingSession.of_entries.__func__

    def counted(cls, *arguments, **options):
        found.append(whole(cls, *arguments, **options))
        return found[-1]

    monkeypatch.setattr(TrainingSession, "of_entries", classmethod(counted))
    return found


def batch(rows=6):
    y = np.arange(rows) % 3
    return np.eye(4, dtype=np.float32)[y], y


def test_one_session_is_built_when_a_step_needs_it(built):
    x, y = batch()
    model = examples.mlp((4, 8, 3))
    weight = next(tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2)
    shape = next(tuple(tensor.dims) for tensor in model.graph.initializer if tensor.name == weight)
    trainer = onnxtrain.Trainer(model, loss=LOSS, masks={weight: np.ones(shape, bool)})
    trainer.evaluate((x, np.eye(3, dtype=np.float32)[y]))
    trainer.predict(x)
    assert trainer.parameters[weight].shape == shape
    assert not built
    trainer.fit((x, np.eye(3, dtype=np.float32)[y]), epochs=2)  # targets of another form than the default
    assert built == [trainer.executor.session]


def test_the_session_stays_as_long_as_the_specification_is_equal(built):
    x, y = batch()
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS, optimizer=onnxtrain.Momentum(0.1))
    name = trainer.objective.matmul_weights[0]
    mask = np.arange(trainer.parameters[name].size).reshape(trainer.parameters[name].shape) % 2 == 0
    trainer.train_step(x, y)
    trainer.set_masks({})
    assert len(built) == 1
    trainer.set_masks({name: mask})
    momentum = np.array(trainer.executor.states[f"{name}/V"])
    assert momentum[mask].any()
    assert not momentum[~mask].any()
    trainer.train_step(x, y)
    trainer.set_masks({name: mask.copy()})
    trainer.train_step(x, y)
    assert len(built) == 2
    assert trainer.executor.session is built[1]
    assert built[1].state is built[0].state


def test_building_does_not_use_an_objective_up():
    config = TrainingConfig.of(examples.mlp((4, 8, 3)), LOSS)
    objective = prepare(config)
    before = len(objective.model.graph), list(objective.model.graph.initializers)
    first, second = (build_entries(objective.step_spec(config))[0][0] for _ in range(2))
    assert (len(objective.model.graph), list(objective.model.graph.initializers)) == before
    names = [[node.op_type for node in entry.model.graph] for entry in (first, second)]
    assert names[0] == names[1]
    assert len(names[0]) > before[0]


def test_evaluation_takes_the_list_of_passes(monkeypatch):
    seen = []
    whole = lowering.lower_graph
    monkeypatch.setattr(
        lowering, "lower_graph", lambda model, **options: seen.append(options) or whole(model, **options)
    )
    x, y = batch()
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)
    trainer.evaluate((x, y))
    trainer.predict(x)
    assert [options["kernels"] for options in seen] == [False] * 2


def test_missing_gradients_are_reported_before_the_first_step(built):
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "a.b": 1]>
        g (float[n,4] x) => (float[n,4] z)
        <float[4,4] w = {1,2,3,4,1,2,3,4,1,2,3,4,1,2,3,4}> { h = MatMul(x, w) z = a.b.Unheard(h) }""")
    with pytest.raises(GradientError, match="Unheard"):
        onnxtrain.Trainer(model, loss="mean_squared_error")
    assert not built


def test_another_trainer_continues_from_the_same_parameters():
    x, y = batch()
    trainer = onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=LOSS)
    trainer.train_step(x, y)
    again = trainer.rebuilt(optimizer=onnxtrain.Momentum(0.1), seed=7)
    assert isinstance(again, onnxtrain.Trainer)
    assert (again.config.seed, again.learning_rate, again.objective) == (7, 0.1, trainer.objective)
    for name, array in trainer.parameters.items():
        assert again.parameters[name].tobytes() == array.tobytes()
        assert not again.executor.states[f"{name}/V"].any()
    again.train_step(x, y)
    assert any(again.parameters[name].tobytes() != array.tobytes() for name, array in trainer.parameters.items())


def test_parallel_is_distributed():
    rank, model = onnxtrain.parallel.Single(), examples.mlp((4, 3))
    assert onnxtrain.Trainer(model, loss="mse", parallel=rank).config.distributed == onnxtrain.Distributed(rank)
    assert {name: getattr(onnxtrain.parallel, name) for name in onnxtrain.parallel.__all__} == {
        name: getattr(onnxtrain.distributed, name) for name in onnxtrain.distributed.__all__
    }
    with pytest.raises(ArgumentError, match="leave 'parallel' out"):
        onnxtrain.Trainer(model, loss="mse", distributed=rank, parallel=rank)


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
