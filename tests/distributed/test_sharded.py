"""Sharded optimizer states: the same bits as whole states, less memory, checkpoints for any number of ranks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxtrain
from distributed.processes import mpiexec, needs_kernels, needs_mpi, run_script, script
from distributed.threads import in_threads
from onnxtrain.errors import OptionError
from onnxtrain.graph import Builder
from onnxtrain.lowering.training_info.update import row_squares
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session
from onnxtrain.training.executors.row_squares import Layout, RowSquares

SETUP = """
    import json, os, sys
    import numpy as np
    import onnxtrain
    mpi = onnxtrain.distributed.MPI()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 50)
    def trainer(shard, gradients=False, communicator=mpi, **options):
        return onnxtrain.Trainer(onnxtrain.examples.lenet5(), loss="softmax_cross_entropy", threads=1,
            distributed=onnxtrain.Distributed(communicator, shard_states=shard, shard_gradients=gradients),
            **{"optimizer": onnxtrain.Adam(1e-3), **options})
    def equal(one, other, **tolerance):
        for name, array in one.items():
            if tolerance:
                np.testing.assert_allclose(array, other[name], err_msg=name, **tolerance)
            else:
                np.testing.assert_array_equal(array, other[name], err_msg=name)
"""


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_change_no_bit_and_take_less_memory(tmp_path, ranks):
    run_script(
        tmp_path,
        ranks,
        SETUP
        + """
    for options in ({}, {"optimizer": "adamw(lr=1e-3, weight_decay=0.1)", "accumulate": 2},
                    {"clip_value": 1e-3}, {"optimizer": onnxtrain.Momentum(0.1, alpha=0.9), "freeze": "conv*"},
                    {"masks": {"conv1.weight": rng.random((6, 1, 5, 5)) > 0.5}}):
        whole, shares = trainer(False, **options), trainer(True, **options)
        for rows in (50, 31, 2):
            assert whole.train_step(x[:rows], y[:rows]) == shares.train_step(x[:rows], y[:rows]), options
        equal(whole.get_weights(), shares.get_weights())
        equal(whole.executor.checkpoint_states(), shares.executor.checkpoint_states())
        assert shares.executor.checkpoint_states().keys() == whole.executor.checkpoint_states().keys()
        model, other = whole.training_model(), shares.training_model()
        assert {tensor.name: tensor for entry in model.training_info for tensor in entry.algorithm.initializer} == {
            tensor.name: tensor for entry in other.training_info for tensor in entry.algorithm.initializer
            if "accumulated" not in tensor.name} | {
            tensor.name: tensor for entry in model.training_info for tensor in entry.algorithm.initializer
            if "accumulated" in tensor.name}
    elements = sum(array.size for array in whole.parameters.values())
    adam = trainer(True)
    adam.train_step(x, y)
    own = sum(array.nbytes for name, array in adam.executor._share.items() if name.endswith(("/V", "/H")))
    assert abs(own - 8 * elements / mpi.size) < 64 * 2 * 12 * mpi.size
    """,
    )


CLIPPED = """
    import itertools
    import random
    import numpy as np
    import onnxtrain
    from onnxtrain import RuntimeOptions
    mpi = onnxtrain.distributed.MPI()
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 100, (21, 9))
    models = {
        "lenet5": (onnxtrain.examples.lenet5, rng.normal(size=(21, 1, 28, 28)).astype(np.float32), 10),
        "mlp": (lambda: onnxtrain.examples.mlp((33, 70, 129, 5)), rng.normal(size=(21, 33)).astype(np.float32), 5),
        "long row": (lambda: onnxtrain.examples.mlp((20001, 1, 3)), rng.normal(size=(21, 20001)).astype("f4"), 3),
        "transformer": (onnxtrain.examples.small_transformer, [tokens, np.ones_like(tokens)], 4),
    }
    whole = onnxtrain.Distributed(mpi)
    shares = (onnxtrain.Distributed(mpi, shard_states=True),
              onnxtrain.Distributed(mpi, shard_states=True, shard_gradients=True))
    clipped = 0
    cases = list(itertools.product(
        models, ("adamw(lr=1e-3, weight_decay=0.1)", "sgd(lr=0.1)"), (1e-3, 0.7, 1e3), (True, False)
    ))
    random.Random(0).shuffle(cases)
    for name, optimizer, bound, kernels in cases[mpi.size % 3 :: 3]:  # each number of processes has a third
        make, x, classes = models[name]
        y = np.arange(21) % classes
        rows = lambda count: [part[:count] for part in x] if isinstance(x, list) else x[:count]
        options = RuntimeOptions(threads=1, kernels=kernels)
        one, *others = [
            onnxtrain.Trainer(make(), loss="softmax_cross_entropy", optimizer=optimizer, distributed=several,
                clip_norm=bound, runtime=options)
            for several in (whole, *(shares if kernels else shares[:1]))
        ]
        for count in (21, 13, 1):
            losses = {trainer.train_step(rows(count), y[:count]) for trainer in (one, *others)}
            assert len(losses) == 1, (name, optimizer, bound, kernels, losses)
        for other in others:
            for key, value in one.get_weights().items():
                np.testing.assert_array_equal(value, other.get_weights()[key], err_msg=f"{name} {bound} {key}")
