"""``batch_norm="sync"``: processes use the statistics of all, like one process with the whole batch."""

import dataclasses

import numpy as np
import pytest

import onnxtrain
from distributed.processes import mpiexec, needs_mpi, run_script, script
from onnxtrain.distributed import Single
from onnxtrain.errors import OptionError
from sentences import raises_sentence

SETUP = """
    import numpy as np
    import onnxtrain
    from onnxtrain.training.executors import data_parallel
    data_parallel.BUCKET_BYTES = 1 << 12  # several of them, which others send while the backward pass goes on
    mpi = onnxtrain.distributed.MPI()
    rng = np.random.default_rng(0)
    x = rng.normal(2.0, 3.0, size=(12, 3, 16, 16)).astype(np.float32)
    x *= np.linspace(0.2, 2, 12, dtype=np.float32).reshape(-1, 1, 1, 1)  # the parts differ
    y = rng.integers(0, 2, 12)
    model = onnxtrain.examples.small_resnet()
    def trainer(batch_norm, **options):
        return onnxtrain.Trainer(model, loss="softmax_cross_entropy", batch_norm=batch_norm, threads=1,
            **{"optimizer": "sgd(lr=0.05)", **options})
    def close(one, other, tolerance=1e-4):
        for name, array in one.weights.items():
            scale = tolerance * max(1e-2, np.abs(array).max())
            np.testing.assert_allclose(other.weights[name], array, rtol=tolerance, atol=scale, err_msg=name)
    def agree(one):
        for values in zip(*mpi.gather_objects([one.weights[name].tobytes() for name in one.weights])):
            assert len(set(values)) == 1
"""


@needs_mpi
@pytest.mark.parametrize(
    "options",
    ["", "distributed=onnxtrain.Distributed(mpi, shard_states=True)", "clip_norm=0.5", "recompute='*'"],
)
def test_several_steps_are_those_of_one_process_with_the_whole_batch(tmp_path, options):
    """Batches have 12, 7 (4 and 3), 1 (none in one process) and 12 examples."""
    given = f"dict({options})"
    run_script(
        tmp_path,
        2,
        SETUP
        + f"""
    together, options = trainer("sync", **{{"distributed": mpi, **{given}}}), {given}
    options.pop("distributed", None)
    alone, apart = trainer("train", **options), trainer("train", distributed=mpi, **options)
    assert len(alone.objective.statistics) >= 4
    for rows in (12, 7, 1, 12):
        losses = [subject.train_step(x[:rows], y[:rows]) for subject in (alone, together)]
        apart.train_step(x[:rows], y[:rows])
        np.testing.assert_allclose(*losses, rtol=1e-4)
    close(alone, together)
    agree(together)
    try:
        close(alone, apart)
    except AssertionError:
        pass
    else:
        raise AssertionError("statistics of each process give the same: the test shows nothing")
    """,
    )


@needs_mpi
def test_three_processes_with_micro_batches_of_different_numbers(tmp_path):
    """The processes split 5 examples into 2, 2 and 1 micro-batches, and 2 examples into 1, 1 and none."""
    run_script(
        tmp_path,
        3,
        SETUP
        + """
    together = trainer("sync", distributed=mpi, accumulate=4)
    for rows in (12, 9, 5, 2):
        together.train_step(x[:rows], y[:rows])
        agree(together)
    # Micro-batches of all processes together are those of one.
    order = [0, 3, 6, 1, 4, 7, 2, 5, 8]
    together, alone = trainer("sync", distributed=mpi, accumulate=3), trainer("train", accumulate=3)
    for _ in range(3):
        together.train_step(x[:9], y[:9])
        alone.train_step(x[order], y[order])
    close(alone, together)
    """,
    )


