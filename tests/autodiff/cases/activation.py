"""Activations: their attributes, optional inputs and versions, on points of both signs away from kinks; softmax."""

import numpy as np

from autodiff.case import apart, case, fixed, normal

_X = apart(3, 4)

_PLAIN = ("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Sigmoid", "HardSigmoid", "HardSwish", "Softplus")
_PLAIN += ("Softsign", "ThresholdedRelu", "Shrink", "Mish")

_ATTRIBUTES = [
    ("LeakyRelu", {"alpha": 0.3}),
    ("LeakyRelu", {"alpha": 1.5}),
    ("LeakyRelu", {"alpha": -0.5}),
    ("LeakyRelu", {"alpha": 0.0}),
    ("Elu", {"alpha": 0.7}),
    ("Elu", {"alpha": -0.7}),
    ("Elu", {"alpha": 0.0}),
    ("Selu", {"alpha": 0.5, "gamma": 2.0}),
    ("Selu", {"alpha": 0.5, "gamma": -2.0}),
    ("Selu", {"alpha": -0.5, "gamma": 2.0}),
    ("Celu", {"alpha": 2.0}),
    ("Celu", {"alpha": -2.0}),
    ("HardSigmoid", {"alpha": 0.4, "beta": 0.3}),
    ("HardSigmoid", {"alpha": -0.4, "beta": 0.3}),
    ("ThresholdedRelu", {"alpha": -0.3}),
    ("Shrink", {"lambd": 0.3, "bias": 0.2}),
    ("Shrink", {"lambd": -0.3, "bias": 0.2}),
]

_SLOPES = [((4,), "channel-last"), ((1,), "shared"), ((3, 1), "channel"), ((3, 4), "full"), ((), "scalar")]

_RATIO, _YES, _NO = np.array(0.25), np.array(True), np.array(False)

CASES = [
    *(case(operator, _X) for operator in _PLAIN),
    *(
        case(operator, _X, opset=22)
        for operator in _PLAIN
        if operator not in ("Relu", "LeakyRelu", "Celu", "Sigmoid", "Shrink")
    ),
    *(case(operator, apart(0, 3), label="empty") for operator in _PLAIN),
    *(case(operator, _X, label=f"{given}", **given) for operator, given in _ATTRIBUTES),
    # In float32 the rule of Relu and its kin takes a shorter way.
    *(
        case(operator, _X, label="float", precision="float")
        for operator in ("Relu", "LeakyRelu", "HardSigmoid", "HardSwish")
    ),
    case("LeakyRelu", _X, label="float-zero", precision="float", alpha=0.0),
    *(case("PRelu", _X, np.abs(normal(*shape)) + 0.1, label=label) for shape, label in _SLOPES),
    case("PRelu", apart(2, 3, 2, 2), normal(3, 1, 1), label="image"),
    case("PRelu", apart(0, 3), normal(3), label="empty"),
    case("Swish", normal(2, 3), opset=24),
    case("Swish", normal(2, 3), label="alpha", opset=24, alpha=1.7),
    # ONNX's reference evaluator has the error function in float32 only.
    *(
        case(
            "Gelu",
            normal(3, 4, scale=2.0),
            label=f"{approximate}-{opset}",
            opset=opset,
            precision=precision,
            approximate=approximate,
        )
        for approximate, precision in (("none", "float"), ("tanh", "double"))
        for opset in (20, 22)
    ),
    case("Gelu", normal(0, 3), label="empty", opset=20),
    # Out of training, dropout is the identity.
    case("Dropout", normal(2, 3)),
    case("Dropout", normal(2, 3), _RATIO, label="ratio", wrt=["a"], opset=22),
    case("Dropout", normal(2, 3), _RATIO, _NO, label="inference", wrt=["a"], outputs=2),
    fixed(case("Dropout", normal(2, 3), _RATIO, _NO, label="inference-fixed", wrt=["a"], outputs=2)),
    # In training the evaluator draws the same numbers in each run; ONNX Runtime draws others. The evaluator
    # fails where the ratio is left out.
    *(
        variant(
            case(
                "Dropout",
                normal(8, 8),
                _RATIO,
                _YES,
                label=label,
                wrt=["a"],
                outputs=outputs,
                runtime=False,
                opset=opset,
                seed=3,
            )
        )
        for label, outputs, opset in (("training", 2, 18), ("training-no-mask", 1, 18), ("training-22", 2, 22))
        for variant in (fixed, lambda row: row)
    ),
]
CASES += [
    case(operator, normal(2, 3, 4, scale=2.0), label=f"axis{axis}", **({} if axis is None else {"axis": axis}))
    for operator in ("Softmax", "LogSoftmax")
    for axis in (None, 0, 1, 2, -1, -2, -3)
] + [
    case(operator, x, label=label)
    for operator in ("Softmax", "LogSoftmax")
    for label, x in (("vector", normal(5)), ("one", normal(3, 1)), ("empty", normal(0, 3)))
]
