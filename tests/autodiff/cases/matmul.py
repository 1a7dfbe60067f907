"""MatMul over all ranks, Gemm over its attributes, determinants."""

import numpy as np

from autodiff.case import case, normal

_PRODUCTS = [
    *[((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((2, 5, 3), (3, 4))],
    *[((2, 5, 3), (3,)), ((3,), (2, 3, 4)), ((3,), (3, 2, 3, 4)), ((3, 5), (2, 5, 4))],
    *[((2, 5, 3), (2, 3, 4)), ((2, 1, 5, 3), (4, 3, 2)), ((1, 4, 3), (2, 3, 5)), ((4, 1, 1, 2), (4, 3, 2, 1))],
    *[((0, 3), (3, 4)), ((2, 3), (3, 1)), ((5, 2, 2, 3), (3,))],
]

_GEMMS = [
    case(
        "Gemm",
        normal(*((3, 2) if turn_a else (2, 3))),
        normal(*((4, 3) if turn_b else (3, 4)), seed=1),
        None if c is None else normal(*c, seed=2),
        label=f"{turn_a}{turn_b}{c}",
        transA=turn_a,
        transB=turn_b,
        alpha=0.5 if turn_a else 1.0,
        beta=1.5 if turn_b else 1.0,
    )
    for turn_a in (0, 1)
    for turn_b in (0, 1)
    for c in (None, (4,), (2, 1), (), (2, 4))
]

CASES = [
    *[case("MatMul", normal(*left), normal(*right, seed=1), label=f"{left}{right}") for left, right in _PRODUCTS],
    # ONNX's reference evaluator cannot flatten an empty tensor, which is what rows of unknown number need.
    case("MatMul", normal(2, 0, 3), normal(3, 4), label="empty", shapes=("static",)),
    *_GEMMS,
    case("Det", normal(3, 3), label="matrix"),
    case("Det", normal(2, 4, 4), label="batch"),
    case("Det", normal(2, 2, 2, 2), label="batches-22", opset=22),
    case("Det", np.outer(np.arange(1.0, 4.0), np.array([1.0, -2.0, 0.5])), label="singular"),
    case("Det", normal(3, 1, 1), label="one", shapes=("static",)),  # a dynamic one would be a 0 x 0 determinant
    case("Det", normal(0, 3, 3), label="empty", shapes=("static", "dynamic")),
]
