"""Reductions over axes given as input (constant or not), left out, or empty; running sums and products; Range."""

import numpy as np

from autodiff.case import apart, case, fixed, normal

_AXES = np.array([0, -1])
_EMPTY = np.array([], dtype=np.int64)

_OPERATORS = {
    "ReduceSum": normal,
    "ReduceMean": normal,
    "ReduceMax": apart,
    "ReduceMin": apart,
    "ReduceProd": normal,
    "ReduceL1": apart,
    "ReduceL2": normal,
    "ReduceSumSquare": normal,
    "ReduceLogSum": lambda *shape: np.abs(normal(*shape)) + 0.2,
    "ReduceLogSumExp": normal,
}


def _rows(operator, numbers):
    x = numbers(2, 3, 4)
    with_axes = [
        case(operator, x, _AXES, label="axes"),
        case(operator, x, _AXES, label="axes-nokeep", keepdims=0),
        case(operator, x, np.array([1]), label="axis", opset=23),
        case(operator, x, np.array([-2]), label="axis-nokeep", opset=20, keepdims=0),
        case(operator, x, np.array([0, 1, 2]), label="all-axes-nokeep", keepdims=0),
        case(operator, x, _EMPTY, label="empty-axes"),
        case(operator, x, _EMPTY, label="empty-axes-nokeep", keepdims=0),
        case(operator, x, _EMPTY, label="empty-axes-noop", noop_with_empty_axes=1),
        case(operator, x, _AXES, label="axes-noop-nokeep", noop_with_empty_axes=1, keepdims=0),
        case(operator, numbers(2, 1, 3), np.array([1]), label="size-one"),
    ]
    yield from with_axes
    yield from map(fixed, with_axes)
    yield case(operator, x, label="all")
    yield case(operator, x, label="all-nokeep", keepdims=0)
    yield case(operator, x, label="noop", noop_with_empty_axes=1)
    yield case(operator, x, label="noop-nokeep", noop_with_empty_axes=1, keepdims=0)
    if operator != "ReduceLogSumExp":  # ONNX's reference evaluator fails on its scalars
        yield case(operator, numbers(), label="scalar")
    yield fixed(case(operator, numbers(0, 3), np.array([1]), label="nothing"))


_DIRECTIONS = [(exclusive, reverse) for exclusive in (0, 1) for reverse in (0, 1)]

_RUNNING = [
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
    *(row for operator, numbers in _OPERATORS.items() for row in _rows(operator, numbers)),
    *_RUNNING,
    *map(fixed, _RUNNING[:4]),
    # By the limit the length jumps: its gradient is zero, which differences show away from the jumps.
    case("Range", np.array(1.0), np.array(4.1), np.array(0.5), label="up"),
    case("Range", np.array(2.0), np.array(-1.1), np.array(-0.7), label="down"),
    case("Range", np.array(2.0), np.array(1.0), np.array(0.5), label="empty"),
]
