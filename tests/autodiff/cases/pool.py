"""Pooling over windows of every kind, and over whole images.

test_pool_torch.py has the forms that ONNX's reference evaluator lacks (GlobalLpPool) or gets wrong: the indices of a
MaxPool with strides of 1, the padding of an LpPool that rounds up, GlobalMaxPool in one and three dimensions.
"""

import numpy as np

from autodiff.case import apart, case, normal

_WINDOWS = {
    "2x2": {"kernel_shape": [2, 2], "strides": [2, 2]},
    "remainder": {"kernel_shape": [2, 3], "strides": [3, 4]},
    "overlap": {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    "dense": {"kernel_shape": [2, 3]},
    "pads": {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]},
    "ceil": {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1},
    "same-upper": {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    "same-lower": {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"},
    "valid": {"kernel_shape": [2, 2], "strides": [2, 1], "auto_pad": "VALID"},
}

_DILATED = {"kernel_shape": [2, 2], "dilations": [2, 3], "strides": [1, 2]}

CASES = [
    *[
        case("MaxPool", apart(2, 2, 5, 7), label=label, **options)
        for label, options in {**_WINDOWS, "dilations": _DILATED}.items()
        if "strides" in options
    ],
    case("MaxPool", apart(2, 2, 4, 6), label="exact", kernel_shape=[2, 2], strides=[2, 2]),
    case("MaxPool", apart(2, 2, 4, 6), label="indices", outputs=2, kernel_shape=[2, 2], strides=[2, 2]),
    case("MaxPool", apart(2, 3, 7), label="1d", kernel_shape=[3], strides=[2]),
    case("MaxPool", apart(1, 2, 4, 4, 4), label="3d", kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
    case("MaxPool", apart(1, 2, 4, 5), label="22", opset=22, kernel_shape=[2, 2], strides=[1, 2]),
    *[
        case("AveragePool", normal(2, 2, 5, 7), label=f"{label}-{include}", count_include_pad=include, **options)
        for label, options in _WINDOWS.items()
        for include in (0, 1)
    ],
    case("AveragePool", normal(2, 2, 5, 7), label="dilations", opset=19, **_DILATED),
    case("AveragePool", normal(2, 2, 5, 7), label="dilations-pads", opset=22, **_DILATED, pads=[1, 1, 0, 1]),
    case("AveragePool", normal(2, 3, 7), label="1d", kernel_shape=[3], strides=[2], pads=[1, 1]),
    case("AveragePool", normal(1, 2, 4, 3, 4), label="3d", kernel_shape=[2, 2, 2], strides=[2, 1, 2]),
    *[
        case("LpPool", apart(2, 2, 5, 7), label=f"{label}-{p}", p=p, **options)
        for label, options in {**_WINDOWS, "dilations": _DILATED}.items()
        for p in ((1, 2, 3, 4) if label == "2x2" else (2,))
        if label != "ceil"
    ],
    *[case("GlobalAveragePool", normal(*shape), label=f"{shape}") for shape in ((2, 3, 4, 5), (2, 3, 6))],
    *[case("GlobalMaxPool", apart(*shape), label=f"{shape}") for shape in ((2, 3, 4, 5), (2, 3, 1, 1))],
    case("GlobalAveragePool", normal(2, 3, 4), label="22", opset=22),
    case("GlobalLpPool", apart(2, 3, 4), label="against-torch", shapes=()),
    case(
        "MaxUnpool",
        normal(1, 2, 2, 2),
        np.array([5, 7, 13, 15, 16, 18, 26, 31]).reshape(1, 2, 2, 2),
        label="plain",
        kernel_shape=[2, 2],
        strides=[2, 2],
    ),
]
