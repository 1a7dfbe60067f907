"""Every optimizer, loss, schedule and option is sampled, or excluded with a reason."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

import onnxtrain
from call_arguments import arguments_of
from differential import coverage
from onnxtrain import losses, schedules
from onnxtrain.operators.registry import OPTIMIZERS

pytest.importorskip("torch")
import torch

from differential import combination, reference, surroundings
from differential.modules import Draw
from losses.loss_rows import LOSS_ROWS

pytestmark = pytest.mark.torch
KINDS = {"vector": (4,), "sequence": (5, 4), "image": (4, 3, 3)}


def test_every_optimizer_and_each_of_its_settings():
    varied: dict[str, dict[str, set[object]]] = {}
    for seed in range(1500):
        name, _, settings, _, _ = combination._optimizer(Draw(seed), per_tensor=True)
        for key, value in settings.items():
            varied.setdefault(name, {}).setdefault(key, set()).add(value)
    assert set(varied) == set(reference.OPTIMIZERS)
    ours = {name for name in OPTIMIZERS if hasattr(torch.optim, name)} | {"LAMB", "Lion", "Momentum", "SSGD"}
    assert ours <= set(varied), "an optimizer that PyTorch has needs a row in differential/reference.py"
    missing = [
        f"{name}.{field.name}"
        for name in varied
        for field in dataclasses.fields(getattr(onnxtrain, name))
        if len(varied[name].get(field.name, ())) < 2
        and not {field.name, f"{name}.{field.name}"} & coverage.OPTIMIZER_SETTINGS.keys()
    ]
    assert missing == []


def test_every_loss_and_each_of_its_options():
    drawn = {name for names in combination.LOSSES.values() for name in names}
    assert drawn == set(reference.LOSSES)
    assert drawn.isdisjoint(coverage.LOSSES)
    by_formula = {name for name, row in LOSS_ROWS.items() if row.formula}
    assert drawn | coverage.LOSSES.keys() | by_formula == set(losses.LOSSES)
    varied: dict[str, set[str]] = {}
    for seed in range(400):
        for kind, names in combination.LOSSES.items():
            for name in names:
                loss, _, _ = combination._loss(Draw(seed), name, SimpleNamespace(kind=kind, output=KINDS[kind]))
                assert loss.name == name
                default = {field.name: field.default for field in dataclasses.fields(loss)}
                varied.setdefault(name, {"weight", "reduction"}).update(
                    key for key, value in combination._arguments(loss).items() if value != default[key]
                )
    missing = [
        f"{name}.{field.name}"
        for name in sorted(drawn)
        for field in dataclasses.fields(losses.LOSSES[name])
        if field.name not in varied[name] and not {field.name, f"{name}.{field.name}"} & coverage.LOSS_OPTIONS.keys()
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("known", "drawn", "left"),
    [
        (set(arguments_of(onnxtrain.Trainer.__init__)), combination.TRAINER_OPTIONS, coverage.TRAINER),
        (set(arguments_of(onnxtrain.Trainer.fit)), combination.FIT_OPTIONS, coverage.FIT),
        (set(schedules.__all__), combination.SCHEDULES, coverage.SCHEDULES),
    ],
    ids=["Trainer", "fit", "schedules"],
)
def test_every_option_is_drawn_or_excluded_with_a_reason(known, drawn, left):
    assert set(drawn).isdisjoint(left)
    assert set(drawn) | set(left) == known
    assert all(left.values())


@pytest.fixture(scope="module")
def setups():
    """The arguments of 300 combinations, for ``Trainer`` and ``fit``."""
    return [
        combination._draw(Draw(27, seed), combination.model_of(seed // combination.PER_MODEL), seed)
        for seed in range(300)
    ]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_options_listed_as_drawn_are_drawn(setups):
    trainers = {"threads", "distributed"} | {option for setup in setups for option in setup.trainer}
    assert trainers == set(combination.TRAINER_OPTIONS)
    fits = {option for setup in setups if setup.fit for option in setup.fit}
    assert fits | {"data", "y", "sample_weight", "callbacks"} == set(combination.FIT_OPTIONS)
    around = [setup.around for setup in setups]
    assert {found.ending for found in around} == set(surroundings.ENDINGS)
    assert {found.form for found in around} == {form for forms in surroundings.FORMS.values() for form in forms}
    for drawn, all_ in (("ranks", surroundings.RANKS), ("threads", surroundings.THREADS), ("reading", (0, 1))):
        assert {getattr(found, drawn) for found in around} == set(all_)