"""


@needs_mpi
@needs_kernels
@pytest.mark.parametrize(
    "ranks",
    [2, pytest.param(3, marks=pytest.mark.thorough), pytest.param(4, marks=[pytest.mark.thorough, pytest.mark.sweep])],
)
def test_shares_change_no_bit_where_gradients_are_clipped_by_their_norm(tmp_path, ranks):
    run_script(tmp_path, ranks, CLIPPED)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float64)], ids=str)
def test_squares_of_shares_have_the_bits_of_whole_gradients(dtype, ranks):
    rng = np.random.default_rng(0)
    shapes = [(), (1,), (513,), (12, 12), (40, 1), (20001, 1), (3, 20000), (8, 3, 3, 3)]
    arrays = {str(shape): np.asarray(rng.normal(size=shape), dtype) for shape in shapes}
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="whole")
    op = Builder(graph, 18)
    graph.outputs.extend(row_squares(op, op.constant(array), array.shape).ir for array in arrays.values())
    for name, output in zip(arrays, graph.outputs, strict=True):
        output.name, output.type = name, ir.TensorType(ir.DataType.from_numpy(dtype))
    whole = create_session(ir.Model(graph, ir_version=8), RuntimeOptions(threads=1)).run(list(arrays), {})
    bucket = np.concatenate([array.reshape(-1) for array in arrays.values()])
    ends = np.cumsum([array.size for array in arrays.values()])
    layouts = [
        Layout(name, int(end) - array.size, array.shape)
        for end, (name, array) in zip(ends, arrays.items(), strict=True)
    ]
    shares = np.resize(bucket, -(-bucket.size // ranks) * ranks).reshape(ranks, -1)

    def work(rank):
        return RowSquares([layouts], rank, dtypes=[dtype], order=list(arrays)).add_up([shares[rank.rank]])

    for found in in_threads(ranks, work):
        for (name, own), value in zip(found.items(), whole, strict=True):
            np.testing.assert_array_equal(own.reshape(value.shape), value, err_msg=name)


FIT = """
    folder, shard, epochs = sys.argv[1], sys.argv[2] != "whole", int(sys.argv[3])
    subject = trainer(shard, dropout=True, gradients=sys.argv[2] == "gradients")
    subject.fit(x, y, epochs=epochs, batch_size=20, shuffle=True, checkpoint=folder, resume=True)
    if not mpi.rank:
        np.savez(f"{folder}-{epochs}.npz", **subject.get_weights())
    kept = subject.executor.checkpoint_states()
    if not mpi.rank:
        np.savez(f"{folder}-{epochs}-states.npz", **kept)
