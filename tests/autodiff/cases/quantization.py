"""Dequantization: one scale, one per index of an axis, one per block."""

import numpy as np

from autodiff.case import case, fixed

_X = np.random.default_rng(1).integers(-100, 100, (3, 4, 5)).astype(np.int8)


def _scale(*shape):
    return np.random.default_rng(2).uniform(0.01, 0.1, shape)


def _zero(*shape):
    return np.random.default_rng(3).integers(-5, 5, shape).astype(np.int8)


_RANKED = ("static", "dynamic")  # how the scale is laid out follows from its rank

CASES = [
    case("DequantizeLinear", _X, _scale(), label="tensor", shapes=_RANKED, opset=19),
    case("DequantizeLinear", _X, _scale(), _zero(), label="tensor-zero", shapes=_RANKED, opset=21),
    case("DequantizeLinear", _X, _scale(4), _zero(4), label="axis", shapes=_RANKED, opset=19),
    case("DequantizeLinear", _X, _scale(5), None, label="axis-last", shapes=_RANKED, opset=19, axis=-1),
    case("DequantizeLinear", _X, _scale(3), _zero(3), label="axis-first", shapes=_RANKED, opset=23, axis=0),
    fixed(case("DequantizeLinear", _X, _scale(4), _zero(4), label="axis-fixed", opset=21)),
    case(
        "DequantizeLinear",
        _X,
        _scale(3, 2, 5),
        _zero(3, 2, 5),
        label="blocks",
        shapes=_RANKED,
        opset=21,
        axis=1,
        block_size=2,
    ),
    case(
        "DequantizeLinear",
        _X,
        _scale(3, 4, 2),
        _zero(3, 4, 2),
        label="blocks-cut",
        shapes=_RANKED,
        opset=21,
        axis=-1,
        block_size=3,
    ),
]
