"""Gradient sums during the backward pass: the same bits and order, and no rank waits forever."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import onnxtrain
from distributed.processes import mpiexec, needs_kernels, needs_mpi, run_script, script
from onnxtrain.distributed.reduction import Reduction
from onnxtrain.errors import ParallelError


class Overlapping(onnxtrain.distributed.Single):
    """Communicator of one process with overlap."""

    overlap = True
    aborted = False

    def abort(self):
        self.aborted = True


def in_place(number, addresses):
    return True


def test_groups_are_reduced_in_order_in_another_thread():
    done = []
    groups = [lambda number=number: done.append((number, threading.current_thread().name)) for number in range(4)]
    reduction = Reduction(Overlapping(), groups, in_place, overlap=True)
    for _ in range(2):
        began = time.perf_counter()
        with reduction.overlapping(2):
            for number in (1, 0, 2, 1, 0):  # groups 1 and 0 twice, group 2 once
                reduction._on_ready(number, None, 0)
        assert [number for number, _ in done] == [0, 1, 2, 3]
        assert [name.startswith("onnxtrain-reduction") for _, name in done] == [True, True, False, False]
        computed, summed = reduction.last
        assert began <= computed <= summed <= time.perf_counter()
        done.clear()


def test_without_another_thread_all_groups_are_reduced_at_the_end():
    done = []
    reduction = Reduction(
        onnxtrain.distributed.Single(), [lambda: done.append(0), lambda: done.append(1)], in_place, overlap=False
    )
    with reduction.overlapping(1):
        reduction._on_ready(1, None, 0)
        reduction._on_ready(0, None, 0)
        assert not done
    assert done == [0, 1]


def test_an_error_in_the_other_thread_is_raised_in_this_one():
    def lost():
        raise ParallelError("Rank 1 ended: no more.")

    reduction = Reduction(Overlapping(), [lost, lambda: None], in_place, overlap=True)
    with pytest.raises(ParallelError, match="Rank 1 ended"), reduction.overlapping(1):
        reduction._on_ready(0, None, 0)


def test_a_failed_computation_aborts_the_waiting_reduction():
    communicator = Overlapping()

    def waits():
        while not communicator.aborted:
            time.sleep(0.001)

    reduction = Reduction(communicator, [waits], in_place, overlap=True)

    def step():
        with reduction.overlapping(1):
            reduction._on_ready(0, None, 0)
            raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        step()
    assert communicator.aborted
    assert reduction._started[0].done()


def test_an_error_in_the_notification_is_raised_unchanged():
    def copy(number, addresses):
        raise ParallelError("There is no room.")

    reduction = Reduction(Overlapping(), [lambda: None], copy, overlap=True)

    def step():
        with reduction.overlapping(1):
            assert reduction._on_ready(0, None, 0) == 1
            raise onnxtrain.errors.StepError("the node failed")

    with pytest.raises(ParallelError, match="no room"):
        step()


SETUP = """
    import os, sys, time
    import numpy as np
    import onnxtrain
    from onnxtrain.training.executors import data_parallel
    data_parallel.BUCKET_BYTES = 4 * 32 * 32
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 8)).astype(np.float32), rng.integers(0, 4, 50)
    def trainer(**options):
        return onnxtrain.Trainer(onnxtrain.examples.mlp((8, 32, 32, 32, 4)), loss="softmax_cross_entropy",
            **{"optimizer": onnxtrain.Adam(1e-2), **options}, threads=1)