"""


@needs_mpi
@pytest.mark.thorough
def test_a_checkpoint_of_some_processes_resumes_on_any_number(tmp_path):
    import shutil

    def states(folder, epochs):
        with np.load(tmp_path / f"{folder}-{epochs}-states.npz") as file:
            return {name: file[name] for name in file}

    run_script(tmp_path, 3, SETUP + FIT, "kept", "shard", "1", cwd=tmp_path)
    others = (("two", 2, "gradients"), ("three", 3, "shard"), ("whole", 3, "whole"), ("one", 1, "whole"))
    for name, ranks, shard in (*others, ("gradients", 3, "gradients")):
        shutil.copytree(tmp_path / "kept", tmp_path / name)
        run_script(tmp_path, ranks, SETUP + FIT, name, shard, "3", cwd=tmp_path)
    three = states("three", 3)
    for same in ("whole", "gradients"):
        for name, array in states(same, 3).items():
            np.testing.assert_array_equal(array, three[name], err_msg=name)
    for other in ("two", "one"):  # the last bits of sums differ
        found = states(other, 3)
        assert found.keys() == three.keys()
        for name, array in found.items():
            np.testing.assert_allclose(array, three[name], rtol=1e-2, atol=1e-4, err_msg=f"{other} {name}")


@needs_mpi
def test_more_processes_than_cache_lines(tmp_path):
    run_script(
        tmp_path,
        4,
        SETUP
        + """
    x, y = np.eye(4, dtype=np.float32), np.arange(4) % 3
    subjects = [onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="softmax_cross_entropy",
        distributed=onnxtrain.Distributed(mpi, shard_states=shard)) for shard in (False, True)]
    for subject in subjects:
        for _ in range(3):
            subject.train_step(x, y)
    equal(subjects[0].get_weights(), subjects[1].get_weights())
    equal(subjects[0].executor.checkpoint_states(), subjects[1].executor.checkpoint_states())
    """,
    )


@needs_mpi
@needs_kernels
def test_shares_of_gradients_change_no_bit_and_take_less_memory(tmp_path):
    text = (
        SETUP
        + """
    import time
    from pathlib import Path
    from onnxtrain.training.executors import data_parallel
    data_parallel.BUCKET_BYTES = 1 << 15
    after = onnxtrain.distributed.MPI(overlap=False)
    for options in ({"communicator": after},
                    {"masks": {"conv1.weight": rng.random((6, 1, 5, 5)) > 0.5}, "freeze": "conv2*", "clip_norm": 0.5}):
        states, gradients = trainer(True, **options), trainer(True, gradients=True, **options)
        for rows in (50, 31, 1):
            assert states.train_step(x[:rows], y[:rows]) == gradients.train_step(x[:rows], y[:rows]), options
        equal(states.get_weights(), gradients.get_weights())
        equal(states.executor.checkpoint_states(), gradients.executor.checkpoint_states())
        steps = gradients.executor
        assert len(steps._buckets) >= 3 and not any(name.endswith("/accumulated") for name in steps.states)
        whole = sum(array.nbytes for array in states.executor._gradients)
        largest = max(array.nbytes for array in states.executor._gradients)
        assert sum(array.nbytes for array in steps._own) * mpi.size == whole
        assert len(steps._send_buffers) == (1 if "communicator" in options else 2)
        assert {array.nbytes for array in steps._send_buffers} == {largest}
    if mpi.rank:
        def fails(bucket):
            raise onnxtrain.errors.ParallelError("no more room")
        gradients.executor._cleared_buffer = fails
    try:
        gradients.train_step(x, y)
    except onnxtrain.errors.ParallelError as error:
        if mpi.rank:
            gradients._communicator.fail(str(error))
        assert str(error) == ("no more room" if mpi.rank else "Rank 1 ended: no more room"), error
        # Where one process ends like this, the launcher kills the others: not before all are through.
        (Path(sys.argv[1]) / f"rank {mpi.rank}").touch()
        end = time.monotonic() + 60
        while len(list(Path(sys.argv[1]).glob("rank *"))) < mpi.size and time.monotonic() < end:
            time.sleep(0.01)
        os._exit(0)
    raise AssertionError
    """
    )
    done = mpiexec(2, script(tmp_path, text), tmp_path)
    assert len(list(tmp_path.glob("rank *"))) == 2, done.stdout + done.stderr


class Two(onnxtrain.distributed.Single):
    """Stand-in for two ranks, up to the first communication."""

    size = 2


class Compressing(Two):
    """Stand-in for two ranks with compression."""

    compress = onnxtrain.distributed.TopK(0.1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimizer": onnxtrain.SSGD()}, "shard_states=True cuts weights at any element"),
        ({"optimizer": "lamb"}, "shard_states=True cuts weights at any element"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "shard_states=True clips by value or by norm"),
        ({"shard_gradients": True, "accumulate": 2}, "shard_gradients=True keeps no sums of micro-batches"),
        ({"shard_gradients": True, "communicator": Compressing()}, "shard_gradients=True does not keep all gradients"),
        (
            {"shard_gradients": True, "runtime": RuntimeOptions(kernels=False)},
            "shard_gradients=True needs the native kernels",
        ),
        ({"shard_gradients": True, "batch_norm": "sync"}, "makes processes wait for each other"),
        ({"shard_gradients": True, "shard_states": False}, "give shard_states=True, too"),
    ],
)
def test_options_that_exclude_sharding_are_refused(options, sentence):
    shards = {"communicator": Two(), "shard_states": True, **options}
    others = {name: shards.pop(name) for name in options if not hasattr(onnxtrain.Distributed, name)}
    with pytest.raises(OptionError, match=sentence):
        onnxtrain.Trainer(
            onnxtrain.examples.mlp((4, 3)),
            loss="softmax_cross_entropy",
            distributed=onnxtrain.Distributed(**shards),
            **others,
        )
