"""Trainings of random models agree with PyTorch's, and the comparison detects wrong ones."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

torch = pytest.importorskip("torch")
from differential import __main__ as command  # noqa: E402
from differential import combination, double, reference  # noqa: E402
from differential.combination import PER_MODEL, run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
SAMPLE = [0, 1, 2, 11, 12, 13, 24, 25, 26, 27]
ALL = 300


@pytest.fixture(autouse=True)
def quiet():
    """Exporters log; one thread is as fast for small models."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def check(seed: int) -> None:
    outcome = run(seed)
    assert outcome.kind not in ("different", "error"), outcome
    if outcome.kind == "refused":
        assert any(reason in outcome.text for reason in command.REASONS), outcome


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_combination_trains_as_in_pytorch(seed):
    check(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("model", range(ALL // PER_MODEL))
def test_combinations_train_as_in_pytorch(model):
    for seed in range(model * PER_MODEL, (model + 1) * PER_MODEL):
        check(seed)


def wrong_rate(setup: combination.Setup, result: reference.Result) -> reference.Result:
    rates = [rate * 1.001 for rate in setup.plan.rates]
    return TRAIN(setup._replace(fit=None, plan=dataclasses.replace(setup.plan, rates=rates)))


def wrong_loss(setup: combination.Setup, result: reference.Result) -> reference.Result:
    result.losses[-1] *= 1.001
    return result


def wrong_weight(setup: combination.Setup, result: reference.Result) -> reference.Result:
    name = setup.layout.order[0]
    result.tensors[name] = result.tensors[name].copy()
    result.tensors[name].reshape(-1)[-1] += 1e-3
    return result


TRAIN = combination._train


@pytest.mark.parametrize("change", [wrong_rate, wrong_loss, wrong_weight])
def test_a_small_difference_is_found(change, monkeypatch):
    assert run(0).kind == "equal"
    monkeypatch.setattr(combination, "_train", lambda setup: change(setup, TRAIN(setup)))
    assert run(0).kind == "different"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [3706, 3958])  # a tie of two negatives, signs of gradients that RMSprop enlarges
def test_a_rare_event_is_chaos_only_where_the_step_graph_is_right_in_double(seed, monkeypatch):
    kind = run(seed).kind
    if kind == "equal":
        pytest.skip("the rounding of this CPU does not cause it")
    assert kind == "chaotic"
    right = double.train
    monkeypatch.setattr(
        double,
        "train",
        lambda model, plan, options: right(
            model, dataclasses.replace(plan, rates=[rate * 1.001 for rate in plan.rates]), options
        ),
    )
    assert run(seed).kind == "different"


def test_the_step_graph_in_double_trains_to_the_truth():
    model = combination.model_of(0)
    for seed in (1, 4, 5, 9):  # without masks and weights of examples; two of them with micro-batches
        setup = combination._draw(combination.Draw(27, seed), model, seed)
        truth = reference.train(model.module, setup.layout, setup.initial, setup.plan, torch.float64)
        assert combination._right_in_double(setup, truth), seed


def test_the_command_continues_its_journal(tmp_path, capsys):
    journal, page = tmp_path / "j.jsonl", tmp_path / "page.md"
    page.write_text(f"before\n{command.BEGIN}\n{command.END}\nafter\n")
    assert command.main(["--seeds", "0:2", "--journal", str(journal)]) == 0
    with journal.open("a") as file:
        file.write('{"seed": 2, "ki')  # a run that was killed while it wrote
    assert command.main(["--seeds", "0:4", "--journal", str(journal), "--page", str(page)]) == 0
    assert sorted(command.read(journal)) == [0, 1, 2, 3]
    assert "4 combinations" in capsys.readouterr().out
    lines = page.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert any(line.startswith("| 4 | 1 |") for line in lines)
    seeds = [
        json.loads(line)["seed"]
        for line in journal.read_text().splitlines()
        if line.startswith("{") and line[-1] == "}"
    ]
    assert seeds == [0, 1, 2, 3]
