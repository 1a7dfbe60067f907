"""Low-bit states in several processes: bit for bit equal to one process with as many micro-batches."""

from __future__ import annotations

import json

import pytest

from distributed.processes import needs_mpi, run_script

SCRIPT = """
    import json, sys
    import numpy as np
    import onnxtrain
    ranks = int(sys.argv[1])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 64)).astype(np.float32), rng.integers(0, 3, 64)
    options = {"distributed": onnxtrain.distributed.MPI()} if ranks > 1 else {"accumulate": 2}
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.mlp((64, 64, 3)), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-2), threads=1,
        precision=onnxtrain.Precision(states=sys.argv[2]), **options,
    )
    trainer.fit(x, y, epochs=2, batch_size=16, progress=False)
    if not trainer._communicator.rank:
        kept = {name: array for name, array in trainer.executor.states.items() if "/V" in name or "/H" in name}
        print(json.dumps({name: [str(array.dtype), array.tobytes().hex()] for name, array in kept.items()}))
"""


@needs_mpi
@pytest.mark.parametrize(
    ("state_dtype", "kinds"),
    [("bfloat16", {"bfloat16": 8}), ("8bit", {"uint8": 2, "float32": 8})],  # for one tensor of 4,096 elements
    ids=["bfloat16", "8bit"],
)
def test_two_processes_have_the_states_of_two_micro_batches(tmp_path, state_dtype, kinds):
    found = [
        json.loads(run_script(tmp_path, ranks, SCRIPT, str(ranks), state_dtype).splitlines()[-1]) for ranks in (1, 2)
    ]
    assert found[0] == found[1]
    types = [kind for kind, _ in found[0].values()]
    assert {kind: types.count(kind) for kind in types} == kinds
