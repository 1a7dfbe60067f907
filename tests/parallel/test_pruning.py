"""Pruning in several processes: all compute masks from the same weights, so masks are equal."""

from __future__ import annotations

import pytest

from parallel.processes import needs_mpi, run_script

PRUNE = """
    import sys
    import numpy as np
    import onnxtrain
    mpi = onnxtrain.distributed.MPI()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 8)).astype(np.float32)
    y = np.abs(x[:, :3]).argmax(axis=1)
    optimizer = {"ssgd": onnxtrain.SSGD(0.05), "adam": onnxtrain.Adam(0.01, sparsity=onnxtrain.Sparsity())}[sys.argv[1]]
    def prune(**options):
        return onnxtrain.prune(onnxtrain.examples.mlp((8, 32, 3)), (x, y), loss="softmax_cross_entropy", sparsity=0.7,
            optimizer=optimizer, epochs=3, fine_tune_epochs=2, batch_size=16, threads=1, **options)
    together, alone = prune(parallel=mpi), prune(accumulate=mpi.size)
    weights, others = together.values, alone.values
    masks, other_masks = together.masks, alone.masks
    assert masks.keys() == other_masks.keys() and len(masks) > 0
    for name, mask in masks.items():
        np.testing.assert_array_equal(mask, other_masks[name])
        assert not weights[name][~mask].any()
    for name, array in weights.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)
    for rank in mpi.gather_objects({name: np.packbits(mask).tobytes() for name, mask in masks.items()}):
        assert rank == {name: np.packbits(mask).tobytes() for name, mask in masks.items()}
    assert sum(np.count_nonzero(~mask) for mask in masks.values()) > 150
"""


@needs_mpi
@pytest.mark.parametrize("optimizer", ["ssgd", "adam"])
def test_masks_are_those_of_one_process_with_micro_batches(tmp_path, optimizer):
    run_script(tmp_path, 2, PRUNE, optimizer)
