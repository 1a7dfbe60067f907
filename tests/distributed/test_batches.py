"""Ranks that are given other batches, other numbers of batches, or call other methods: one error that says which."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from distributed.processes import mpiexec, needs_mpi, script
from distributed.threads import in_threads
from onnxtrain.data.hashing import checksum
from onnxtrain.errors import ParallelError


def batches(count: int = 4, *, rows: int = 8, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(rows, 4)).astype(np.float32), rng.integers(0, 3, rows)) for _ in range(count)]


def turned(given):
    return [(x[::-1], y[::-1]) for x, y in given]


SAME, (X, Y) = batches(), batches(1)[0]
WIDE = np.concatenate([X, X[:1]])
# What each rank calls, and a part of the error of both.
CASES = {
    "shorter list": (lambda t: t.fit(SAME), lambda t: t.fit(SAME[:3]), "it has 3 batches of data and rank 0 has 4"),
    "shorter generator": (
        lambda t: t.fit(lambda: iter(SAME)),
        lambda t: t.fit(lambda: iter(SAME[:3])),
        "data of rank 1 ended after 3 batches, and rank 0 has more",
    ),
    "longer generator": (
        lambda t: t.fit(lambda: iter(SAME), epochs=2),
        lambda t: t.fit(lambda: iter(SAME + SAME), epochs=2),
        "data of rank 0 ended after 4 batches, and rank 1 has more",
    ),
    "other rows": (
        lambda t: t.fit(SAME),
        lambda t: t.fit([*SAME[:2], (X[:5], Y[:5]), SAME[3]]),
        "In step 3, rank 1 was given 5 rows, and rank 0 8",
    ),
    "another order of rows": (
        lambda t: t.fit(SAME),
        lambda t: t.fit(turned(SAME)),
        "In step 1, rank 1 was given other values",
    ),
    "another step": (
        lambda t: [t.train_step(*batch) for batch in SAME],
        lambda t: [t.train_step(*batch) for batch in (*SAME[:3], SAME[0])],
        "In step 4, rank 1 was given other values",
    ),
    "parts of a step": (
        lambda t: t.train_step(X[:5], Y[:5]),
        lambda t: t.train_step(X[5:], Y[5:]),
        "In step 1, rank 1 was given 3 rows, and rank 0 5",
    ),
    "evaluated batches": (
        lambda t: t.evaluate(SAME),
        lambda t: t.evaluate(SAME[:3]),
        "In the evaluation, rank 1 was given 24 rows, and rank 0 32",
    ),
    "evaluated arrays": (
        lambda t: t.evaluate(X, Y),
        lambda t: t.evaluate(X, (Y + (np.arange(8) > 5)) % 3),
        "the target array of data, int64 [8], has other values in 2 of 8 rows, first in row 6",
    ),
    "another shape": (
        lambda t: t.fit(X, Y),
        lambda t: t.fit(WIDE, Y[[*range(8), 0]]),
        "input 'input' of data is float32 [9, 4] on rank 1 and float32 [8, 4] on rank 0",
    ),
    "no validation": (
        lambda t: t.fit(SAME, validation=(X, Y)),
        lambda t: t.fit(SAME),
        "validation has input 'input' on rank 0 only",
    ),
    "another method": (
        lambda t: t.fit(X, Y),
        lambda t: t.evaluate(X, Y),
        "Rank 1 has called evaluate and rank 0 fit",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_told_what_differs(case):
    *calls, sentence = CASES[case]

    def work(rank):
        trainer = onnxtrain.Trainer(
            onnxtrain.examples.mlp((4, 5, 3)), loss="softmax_cross_entropy", threads=1, distributed=rank
        )
        with pytest.raises(ParallelError) as caught:
            calls[rank.rank](trainer)
        return str(caught.value)

    first, second = in_threads(2, work)
    assert first == second
    assert sentence in first


def test_checksums_depend_on_values_and_the_order_of_rows():
    import ml_dtypes

    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.uint8, np.int64, ml_dtypes.bfloat16, object):
        for shape in ((6, 3), (6, 4, 5), (6,)):
            array = rng.integers(0, 99, shape).astype(dtype)
            assert checksum([array]) == checksum([array.copy()])
            assert len({checksum([other]) for other in (array, array[::-1], array + array)}) == 3
    assert checksum([np.float32(1)]) != checksum([np.float32(2)])
    images = np.zeros((128, 28, 28), np.float32)
    images[:, 7:21, 7:21] = rng.random((128, 14, 14))
    assert len({checksum([other]) for other in (images, images[::-1], images + 0.1, np.roll(images, 5, axis=0))}) == 4


ENDS = """
    import sys
    import numpy as np
    import onnxtrain
    mpi = onnxtrain.distributed.MPI(timeout=60)
    class Loader(list):
        def __iter__(self):  # fewer on rank 1 than its length says
            return iter([self[index] for index in range(len(self) - mpi.rank)])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 400)).astype(np.float32), rng.integers(0, 3, 8)
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((400, 500, 3)), loss="softmax_cross_entropy", threads=1,
        distributed=mpi)
    if sys.argv[1] == "method" and mpi.rank:
        trainer.train_step(x, y)
    else:
        trainer.fit(Loader([(x, y)] * 4), progress=False)
"""


@needs_mpi
@pytest.mark.parametrize("how", ["loader", "method"])
def test_ranks_in_other_operations_end_with_one_error(tmp_path, how):
    done = mpiexec(2, script(tmp_path, ENDS), how)
    assert done.returncode == 1
    assert done.stderr.count("call the same methods on every rank, in the same order") == 1, done.stderr
    assert "Abort" not in done.stderr + done.stdout
