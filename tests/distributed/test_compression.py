"""Compressed gradient sums: exact arithmetic, error feedback, convergence, resumption."""

from __future__ import annotations

import math
import pickle
import struct

import numpy as np
import pytest

from distributed.processes import needs_mpi, run_script
from distributed.threads import in_threads
from onnxtrain.distributed import Communicator, TopK
from onnxtrain.distributed.compression import choose_compression
from onnxtrain.errors import OptionError
from sentences import raises_sentence

SIZE, ELEMENTS, STEPS = 3, 24, 4


def gradients():
    """Return gradients [steps, ranks, elements] of very different magnitudes."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(STEPS, SIZE, ELEMENTS)) * 10.0 ** rng.integers(-6, 6, (STEPS, SIZE, ELEMENTS))).astype(
        "f4"
    )


def run(compression, given, scatter=False):
    """Return sums [steps, ranks, elements], the last residuals, and the bytes sent by a rank."""

    def work(communicator):
        residual, sums = np.zeros(given.shape[2], np.float32), []
        for step in given:
            own = step[communicator.rank].copy()
            compression.reduce_(communicator, own, residual, scatter=scatter)
            sums.append(own)
        return sums, residual, communicator.sent

    found = in_threads(given.shape[1], work)
    sums = np.asarray([sums for sums, _, _ in found]).transpose(1, 0, 2)
    return sums, np.asarray([residual for _, residual, _ in found]), found[0][2]


def bits_dropped(value, kept):
    """Round a value to some bits of precision, ties to even, in integer arithmetic; float16 exponents end at -24."""
    if not value:
        return 0.0
    fraction, exponent = math.frexp(value)
    unit = exponent - kept if kept == 8 else max(exponent - kept, -24)
    return math.ldexp(round(math.ldexp(fraction, exponent - unit)), unit)


@pytest.mark.parametrize(("name", "kept"), [("float16", 11), ("bfloat16", 8)])
def test_rounding_is_that_of_the_definition(name, kept):
    """Compute each element in Python floats, with sums rounded to float32 as in the definition."""

    def rounded(row):
        exponent = math.frexp(max(abs(value) for value in row))[1]
        return [math.ldexp(bits_dropped(math.ldexp(value, -exponent), kept), exponent) for value in row]

    def single(value):
        return struct.unpack("f", struct.pack("f", value))[0]

    given = gradients()
    sums, residuals, sent = run(choose_compression(name), given)
    left = [[0.0] * ELEMENTS for _ in range(SIZE)]
    for step, found in zip(given.tolist(), sums, strict=True):
        terms = [[single(a + b) for a, b in zip(*pair, strict=True)] for pair in zip(step, left, strict=True)]
        parts = [rounded(row) for row in terms]
        left = [[single(a - b) for a, b in zip(*pair, strict=True)] for pair in zip(terms, parts, strict=True)]
        total = [0.0] * ELEMENTS
        for part in parts:
            total = [single(a + b) for a, b in zip(total, part, strict=True)]
        whole = []
        share = ELEMENTS // SIZE
        for rank in range(SIZE):
            own = total[rank * share : (rank + 1) * share]
            again = rounded(own)
            whole += again
            for place, (a, b) in enumerate(zip(own, again, strict=True), rank * share):
                left[rank][place] = single(left[rank][place] + single(a - b))
        for rank in range(SIZE):
            np.testing.assert_array_equal(found[rank], np.asarray(whole, np.float32))
    np.testing.assert_array_equal(residuals, np.asarray(left, np.float32))
    assert sent == STEPS * 2 * (SIZE - 1) * (4 + 2 * ELEMENTS // SIZE)


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 1.0])
def test_the_largest_are_those_of_the_definition(share):
    given = gradients()
    count = max(1, math.ceil(share * ELEMENTS))
    sums, residuals, sent = run(TopK(share), given)
    left = np.zeros((SIZE, ELEMENTS), np.float32)
    for step, found in zip(given, sums, strict=True):
        left += step
        total = np.zeros(ELEMENTS, np.float32)
        for rank in range(SIZE):
            for place in sorted(range(ELEMENTS), key=lambda i: -abs(left[rank, i]))[:count]:
                total[place] += left[rank, place]
                left[rank, place] = 0
        for rank in range(SIZE):
            np.testing.assert_array_equal(found[rank], total)
    np.testing.assert_array_equal(residuals, left)
    assert sent == STEPS * (SIZE - 1) * 8 * count


@pytest.mark.parametrize("compression", ["float16", "bfloat16", TopK(0.2)], ids=str)
def test_nothing_is_lost_and_all_ranks_have_the_same_bits(compression):
    rng = np.random.default_rng(1)
    given = rng.normal(size=(20, 4, 64)).astype(np.float32)
    sums, residuals, _ = run(choose_compression(compression), given)
    for rank in range(1, 4):
        np.testing.assert_array_equal(sums[:, rank], sums[:, 0])
    together = sums[:, 0].sum(axis=0, dtype=np.float64) + residuals.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(together, given.sum(axis=(0, 1), dtype=np.float64), atol=1e-4)


@pytest.mark.parametrize("compression", ["float16", TopK(0.25)], ids=str)
def test_a_rank_that_needs_its_share_alone_gets_it(compression):
    given = gradients()[:1]
    whole, _, _ = run(TopK(0.25), given)
    sums, _, _ = run(choose_compression(compression), given, scatter=True)
    for rank in range(SIZE):
        own = slice(rank * ELEMENTS // SIZE, (rank + 1) * ELEMENTS // SIZE)
        if compression == "float16":
            largest = np.abs(given[0]).max()
            np.testing.assert_allclose(sums[0, rank, own], given[0, :, own].sum(axis=0), atol=largest / 1000)
        else:
            np.testing.assert_array_equal(sums[0, rank, own], whole[0, 0, own])


@pytest.mark.parametrize("compression", ["float16", "bfloat16", TopK(0.01)], ids=str)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_nan_and_infinity_arrive(compression, number):
    given = np.ones((1, 3, 12), np.float32)
    given[0, 1, 5] = number
    sums, _, _ = run(choose_compression(compression), given)
    for rank in range(3):
        assert not np.isfinite(sums[0, rank, 5])
        assert np.isfinite(np.delete(sums[0, rank], 5)).all() or compression == "float16"


def test_an_engine_without_an_exchange_of_rows_gathers_all():
    given = np.arange(3 * 3 * 2, dtype=np.float32).reshape(3, 3, 2)

    def work(communicator):
        own = given[communicator.rank].copy()
        Communicator.all_to_all_(communicator, own)
        return own

    np.testing.assert_array_equal(in_threads(3, work), given.transpose(1, 0, 2))


@pytest.mark.parametrize("given", ["float8", 0.01, TopK])
def test_unknown_compressions_are_refused(given):
    with raises_sentence("compress_option", what="compress"):
        choose_compression(given)


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_an_invalid_share(share):
    with pytest.raises(OptionError, match="above 0 and at most 1"):
        TopK(share)


def test_settings_can_be_pickled():
    for compression in (choose_compression("bfloat16"), TopK(0.1)):
        assert repr(pickle.loads(pickle.dumps(compression))) == repr(compression)


TRAINING = """
    import json, sys
    import numpy as np
    import onnxtrain
    from onnxtrain.distributed import MPI, TopK
    from onnxtrain.training.executors import data_parallel
    data_parallel.BUCKET_BYTES = 4 * 16 * 32
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype(np.float32)
    y = (x @ rng.normal(size=(8, 4))).argmax(axis=1)
    def trainer(compress, shard=False, **options):
        return onnxtrain.Trainer(onnxtrain.examples.mlp((8, 32, 32, 4)), loss="softmax_cross_entropy", threads=1,
            optimizer=onnxtrain.Momentum(0.05, alpha=0.9),
            distributed=onnxtrain.Distributed(MPI(compress=compress), shard_states=shard), **options)
    def equal(one, other):
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)
"""


@needs_mpi
def test_a_training_converges_and_resumes(tmp_path):
    run_script(
        tmp_path,
        2,
        TRAINING
        + """
    losses = {}
    for compress in ("float16", "bfloat16", TopK(0.02)):
        subject = trainer(compress)
        subject.fit(x, y, epochs=20, batch_size=32)
        losses[repr(compress)] = subject.evaluate(x, y)["loss"]
        assert losses[repr(compress)] < 0.15, losses
    topk, shares = trainer(TopK(0.1)), trainer(TopK(0.1), True)
    for subject in (topk, shares):
        for rows in (256, 31, 1):
            subject.train_step(x[:rows], y[:rows])
    equal(topk.get_weights(), shares.get_weights())
    equal(topk.executor.checkpoint_states(), shares.executor.checkpoint_states())
    kept = topk.executor.checkpoint_states()["layer2.weight/residual"]
    assert kept.shape == (2, *topk.get_weights()["layer2.weight"].shape)
    for compress, shard in (("float16", True), (TopK(0.1), False)):
        folder = f"kept-{shard}"
        through, begun, resumed = (trainer(compress, shard) for _ in range(3))
        through.fit(x, y, epochs=3, batch_size=32)
        begun.fit(x, y, epochs=1, batch_size=32, checkpoint=folder)
        resumed.fit(x, y, epochs=3, batch_size=32, checkpoint=folder, resume=True)
        equal(through.get_weights(), resumed.get_weights())
        equal(through.executor.checkpoint_states(), resumed.executor.checkpoint_states())
        whole = trainer(None)
        whole.fit(x, y, epochs=3, batch_size=32, checkpoint=folder, resume=True)  # without what was not sent
    """,
        cwd=tmp_path,
    )


@needs_mpi
@pytest.mark.thorough
def test_what_was_not_sent_is_shared_out_among_another_number(tmp_path):
    kept = """
    subject = trainer(TopK(0.1))
    subject.fit(x, y, epochs=int(sys.argv[1]), batch_size=32, checkpoint="kept", resume=True)
    states = subject.executor.checkpoint_states()
    if not subject._communicator.rank:
        np.savez(sys.argv[2], **states)
    """
    run_script(tmp_path, 2, TRAINING + kept, "1", "two.npz", cwd=tmp_path)
    run_script(tmp_path, 3, TRAINING + kept, "1", "three.npz", cwd=tmp_path)
    with np.load(tmp_path / "two.npz") as two, np.load(tmp_path / "three.npz") as three:
        assert set(two) == set(three)
        for name in two:
            if name.endswith("/residual"):
                assert len(three[name]) == 3
                np.testing.assert_allclose(three[name].sum(axis=0), two[name].sum(axis=0), rtol=1e-5, atol=1e-6)
                assert np.any(two[name])
            else:
                np.testing.assert_array_equal(two[name], three[name])
