"""Softmax and its logarithm along every axis."""

from autodiff.case import case, normal

CASES = [
    case(operator, normal(2, 3, 4, scale=2.0), label=f"axis{axis}", **({} if axis is None else {"axis": axis}))
    for operator in ("Softmax", "LogSoftmax")
    for axis in (None, 0, 1, 2, -1, -2, -3)
] + [
    case(operator, x, label=label)
    for operator in ("Softmax", "LogSoftmax")
    for label, x in (("vector", normal(5)), ("one", normal(3, 1)), ("empty", normal(0, 3)))
]
