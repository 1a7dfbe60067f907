"""LSTM, GRU and RNN as operators of this project's domain, which a graph pass emits.

Only forms that ONNX's reference evaluator supports; every form is in tests/native/test_native_recurrent.py.
"""

import numpy as np

from autodiff.case import Case, case, normal

STEPS, BATCH, SIZE, HIDDEN = 4, 2, 3, 3
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": "Sigmoid Tanh Tanh", "GRU": "Sigmoid Tanh", "RNN": "Tanh"}
LEFT_OUT, NO_LENGTHS = np.zeros(0), np.zeros(0, np.int32)


def row(operator: str, label: str, *, bias: bool = True, states: bool = False, **attributes: object) -> Case:
    """A node whose omitted inputs have the shape [0], which must be known."""
    gates, lstm = GATES[operator] * HIDDEN, operator == "LSTM"
    state = [normal(1, BATCH, HIDDEN, seed=seed) if states else LEFT_OUT for seed in (4, 5)]
    arrays = [
        normal(STEPS, BATCH, SIZE),
        normal(1, gates, SIZE, seed=1, scale=0.5),
        normal(1, gates, HIDDEN, seed=2, scale=0.5),
        normal(1, 2 * gates, seed=3, scale=0.5) if bias else LEFT_OUT,
        NO_LENGTHS,
        *(state if lstm else state[:1]),
        *([LEFT_OUT] if lstm else []),
    ]
    wrt = [name for name, array in zip("abcdefgh", arrays, strict=False) if array.size]
    functions = FUNCTIONS[operator].split()
    numbers = {f"activation_{kind}": [0.0] * len(functions) for kind in ("alpha", "beta")}
    return case(
        operator,
        *arrays,
        outputs=3 if lstm else 2,
        domain="onnxtrain",
        label=f"fused-{label}",
        wrt=wrt,
        shapes=("static",),
        hidden_size=HIDDEN,
        activations=FUNCTIONS[operator],
        **numbers,
        **attributes,
    )


CASES = [
    row("LSTM", "plain"),
    row("LSTM", "bare", bias=False),
    row("LSTM", "states", states=True),
    row("GRU", "plain"),
    row("GRU", "linear-before-reset", linear_before_reset=1),
    row("GRU", "states", states=True),
    row("RNN", "plain"),
    row("RNN", "states", states=True),
]
