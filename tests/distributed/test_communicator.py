"""Every operation of a communicator: MPI in several processes, and a single process."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import onnxtrain
from distributed.processes import mpiexec, needs_mpi, run_script, script
from onnxtrain.distributed import Communicator, Single
from onnxtrain.errors import OptionError
from sentences import raises_sentence

OPERATIONS = """
    import sys
    import numpy as np
    from onnxtrain.distributed import MPI
    order = sys.argv[1]
    mpi = MPI(order)
    def of(rank, shape, dtype=np.float32):
        return np.array(np.random.default_rng(rank).normal(size=shape) * 100, dtype)
    def total(shape, dtype=np.float32):
        found = of(0, shape, dtype)
        for rank in range(1, mpi.size):
            found = np.asarray(found + of(rank, shape, dtype))
        return found
    def same(found, wanted):
        return np.array_equal(found, wanted) if order == "rank" else np.allclose(found, wanted, rtol=1e-4, atol=1e-3)
    for shape, dtype in [((), np.float64), ((3,), np.float32), ((70_001,), np.float32), ((300, 101), np.float64),
                         ((0,), np.float32), ((9,), np.int64), ((40_000,), np.float16)]:
        array = of(mpi.rank, shape, dtype)
        mpi.all_reduce_(array)
        if dtype is not np.float16 or order == "rank":
            assert same(array, total(shape, dtype)), (shape, dtype)
        for root in range(mpi.size):
            array = of(mpi.rank, shape, dtype)
            mpi.broadcast_(array, root)
            assert np.array_equal(array, of(root, shape, dtype)), (shape, dtype, root)
    for columns in (1, 30_000):
        rows = of(mpi.rank, (mpi.size, columns))
        mpi.reduce_scatter_(rows)
        assert same(rows[mpi.rank], total((mpi.size, columns))[mpi.rank])
        rows = np.zeros((mpi.size, columns), np.float32)
        rows[mpi.rank] = of(mpi.rank, columns)
        mpi.all_gather_(rows)
        assert np.array_equal(rows, [of(rank, columns) for rank in range(mpi.size)])
    assert mpi.gather_objects({"rank": "x" * mpi.rank}) == [{"rank": "x" * rank} for rank in range(mpi.size)]
    assert mpi.broadcast_object(["from", mpi.rank], 1) == ["from", 1]
    assert mpi.on_root(lambda: mpi.rank) == 0
    done = mpi.gather_objects(mpi.rank)
    if mpi.rank == 0:  # what several print may be mixed
        print(done)
"""


@needs_mpi
@pytest.mark.parametrize(("ranks", "order"), [(2, "rank"), (4, "rank"), (3, "fast")])
def test_every_operation_gives_what_it_says(tmp_path, ranks, order):
    printed = run_script(tmp_path, ranks, OPERATIONS, order)
    assert printed.splitlines() == [str(list(range(ranks)))]


FAILURES = """
    import os, signal, sys
    import numpy as np
    from onnxtrain.errors import DataError
    from onnxtrain.distributed import MPI
    mpi = MPI(timeout=60.0)
    array = np.ones(5)
    mpi.all_reduce_(array)
    mpi.timeout = 2.0
    if mpi.rank == mpi.size - 1:
        if sys.argv[1] == "raises":
            raise DataError("There is no data here.")
        if sys.argv[1] == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
    mpi.all_reduce_(array)
"""


@needs_mpi
def test_an_error_of_one_rank_ends_all_and_rank_0_reports_it(tmp_path):
    done = mpiexec(3, script(tmp_path, FAILURES), "raises")
    assert done.returncode == 1
    assert done.stderr.count("ParallelError: Rank 2 ended: There is no data here.") == 1
    assert "BAD TERMINATION" not in done.stdout + done.stderr


@needs_mpi
def test_a_rank_that_hangs_is_named_by_rank_0(tmp_path):
    done = mpiexec(3, script(tmp_path, FAILURES), "hangs")
    assert done.returncode != 0
    assert done.stderr.count("ParallelError: Rank 2 did not answer for 2 s, in all_reduce_.") == 1


COMPRESSIONS = "compress is 'zip'; it is 'float16', 'bfloat16' or onnxtrain.distributed.TopK(0.01)."


@needs_mpi
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: onnxtrain.distributed.MPI("random"), "order is 'random'; it is 'rank' or 'fast'."),
        (lambda: onnxtrain.distributed.MPI(compress="zip"), COMPRESSIONS),
        (lambda: onnxtrain.distributed.MPI(timeout=0), "timeout is 0; it needs a number of seconds above 0."),
    ],
)
def test_options_of_mpi_are_checked(call, message):
    with pytest.raises(OptionError) as caught:
        call()
    assert str(caught.value) == message


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with raises_sentence("mpi4py_missing"):
        onnxtrain.distributed.MPI()


def test_alone_every_operation_leaves_what_there_is():
    single, array = Single(), np.arange(3.0)
    for operation in (single.all_reduce_, single.broadcast_):
        operation(array)
    single.all_gather_(array[None])
    single.reduce_scatter_(array[None])
    assert array.tolist() == [0, 1, 2]
    assert single.gather_objects("x") == ["x"]
    assert single.broadcast_object("x") == "x"


def test_an_engine_lacks_nothing_that_is_needed():
    class Half(Communicator):
        rank, size = 0, 1

        def all_reduce_(self, array):
            pass

    with pytest.raises(TypeError, match=r"all_gather_.*broadcast_"):
        Half()