@needs_mpi
def test_a_model_of_a_fixed_batch_size_takes_statistics_of_padded_batches(tmp_path):
    """The first process pads 3 examples to a batch of 4, like a single process, and the second has no examples."""
    run_script(
        tmp_path,
        2,
        SETUP
        + """
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    together, alone = trainer("sync", distributed=mpi), trainer("train")
    for _ in range(2):
        together.train_step(x[:3], y[:3])
        alone.train_step(x[:3], y[:3])
    close(alone, together)
    for rows in (8, 7):
        together.train_step(x[:rows], y[:rows])
        agree(together)
    """,
    )


@needs_mpi
def test_weights_of_examples_and_sums_count_right(tmp_path):
    run_script(
        tmp_path,
        2,
        SETUP
        + """
    weights = np.linspace(0, 3, 12).astype(np.float32)
    losses = ["softmax_cross_entropy", onnxtrain.losses.SoftmaxCrossEntropy(reduction="sum", weight=0.1)]
    def trainer(batch_norm, loss, **options):
        return onnxtrain.Trainer(
            model, loss=loss, batch_norm=batch_norm, threads=1, optimizer="sgd(lr=0.05)", **options)
    for loss in losses:
        together, alone = trainer("sync", loss, distributed=mpi), trainer("train", loss)
        for subject in (together, alone):
            for rows in (12, 5):
                subject.train_step(x[:rows], y[:rows], sample_weight=weights[:rows])
        close(alone, together)
    """,
    )


@needs_mpi
def test_an_epoch_with_checkpoints_continues_in_one_process(tmp_path):
    run_script(
        tmp_path,
        2,
        SETUP
        + f"""
    folder = {str(tmp_path / "kept")!r}
    together, alone = trainer("sync", distributed=mpi), trainer("sync")
    together.fit(x, y, epochs=2, batch_size=5, checkpoint=folder, progress=False)
    alone.fit(x, y, epochs=2, batch_size=5, progress=False)
    close(alone, together)
    if not mpi.rank:
        resumed = trainer("sync")
        history = resumed.fit(x, y, epochs=3, batch_size=5, checkpoint=folder, resume=True, change="epochs",
            progress=False)
        assert [row["epoch"] for row in history.rows] == [1, 2, 3]
    """,
    )


@needs_mpi
def test_a_process_that_ends_within_a_step_is_reported(tmp_path):
    """The other process waits within ONNX Runtime, and raises the communicator's error."""
    done = mpiexec(
        2,
        script(
            tmp_path,
            SETUP
            + """
    from onnxtrain.errors import ParallelError
    together, whole = trainer("sync", distributed=mpi), mpi.all_reduce_
    together.train_step(x, y)
    calls = []
    def stop(array):
        calls.append(array.size)
        if mpi.rank == 0 and len(calls) == 3:
            raise RuntimeError("out of luck")
        whole(array)
    mpi.all_reduce_ = stop
    try:
        together.train_step(x, y)
    except ParallelError as error:
        print(mpi.rank, error, flush=True)
        raise
    """,
        ),
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["1 Rank 0 ended: out of luck"], done.stderr
    assert done.stderr.count("RuntimeError: out of luck") == 1


def resnet(**options):
    return onnxtrain.Trainer(onnxtrain.examples.small_resnet(), loss="softmax_cross_entropy", **options)


def test_one_process_trains_as_with_its_own_statistics():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3, 16, 16)).astype(np.float32), rng.integers(0, 2, 6)
    one, other = resnet(batch_norm="sync"), resnet(batch_norm="train")
    for trainer in (one, other):
        trainer.train_step(x, y)
    for name in one.weights:
        np.testing.assert_array_equal(one.weights[name], other.weights[name], err_msg=name)


def test_without_kernels_it_is_refused_where_there_are_several_processes():
    two = Single()
    two.size = 2
    options = onnxtrain.RuntimeOptions(kernels=False)
    with raises_sentence("sync_needs_kernels"):
        resnet(batch_norm="sync", distributed=two, runtime=options)
    alone = resnet(batch_norm="sync", runtime=options).config
    with pytest.raises(OptionError, match="needs the native kernels"):
        dataclasses.replace(alone, distributed=onnxtrain.Distributed(two))
