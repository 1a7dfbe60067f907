"""Recurrent operators in the forms that ONNX's reference evaluator supports; all are in test_recurrent.py."""

from autodiff.case import case, normal


def row(operator, gates, outputs, *more, label, opset=18, **attributes):
    arrays = [
        normal(4, 2, 3),
        normal(1, gates * 3, 3, seed=1, scale=0.5),
        normal(1, gates * 3, 3, seed=2, scale=0.5),
        *more,
    ]
    return case(operator, *arrays, outputs=outputs, label=label, opset=opset, hidden_size=3, **attributes)


def bias(gates):
    return normal(1, 2 * gates * 3, seed=3, scale=0.5)


CASES = [
    row("RNN", 1, 2, label="plain"),
    row("RNN", 1, 2, bias(1), label="bias", opset=22),
    row("GRU", 3, 2, bias(3), label="plain"),
    row("GRU", 3, 2, bias(3), label="linear-before-reset", linear_before_reset=1),
    row("LSTM", 4, 3, bias(4), label="plain"),
    row("LSTM", 4, 2, bias(4), label="two-outputs", opset=22),
    # ONNX Runtime has no kernels for layout 1.
    row("RNN", 1, 2, bias(1), label="batch-first", layout=1, runtime=False),
    row("GRU", 3, 2, bias(3), label="batch-first", layout=1, runtime=False),
    row("LSTM", 4, 2, bias(4), label="batch-first", layout=1, runtime=False),
]
