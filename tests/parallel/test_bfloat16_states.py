"""States in bfloat16 in several processes: those of one process with as many micro-batches, bit for bit."""

from __future__ import annotations

import json

from parallel.processes import needs_mpi, run_script

SCRIPT = """
    import hashlib, json, sys
    import numpy as np
    import onnxtrain
    ranks = int(sys.argv[1])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 4)).astype(np.float32), rng.integers(0, 3, 64)
    options = {"parallel": onnxtrain.parallel.MPI()} if ranks > 1 else {"accumulate": 2}
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-2), threads=1,
        state_dtype="bfloat16", **options,
    )
    trainer.fit(x, y, epochs=2, batch_size=16, progress=False)
    if not trainer.communicator.rank:
        kept = {name: array for name, array in trainer.states.items() if name.endswith(("/V", "/H"))}
        print(json.dumps({name: [str(array.dtype), array.tobytes().hex()] for name, array in kept.items()}))
"""


@needs_mpi
def test_two_processes_have_the_states_of_two_micro_batches(tmp_path):
    found = [json.loads(run_script(tmp_path, ranks, SCRIPT, str(ranks)).splitlines()[-1]) for ranks in (1, 2)]
    assert found[0] == found[1]
    assert {kind for kind, _ in found[0].values()} == {"bfloat16"}
    assert len(found[0]) == 8