"""


@needs_mpi
@needs_kernels
def test_sums_beside_the_backward_pass_change_no_bit(tmp_path):
    run_script(
        tmp_path,
        2,
        SETUP
        + """
    mpi, after = onnxtrain.distributed.MPI(), onnxtrain.distributed.MPI(overlap=False)
    assert mpi.overlap and not after.overlap
    for options in ({"clip_norm": 0.1}, {"accumulate": 3}):
        parts = mpi.size * options.get("accumulate", 1)
        several = [trainer(distributed=mpi, **options), trainer(distributed=after, **options),
                   trainer(distributed=onnxtrain.distributed.MPI("fast"), **options)]
        if "clip_norm" not in options:
            several.append(trainer(distributed=onnxtrain.Distributed(mpi, shard_states=True), **options))
        alone = trainer(**options | {"accumulate": parts})
        for rows in (50, 31, 1, 2):
            losses = [subject.train_step(x[:rows], y[:rows]) for subject in (alone, *several)]
            assert len(set(losses[1:])) == 1, (options, rows, losses)
            assert "accumulate" in options or losses[0] == losses[1]
        for subject in several:
            reduction = subject.executor._reduction
            begun = len(reduction._groups) if subject._communicator.overlap else 0
            assert (len(reduction._groups), len(reduction._started)) == (3, begun), (options, subject._communicator)
            for name, array in subject.get_weights().items():
                np.testing.assert_array_equal(array, several[0].get_weights()[name], err_msg=name)
        for name, array in alone.get_weights().items():
            if "accumulate" in options:
                np.testing.assert_allclose(array, several[0].get_weights()[name], rtol=1e-4, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(array, several[0].get_weights()[name], err_msg=name)
    """,
    )


@needs_mpi
@needs_kernels
def test_synchronized_batch_norm_does_not_overlap_with_gradient_sums(tmp_path):
    run_script(
        tmp_path,
        2,
        SETUP
        + """
    x = rng.normal(size=(6, 3, 32, 32)).astype(np.float32)
    found = []
    for overlap in (True, False):
        mpi = onnxtrain.distributed.MPI(overlap=overlap)
        subject = onnxtrain.Trainer(onnxtrain.examples.small_resnet(), loss="softmax_cross_entropy", batch_norm="sync",
            optimizer="sgd(lr=0.1)", threads=1, distributed=mpi)
        for rows in (6, 1):
            subject.train_step(x[:rows], y[:rows] % 2)
        assert len(subject.executor._buckets) > 1
        found.append(subject.get_weights())
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], err_msg=name)
    """,
    )


FAILS = """
    how = sys.argv[1]
    mpi = onnxtrain.distributed.MPI(timeout=60)
    subject = trainer(distributed=mpi)
    subject.train_step(x, y)
    mpi.timeout = 2 if how == "hangs" else 60
    if mpi.rank == 1:
        def fails(number, addresses):
            if number == 1 and how == "hangs":
                time.sleep(30)
            if number == 1:
                raise onnxtrain.errors.ParallelError("no more room")
            return True
        subject.executor._reduction._announced = fails
    subject.train_step(x, y)
"""


@needs_mpi
@needs_kernels
@pytest.mark.parametrize(
    ("how", "sentence"),
    [("raises", "Rank 1 ended: no more room"), ("hangs", "Rank 1 did not answer for 2 s, in all_reduce_")],
)
def test_a_rank_that_fails_in_its_backward_pass_ends_all(tmp_path, how, sentence):
    began = time.monotonic()
    done = mpiexec(2, script(tmp_path, SETUP + FAILS), how)
    assert done.returncode
    assert sentence in done.stderr
    assert time.monotonic() - began < 29


@needs_kernels
def test_more_than_one_type_has_buckets_of_its_own():
    from onnxtrain.training.executors.data_parallel import buckets

    made = onnxtrain.Trainer(onnxtrain.examples.mlp((8, 32, 4)), loss="softmax_cross_entropy")
    found = buckets(made.objective, 2)
    assert sorted(name for bucket in found for name in bucket) == sorted(made.parameters)
    assert found[0][0].startswith("layer2")
    assert np.all([name.startswith("layer1") for name in found[0][-2:]])


@pytest.mark.parametrize(("processes", "count"), [(2, 4), (64, 4), (128, 2), (256, 1), (1024, 1)])
def test_buckets_grow_with_the_number_of_processes_so_that_messages_stay_large(monkeypatch, processes, count):
    from onnxtrain.training.executors import data_parallel

    made = onnxtrain.Trainer(onnxtrain.examples.mlp((64, 64, 64, 64, 64)), loss="softmax_cross_entropy")
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 4 * 64 * 64)
    found = data_parallel.buckets(made.objective, processes)
    assert len(found) == count
    assert sorted(name for bucket in found for name in bucket) == sorted(made.parameters)
    for bucket in found[:-1]:
        sent = sum(made.parameters[name].nbytes for name in bucket) / processes
        assert sent >= data_parallel.BUCKET_BYTES / data_parallel.FEW
