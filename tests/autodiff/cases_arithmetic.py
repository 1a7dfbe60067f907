"""Operators of several operands that broadcast."""

from case import case, normal

_BROADCASTS = [((2, 3), (2, 3)), ((3, 1, 4), (2, 1)), ((4,), (2, 3, 4)), ((), (2, 2)), ((1,), (0, 3))]

CASES = [
    case(operator, normal(*left), normal(*right, seed=1, scale=0.3, shift=2), label=f"{left}{right}")
    for operator in ("Add", "Sub", "Mul", "Div")
    for left, right in _BROADCASTS
]
