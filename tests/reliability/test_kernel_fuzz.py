"""The native kernels under extreme and random calls: computed or refused, without a crash of the process."""

import sys

import numpy as np
import pytest

from reliability import fuzz_kernels

RANDOM, SEED = 250, 20_000


def run(instruction_set, cases, count, seed=0):
    outcomes = fuzz_kernels.Outcomes()
    fuzz_kernels.run_cases(cases, count, seed, instruction_set, outcomes)
    assert sum(outcomes.counts.values()) == count
    assert not outcomes.faults, "\n".join([outcomes.table(), *outcomes.faults])
    return outcomes


def require(instruction_set):
    if instruction_set not in fuzz_kernels.available_sets():
        pytest.skip(f"this build or this CPU lacks {instruction_set}")


@pytest.mark.reliability
@pytest.mark.parametrize("instruction_set", fuzz_kernels.INSTRUCTION_SETS)
def test_random_calls_are_computed_or_refused(instruction_set):
    require(instruction_set)
    outcomes = run(instruction_set, "random", RANDOM, SEED)
    ended = {outcome for _, outcome in outcomes.counts}
    assert ended == {"agrees", "computed", "refused"}  # some of each, so that each was tried


@pytest.mark.reliability
def test_every_extreme_number_in_every_attribute_of_windows():
    outcomes = run(fuzz_kernels.available_sets()[-1], "sweep", len(fuzz_kernels.cases().sweep()))
    assert {operator for operator, _ in outcomes.counts} == {
        "Conv",
        "ConvInputGradient",
        "ConvWeightGradient",
        "MaxPoolGradient",
    }


def test_cases_are_the_same_every_time():
    for number in range(20):
        one, other = (fuzz_kernels.cases().draw_case(7, number) for _ in range(2))
        assert (one.operator, one.attributes) == (other.operator, other.attributes)
        for a, b in zip(one.feeds.values(), other.feeds.values(), strict=True):
            np.testing.assert_array_equal(a, b)


class Ends:
    """A fake worker process with a given output."""

    def __init__(self, monkeypatch, code):
        monkeypatch.setattr(fuzz_kernels, "_command", lambda *_: [sys.executable, "-c", code])
        monkeypatch.setattr(fuzz_kernels, "SECONDS", 1)
        self.found = list(fuzz_kernels._worker("random", 0, 2, 0, "baseline"))


def test_a_dead_worker_counts_as_a_crash(monkeypatch):
    code = "import os; print('case 0 Conv', flush=True); os.kill(os.getpid(), 11)"
    ((number, operator, outcome, detail),) = Ends(monkeypatch, code).found
    assert (number, operator, outcome) == (0, "Conv", "crashed")
    assert "-11" in detail


def test_a_silent_worker_counts_as_hanging(monkeypatch):
    code = "import time; print('case 0 Conv', flush=True); time.sleep(60)"
    assert [found[2] for found in Ends(monkeypatch, code).found] == ["hangs"]


def test_other_results_and_errors_are_faults():
    outcomes = fuzz_kernels.Outcomes()
    for outcome in fuzz_kernels.OUTCOMES:
        outcomes.add("baseline", "Conv", outcome, "case 0")
    assert len(outcomes.faults) == 4
    assert outcomes.table().splitlines()[1].split() == ["Conv", *["1"] * 7]
