"""Operators of several operands that broadcast."""

import numpy as np
from onnx import TensorProto, helper

from autodiff.case import Case, apart, case, fixed, normal

_BROADCASTS = [((2, 3), (2, 3)), ((3, 1, 4), (2, 1)), ((4,), (2, 3, 4)), ((), (2, 2)), ((1,), (0, 3))]


def _positive(*shape, seed=0):
    return np.abs(normal(*shape, seed=seed)) + 0.5


def _power_by(exponent, base, label):
    """A power whose exponent is a constant of the model."""
    info = [helper.make_tensor_value_info("a", TensorProto.DOUBLE, base.shape)]
    out = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)]
    value = helper.make_tensor(
        "p", helper.np_dtype_to_tensor_dtype(exponent.dtype), exponent.shape, exponent.reshape(-1).tolist()
    )
    graph = helper.make_graph([helper.make_node("Pow", ["a", "p"], ["y"])], "g", info, out, [value])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return Case(f"Pow-{label}", model, [base])


_SCALAR_EXPONENTS = [
    _power_by(np.array(exponent), _positive(2, 3), f"by-{exponent}")
    for exponent in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0, -2.5, 1.7)
]

_POWERS = [
    *_SCALAR_EXPONENTS,
    _power_by(np.array([2.0]), normal(2, 3), "by-one-element"),
    _power_by(np.array([[[3.0]]]), normal(2, 3), "by-higher-rank"),
    _power_by(np.array([0.0, 1.0, 3.0]), normal(2, 3), "by-vector"),
    _power_by(np.array(3, dtype=np.int64), normal(2, 3), "by-integer"),
    *(case("Pow", _positive(*left), normal(*right, seed=1), label=f"{left}{right}") for left, right in _BROADCASTS),
    # Only whole exponents are defined for negative bases; differences of the exponent are not.
    case("Pow", normal(2, 3), np.array([2.0, 3.0, -1.0]), label="negative-base", wrt=["a"]),
    case("Pow", normal(2, 3), np.array([2, 0, 3], dtype=np.int64), label="integer-exponent"),
    case("Pow", normal(2, 3), np.array([2, 0, 3], dtype=np.int32), label="int32-exponent", opset=15),
]

_EXTREMA = [
    case(operator, *inputs, label=label, opset=opset)
    for operator in ("Max", "Min")
    for label, opset, inputs in (
        ("one", 18, [normal(2, 3)]),
        ("two", 18, [apart(2, 3), apart(2, 3, seed=1) + 0.02]),
        ("two-broadcast", 18, [apart(3, 1, 4), apart(2, 1, seed=1) + 0.02]),
        ("three", 21, [apart(2, 3), apart(3, seed=1) + 0.02, apart(2, 1, seed=2) + 0.035]),
        ("empty", 18, [normal(0, 3), normal(1)]),
    )
]

_CONDITION = np.array([[True, False, True], [False, False, True]])

CASES = [
    *(
        case(operator, normal(*left), normal(*right, seed=1, scale=0.3, shift=2), label=f"{left}{right}")
        for operator in ("Add", "Sub", "Mul", "Div")
        for left, right in _BROADCASTS
    ),
    *_POWERS,
    *_EXTREMA,
    *(
        case(operator, *inputs, label=label)
        for operator in ("Sum", "Mean")
        for label, inputs in (
            ("one", [normal(2, 3)]),
            ("two", [normal(2, 3), normal(3, seed=1)]),
            ("three", [normal(2, 3), normal(1, 3, seed=1), normal(2, 1, seed=2)]),
            ("empty", [normal(0, 3), normal(3)]),
        )
    ),
    *(
        case("Mod", normal(*left) * 3 + 0.1, normal(*right, seed=1, scale=0.3, shift=2), label=label, fmod=1)
        for label, left, right in (("same", (2, 3), (2, 3)), ("broadcast", (3, 1, 4), (2, 1)))
    ),
    # ONNX Runtime refuses fmod=0 for floating tensors.
    case("Mod", normal(2, 3) * 3 + 0.1, np.array([1.5, -2.0, 1.2]), label="floor", runtime=False),
    case("Where", _CONDITION, normal(2, 3), normal(2, 3, seed=1), label="same"),
    case("Where", _CONDITION, normal(2, 1), normal(4, 1, 3, seed=1), label="broadcast"),
    case("Where", np.array([True]), normal(2, 3), normal(seed=1), label="condition-broadcast"),
    fixed(case("Where", _CONDITION, normal(2, 3), normal(seed=1), label="mask")),
]
