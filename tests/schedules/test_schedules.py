"""Learning-rate schedules: against their formulas, against PyTorch, and as text."""

import math

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.training.schedules import (
    Constant,
    Cosine,
    Custom,
    Exponential,
    Linear,
    OneCycle,
    Step,
    WarmUp,
    parse_schedule,
    resolve_schedule,
    vanishing_hint,
)
from sentences import raises_sentence, warns_sentence


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(0.5), {0: 0.5, 7: 0.5}),
        (Linear(0.2, 10), {0: 0.2, 5: 0.1, 10: 0.0, 11: 0.0}),
        (Linear(0.2, 10, 0.5), {0: 0.2, 5: 0.15, 10: 0.1, 99: 0.1}),
        (Cosine(0.2, 10), {0: 0.2, 5: 0.1, 10: 0.0, 99: 0.0}),
        (Cosine(1.0, 3, 0.1), {0: 1.0, 1: 0.1 + 0.9 * 0.75, 3: 0.1}),
        (Step(1.0, 3, 0.5), {0: 1.0, 2: 1.0, 3: 0.5, 5: 0.5, 6: 0.25}),
        (Exponential(2.0, 0.5), {0: 2.0, 1: 1.0, 3: 0.25}),
        (Exponential(2.0, 0.25, every=2), {0: 2.0, 1: 1.0, 2: 0.5}),
        (WarmUp(Step(1.0, 2, 0.1), 3), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 5: 0.1}),
        (Custom(lambda step: 1 / (1 + step)), {0: 1.0, 1: 0.5}),
    ],
)
def test_schedule_follows_its_equation(schedule, expected):
    for step, rate in expected.items():
        assert schedule(step) == pytest.approx(rate, abs=1e-15), step


@pytest.mark.torch
def test_schedules_match_the_pytorch_equivalents_of_their_docstrings():
    torch = pytest.importorskip("torch")
    of = torch.optim.lr_scheduler

    def warm_up(optimizer):
        first = of.LinearLR(optimizer, start_factor=1 / 5, total_iters=4)
        return of.SequentialLR(optimizer, [first, of.StepLR(optimizer, 3, gamma=0.5)], milestones=[4])

    pairs = [
        (Linear(0.3, 8, 0.25), lambda o: of.LinearLR(o, start_factor=1, end_factor=0.25, total_iters=8)),
        (Cosine(0.3, 8, 0.1), lambda o: of.CosineAnnealingLR(o, T_max=8, eta_min=0.03)),
        (Step(0.3, 3, 0.5), lambda o: of.StepLR(o, 3, gamma=0.5)),
        (Exponential(0.3, 0.9), lambda o: of.ExponentialLR(o, 0.9)),
        (WarmUp(Step(0.3, 3, 0.5), 4), warm_up),
    ]
    for ours, make in pairs:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        theirs = make(optimizer)
        for step in range(8):
            assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"]), (ours, step)
            optimizer.step()
            theirs.step()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant", Constant(0.1)),
        ("constant()", Constant(0.1)),
        ("linear", Linear(0.1, 1000)),
        ("linear(0.5)", Linear(0.1, 1000, 0.5)),
        ("cosine", Cosine(0.1, 1000)),
        (" cosine ( 0.01 ) ", Cosine(0.1, 1000, 0.01)),
        ("step(30)", Step(0.1, 30)),
        ("step(30,0.5)", Step(0.1, 30, 0.5)),
        ("step(2 epochs, 0.5)", Step(0.1, 100, 0.5)),
        ("step(30 steps)", Step(0.1, 30)),
        ("exponential(0.99)", Exponential(0.1, 0.99)),
        ("exponential(9.9e-1, 1 epoch)", Exponential(0.1, 0.99, 50)),
        ("warmup(100)+cosine", WarmUp(Cosine(0.1, 900), 100)),
        ("warmup(2epochs) + linear(0.1)", WarmUp(Linear(0.1, 900, 0.1), 100)),
        ("warmup(100)", WarmUp(Constant(0.1), 100)),
    ],
)
def test_text_form(text, expected):
    assert parse_schedule(text, 0.1, total_steps=1000, steps_per_epoch=50) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'' is not a schedule; the forms are constant, linear"),
        ("cosine+warmup(3)", r"'cosine\+warmup\(3\)' is not a schedule"),
        ("warmup(3)+warmup(3)+cosine", r"is not a schedule"),
        ("sawtooth", r"There is no schedule 'sawtooth' \(in 'sawtooth'\); the forms are constant"),
        ("step", r"'step' gives step 0 values, which do not fit; the forms are constant"),
        ("cosine(1,2)", r"gives cosine 2 values"),
        ("step(3.5)", r"'3.5' in 'step\(3.5\)' is not a count such as 100"),
        ("step(0)", r"A stage of a step schedule is 0 steps long; it needs at least 1"),
        ("warmup(0)+cosine", r"A warm-up is 0 steps long"),
        ("linear(half)", r"'half' in 'linear\(half\)' is not a number"),
        ("linear(-1)", r"end_factor of the schedule is -1.0; it must be a finite number of at least 0"),
        ("exponential(nan)", r"factor of the schedule is nan"),
        ("warmup(1000)+cosine", r"takes 1000 of 1000 steps; make it shorter"),
    ],
)
def test_invalid_text(text, message):
    with pytest.raises(OptionError, match=message):
        parse_schedule(text, 0.1, total_steps=1000, steps_per_epoch=50)


