"""A misspelt argument is named with the nearest right one: in Python, in texts, and on the command line."""

import inspect

import pytest

import onnxtrain
from names_page import sections
from onnxtrain.cli import main
from onnxtrain.errors import ArgumentError, OptionError
from onnxtrain.errors.spelling import nearest
from onnxtrain.losses import LOSSES
from onnxtrain.training.callbacks import CALLBACKS

CALLED = ("onnxtrain", "Trainer", "TrainingSession", "losses", "schedules", "callbacks", "data", "layers", "examples")
CALLED += ("adapters", "testing", "metrics", "distributed", "pruning", "flower")
BASES = {"Callback", "CallbackList", "Loss", "ReducedLoss", "Layer", "Communicator", "Metric"}  # bases of others
RESULTS = {"Cost", "AdaptableLayer", "History", "NamedMetric", "PruneResult", "TrainingState", "GradientMismatchError"}


def public_calls():
    """Every public function, class and method with arguments that can be given by name."""
    for heading, entries in sections():
        section = heading.rpartition(".")[2]
        if section not in CALLED:
            continue
        for name, value in entries:
            if inspect.ismodule(value) or not callable(value) or name in BASES | RESULTS:
                continue
            try:
                parameters = inspect.signature(value).parameters
            except ValueError:
                continue
            named = [each for each in parameters if each != "self" and parameters[each].kind in (1, 3)]
            if named and not any(each.kind == 4 for each in parameters.values()):
                yield pytest.param(value, named, id=f"{heading}.{name}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("function", "names"), list(public_calls()))
def test_every_public_call_names_the_nearest_argument(function, names):
    right = max(names, key=len)
    wrong = right + "s" if f"{right}s" not in names else right + "z"
    method = inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "self"
    with pytest.raises(ArgumentError) as error:
        function(*([None] if method else []), **{wrong: 1})
    assert str(error.value).endswith(f"has no argument {wrong!r}; the nearest is {right!r}.") or (
        "optimizer" in str(error.value) or str(error.value).endswith(f"The nearest is {right!r}.")
    )
    assert isinstance(error.value, TypeError)
    assert nearest(wrong, names) == right


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (lambda: onnxtrain.AdamW(weigth_decay=0.1), "weight_decay"),
        (lambda: onnxtrain.Adam(learning_rat=0.1), "learning_rate"),
        (lambda: trainer(optimizer="adamw(weight_decy=0.1)"), "weight_decay"),
        (lambda: trainer(optimizer="adamm"), "adam"),
        (lambda: trainer(loss="cros_entropy"), "cross_entropy"),
        (lambda: trainer(loss="huber(detla=0.3)"), "delta"),
        (lambda: trainer().fit(*points(), schedule="cosin"), "cosine"),
        (lambda: trainer().fit(*points(), schedule="cosine(end_facter=0.1)"), "end_factor"),
        (lambda: trainer().evaluate(*points(), metrics="acuracy"), "accuracy"),
    ],
)
def test_names_in_texts(call, right):
    with pytest.raises(OptionError, match=f"[Tt]he nearest is '{right}'\\.$"):
        call()


def trainer(**options):
    return onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), **{"loss": "cross_entropy", **options})


def points():
    import numpy as np

    return np.zeros((8, 4), np.float32), np.arange(8) % 3


def test_the_learning_rate_belongs_to_the_optimizer():
    for name in ("lr", "learning_rate"):
        with pytest.raises(ArgumentError, match=r"setting of the optimizer: optimizer='adam\(lr=0.001\)'"):
            trainer(**{name: 0.1})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--lernrate", "3"], "Did you mean --learning-rate"),
        (["--batchsize", "3"], "Did you mean --batch-size"),
        (["--optimizer", "adm"], "The nearest is 'adam'"),
        (["--verbose"], "Unknown option: --verbose; see"),
    ],
)
def test_flags(flags, sentence, capsys):
    assert main(["fit", "model.onnx", "--data", "x", "--loss", "mse", *flags]) == 2
    assert sentence in capsys.readouterr().err


MODULES = (
    "losses metrics callbacks schedules data layers adapters pruning distributed parallel operators kernels examples"
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["", *MODULES.split(" ")])
def test_dir_shows_public_names_only(name):
    module = getattr(onnxtrain, name) if name else onnxtrain
    shown = {each for each in dir(module) if not each.startswith("__")}
    of_plugins = {"losses": LOSSES, "callbacks": CALLBACKS}.get(name)
    assert shown <= {*module.__all__, *(of_plugins.class_names() if of_plugins else ())}, "an internal name"
    assert all(hasattr(module, each) for each in shown)


def test_dir_of_a_trainer_shows_what_users_call():
    shown = {each for each in dir(trainer()) if not each.startswith("__")}
    assert {"fit", "train_step", "evaluate", "predict", "save", "parameters", "learning_rate", "hints"} <= shown
    assert not [each for each in shown if each.startswith("_")]
    assert not shown & {"specification", "step_batch", "again", "working_model", "check_finite", "steps"}


def test_a_notebook_shows_the_sentence():
    shell_module = pytest.importorskip("IPython.core.interactiveshell")
    shell = shell_module.InteractiveShell.instance()
    try:
        printed: list[str] = []
        shell._showtraceback = lambda kind, value, lines: printed.extend(lines)
        shell.run_cell("import onnxtrain\nmodel = onnxtrain.examples.mlp((4, 3))\nonnxtrain.Trainer(model, loss='mze')")
        text = "\n".join(printed)
        assert text.startswith("OptionError: There is no loss 'mze'")
        assert text.count("\n") == 1
        assert text.endswith("line 3: onnxtrain.Trainer(model, loss='mze')")
    finally:
        shell_module.InteractiveShell.clear_instance()


def test_inspect_prints_a_table():
    found = onnxtrain.inspect(onnxtrain.examples.mlp((4, 8, 3)))
    lines = repr(found).splitlines()
    head = next(line for line in lines if line.startswith("name"))
    assert head.split() == ["name", "shape", "type", "size", "zeros", "trainable", "why", "not"]
    for row in found.initializers:
        assert any(line.startswith(row.name) for line in lines)
        assert f"<td>{row.name}</td>" in found._repr_html_()
    assert any(line.startswith("Relu") for line in lines)
    assert "67 of 67 elements" in repr(found)


def test_a_text_that_nobody_wrote_is_compared_with_nothing():
    """It would take minutes."""
    with pytest.raises(OptionError, match=r"There is no loss 'm{100}'; use ") as caught:
        onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="m" * 2_000_000)
    assert len(str(caught.value)) < 1000
    assert nearest("batch_siz" + "e" * 100, ["batch_size"]) is None
