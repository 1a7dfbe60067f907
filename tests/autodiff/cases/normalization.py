"""Normalization: every operator, its axes and its optional inputs and outputs."""

import numpy as np
from onnx import helper

from autodiff.case import Case, apart, case, normal


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape, seed=9)) + 0.5


def batch_normalization_in_training(*shape: int, **attributes: float) -> Case:
    """The running statistics are outputs of the node but not of the model: they carry no gradient."""
    inputs = [
        normal(*shape),
        positive(shape[1]),
        normal(shape[1], seed=2),
        normal(shape[1], seed=3),
        positive(shape[1]),
    ]
    node = helper.make_node("BatchNormalization", list("abcde"), ["y0", "mean", "var"], training_mode=1, **attributes)
    infos = [helper.make_tensor_value_info(n, 11, a.shape) for n, a in zip("abcde", inputs, strict=True)]
    graph = helper.make_graph([node], "training", infos, [helper.make_tensor_value_info("y0", 11, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return Case(f"BatchNormalization-training-{shape}{attributes}", model, inputs, wrt=["a", "b", "c"])


_LAYERS = [((2, 3, 4), -1, True), ((2, 3, 4), 1, True), ((2, 3, 4), -2, False), ((5, 4), 0, True)]

CASES = [
    *[
        case(
            "BatchNormalization",
            normal(*shape),
            positive(shape[1]),
            normal(shape[1], seed=2),
            normal(shape[1], seed=3),
            positive(shape[1]),
            label=f"{shape}",
            epsilon=1e-2,
        )
        for shape in ((2, 3, 4, 2), (4, 3), (2, 3, 5), (1, 2, 2, 3, 2))
    ],
    *[batch_normalization_in_training(*shape) for shape in ((2, 3, 4, 2), (4, 3), (2, 3, 5), (1, 2, 2, 3, 2))],
    batch_normalization_in_training(3, 2, 2, 2, epsilon=0.1, momentum=0.5),
    *[
        case(
            "InstanceNormalization",
            normal(*shape),
            normal(shape[1], seed=1),
            normal(shape[1], seed=2),
            label=f"{shape}",
            epsilon=1e-3,
        )
        for shape in ((2, 3, 4), (2, 3, 3, 2), (1, 2, 2, 3, 2))
    ],
    case("InstanceNormalization", normal(2, 2, 5), normal(2, seed=1), normal(2, seed=2), opset=22),
    *[
        case(
            "LayerNormalization",
            normal(*shape),
            normal(*shape[axis:], seed=1),
            normal(*shape[axis:], seed=2) if bias else None,
            label=f"{shape}{axis}-{precision}",
            axis=axis,
            epsilon=1e-3,
            precision=precision,
            # An axis counted from the front needs to know the rank.
            shapes=("static", "dynamic", "unknown") if axis < 0 else ("static", "dynamic"),
        )
        for shape, axis, bias in _LAYERS
        for precision in ("double", "float")  # in single precision one fused node serves
    ],
    case("LayerNormalization", normal(2, 3, 4), normal(4, seed=1), label="defaults"),
    case("LayerNormalization", normal(2, 3, 4), normal(4, seed=1), label="statistics", outputs=3),
    case("LayerNormalization", normal(2, 3, 4), normal(4, seed=1), label="mean", outputs=2),
    *[
        case(
            "RMSNormalization",
            normal(*shape),
            normal(*shape[axis:], seed=1),
            label=f"{shape}{axis}",
            opset=23,
            axis=axis,
            epsilon=1e-3,
            shapes=("static", "dynamic", "unknown") if axis < 0 else ("static", "dynamic"),
        )
        for shape, axis, _ in _LAYERS
    ],
    *[
        case(
            "GroupNormalization",
            normal(*shape),
            normal(count, seed=1),
            normal(count, seed=2),
            label=f"{shape}-{opset}",
            opset=opset,
            num_groups=2,
            epsilon=1e-2,
            # Written out, the checker turns it into double.
            **({"stash_type": 1} if opset > 18 else {}),
        )
        for shape in ((2, 4, 3), (2, 6, 2, 3))
        for opset, count in ((18, 2), (21, shape[1]), (23, shape[1]))
    ],
    # Its body has constants in single precision only.
    case("MeanVarianceNormalization", normal(2, 3, 2, 4), label="defaults", precision="float"),
    case("MeanVarianceNormalization", normal(2, 3, 4), label="axes", axes=[0, -1], precision="float"),
    *[
        case("LpNormalization", x, label=f"{p}-{axis}", p=p, axis=axis)
        # ONNX's reference evaluator forgets the absolute value for p = 1.
        for p, x in ((1, positive(2, 3, 4)), (2, apart(2, 3, 4)))
        for axis in (-1, 1)
    ],
    case("LpNormalization", apart(2, 3), label="defaults", opset=22),
    # ONNX's reference evaluator loops over as many channels as there are images.
    *[
        case(
            "LRN",
            normal(*shape),
            label=f"{shape}{size}",
            size=size,
            alpha=0.5,
            beta=0.6,
            bias=1.5,
            runtime=size % 2 == 1,  # ONNX Runtime has odd sizes only
        )
        for shape, size in (((5, 5, 3, 2), 3), ((4, 4, 2, 2), 2), ((3, 3, 2, 2), 5), ((6, 6, 1, 1), 4))
    ],
    case("LRN", normal(4, 4, 2, 2), label="defaults", size=3),
]
