"""PyTorch as the second oracle of the sweep: a sample here, the rest in the sweep itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")

from autodiff.sweep import by_torch as sweep_torch
from autodiff.sweep.run import run_torch, usable_tests
from autodiff.sweep.subjects import Subject, subjects

pytestmark = pytest.mark.torch


def _subjects(operator: str) -> list[Subject]:
    first = (next(subjects(test), None) for test in usable_tests(operator))
    return [subject for subject in first if subject is not None]


@pytest.mark.parametrize("operator", list(sweep_torch.FUNCTIONS))
def test_a_gradient_of_every_operator_in_the_table(operator: str) -> None:
    outcome = next(outcome for subject in _subjects(operator) if (outcome := run_torch(subject)) is not None)
    assert not outcome.failure
    assert outcome.worst < 1e-3


def test_a_wrong_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweep_torch.FUNCTIONS, "Tanh", lambda a, x: x.tanh().detach() + 0 * x)
    outcome = run_torch(_subjects("Tanh")[0])
    assert outcome is not None
    assert "x_grad differs by" in outcome.failure
    assert np.isfinite(outcome.worst)


def test_what_pytorch_does_not_have_is_left_out() -> None:
    assert run_torch(_subjects("Resize")[0]) is None
    subject = _subjects("Tanh")[0]
    twice = dataclasses.replace(subject, model=type(subject.model)())
    twice.model.CopyFrom(subject.model)
    twice.model.graph.node.append(subject.model.graph.node[0])
    assert sweep_torch.torch_gradients(twice, {}) is None
