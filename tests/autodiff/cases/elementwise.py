"""Element-wise functions of one tensor, at points of their domains away from kinks and poles."""

import numpy as np
from onnx import TensorProto

from autodiff.case import apart, case, normal

_EVERYWHERE = ("Neg", "Exp", "Sin", "Cos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Identity")
_POSITIVE = ("Reciprocal", "Sqrt", "Log")
_UNIT = ("Tan", "Asin", "Acos", "Atanh")


def _inputs(shape):
    yield from ((name, normal(*shape)) for name in _EVERYWHERE)
    yield from ((name, np.abs(normal(*shape)) + 0.3) for name in _POSITIVE)
    yield from ((name, np.tanh(normal(*shape)) * 0.8) for name in _UNIT)
    yield "Acosh", np.abs(normal(*shape)) + 1.3
    yield "Abs", apart(*shape)


def _clip(label, *bounds, x=None, opset=18):
    return case(
        "Clip",
        apart(3, 4) if x is None else x,
        *(None if b is None else np.array(b) for b in bounds),
        label=label,
        opset=opset,
    )


CASES = [
    # ONNX's reference evaluator computes it in float32 only.
    *(case("Erf", normal(*shape), label=f"{shape}", precision="float") for shape in ((2, 3, 4), (), (0, 3))),
    *(case(operator, x, label=f"{x.shape}") for shape in ((2, 3, 4), (), (0, 3)) for operator, x in _inputs(shape)),
    # These changed version at 22: the newer one has the same rule.
    *(
        case(operator, x, opset=22)
        for operator, x in _inputs((2, 3))
        if operator in ("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")
    ),
    *(case("Cast", normal(2, 3), label=f"double-{opset}", opset=opset, to=TensorProto.DOUBLE) for opset in (18, 23)),
    *(case("CastLike", normal(2, 3), normal(1), label=f"{opset}", opset=opset) for opset in (18, 24)),
    _clip("both", -0.5, 0.5),
    _clip("both-22", -0.5, 0.5, opset=22),
    _clip("low", -0.5),
    _clip("high", None, 0.5),
    _clip("none"),
    _clip("crossed", 0.5, -0.5),
    _clip("scalar", -0.5, 0.5, x=np.array(0.7)),
    _clip("empty", -0.5, 0.5, x=np.zeros((0, 3))),
]
