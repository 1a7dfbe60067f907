"""Running sums and products in both directions, and progressions."""

import numpy as np

from autodiff.case import case, fixed, normal

_DIRECTIONS = [(exclusive, reverse) for exclusive in (0, 1) for reverse in (0, 1)]

_ROWS = [
    case(
        operator,
        normal(2, 3, 4),
        np.array(axis),
        label=f"axis{axis}-{exclusive}{reverse}",
        opset=opset,
        exclusive=exclusive,
        reverse=reverse,
    )
    for operator, opset in (("CumSum", 18), ("CumProd", 26))
    for axis in (0, 1, -1)
    for exclusive, reverse in _DIRECTIONS
] + [
    case(operator, x, np.array(0, dtype=dtype), label=f"{x.shape}-{dtype.__name__}", opset=opset)
    for operator, opset in (("CumSum", 18), ("CumProd", 26))
    for x, dtype in ((normal(1), np.int32), (normal(5), np.int64), (normal(0, 2), np.int64))
]

CASES = [
    *_ROWS,
    *map(fixed, _ROWS[:4]),
    # By the limit the length jumps: its gradient is zero, which differences show away from the jumps.
    case("Range", np.array(1.0), np.array(4.1), np.array(0.5), label="up"),
    case("Range", np.array(2.0), np.array(-1.1), np.array(-0.7), label="down"),
    case("Range", np.array(2.0), np.array(1.0), np.array(0.5), label="empty"),
]