def test_text_that_needs_an_unknown_number_of_steps():
    with raises_sentence("schedule_steps_unknown", what="cosine"):
        parse_schedule("warmup(3)+cosine", 0.1)
    with raises_sentence("epochs_unknown", what="step(3 epochs)"):
        parse_schedule("step(3 epochs)", 0.1)
    assert parse_schedule("warmup(3)+step(7)", 0.1) == WarmUp(Step(0.1, 7), 3)


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, "fast", None])
def test_invalid_learning_rate(rate):
    with raises_sentence("learning_rate", what="The learning rate"):
        Constant(rate)


def test_resolve_takes_none_text_and_functions():
    assert resolve_schedule(None, 0.1) == Constant(0.1)
    assert resolve_schedule("cosine", 0.1, total_steps=5) == Cosine(0.1, 5)
    assert resolve_schedule(Step(0.3, 2), 0.1)(0) == 0.3
    assert resolve_schedule(lambda step: 2, 0.1)(0) == 2.0
    with pytest.raises(OptionError, match="not a int"):
        resolve_schedule(3, 0.1)


def test_an_invalid_rate_of_a_function_is_reported_with_its_step():
    schedule = resolve_schedule(lambda step: 1.0 - step, 0.1)
    assert schedule(1) == 0.0
    with raises_sentence("learning_rate", what="The learning rate that the schedule returned for step 2", got=-1.0):
        schedule(2)


# --- schedules that vanish before the training ends

VANISHING = [
    ("step(3, 0.1)", 300, 28),
    ("step(3, 0.1)", 28, 28),
    ("warmup(10)+step(3, 0.1)", 300, 38),
    ("exponential(0.5)", 100, 31),
    ("step(3 epochs, 0.1)", 900, 271),
    (Cosine(0.1, steps=10), 1000, 11),
    (lambda step: 0.1 * 0.1**step, 100, 10),
]


@pytest.mark.parametrize(("schedule", "total", "first"), VANISHING)
def test_a_schedule_that_vanishes_early_gets_a_hint(schedule, total, first):
    rate = resolve_schedule(schedule, 0.1, total_steps=total, steps_per_epoch=10)
    hint = vanishing_hint(schedule, rate, total, 10)
    assert f"is at a billionth of its rate from step {first} of {total} on (epoch {(first - 1) // 10 + 1})" in hint
    if isinstance(schedule, str) and "epoch" not in schedule:
        assert "it counts steps, and an epoch has 10; to count epochs, write" in hint


@pytest.mark.parametrize(
    ("schedule", "total"),
    [
        ("step(3, 0.1)", 27),
        ("step(3 epochs, 0.1)", 270),
        *((text, total) for text in ("cosine", "linear", "polynomial(4)", "one_cycle") for total in (10, 10**6)),
        ("warmup(5)+cosine", 10**5),
        ("constant", 100),
        (lambda step: 0.0, 100),
    ],
)
def test_a_schedule_that_ends_with_the_training_gets_no_hint(schedule, total):
    rate = resolve_schedule(schedule, 0.1, total_steps=total, steps_per_epoch=10)
    assert vanishing_hint(schedule, rate, total, 10) == ""


def test_fit_warns_of_a_schedule_that_counts_steps():
    x, y = np.ones((40, 4), np.float32), np.arange(40) % 3
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="cross_entropy")
    with warns_sentence("schedule_trains_nothing", schedule="'step(3, 0.1)'", steps=2, advice="step(3 epochs, 0.1)"):
        trainer.fit(x, y, epochs=20, schedule="step(3, 0.1)", progress=False)
    trainer.fit(x, y, epochs=20, schedule="step(3 epochs, 0.1)", progress=False)  # warnings are errors here


@pytest.mark.parametrize(("rising", "least"), [(0.3, 4), (0.5, 3), (0.25, 5), (0.9, 2), (0.01, 101)])
def test_a_cycle_needs_a_step_to_rise_in(rising, least):
    assert all(0 < OneCycle(0.1, least, rising)(step) <= 0.1 for step in range(least + 2))
    for steps in range(max(0, least - 3), least):
        with pytest.raises(OptionError, match=f"rising={rising} needs at least {least} steps, but has {steps};"):
            OneCycle(0.1, steps, rising)
