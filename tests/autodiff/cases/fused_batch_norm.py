"""Batch normalization in training mode with an activation, as an operator of this project's domain."""

import numpy as np
from onnx import helper

from autodiff.case import Case, normal

BIASES = {"": (1.0, -2.0, 0.5), "Relu": (2.0, -2.0, 3.0), "Clip": (-2.0, 0.5, 3.0), "HardSwish": (-5.0, 0.5, 5.0)}
"""Values that the scale leaves near them: the slope of no activation jumps there."""

BOUNDS = {"Clip": {"low": -1.0, "high": 1.5}}


def normalized(activation: str, *shape: int, residual: bool = False) -> Case:
    scale = np.array([0.2, -0.3, 0.1])
    bias = np.array(BIASES[activation])
    inputs = [normal(*shape), scale, bias, normal(3, seed=3), np.abs(normal(3, seed=4)) + 0.5]
    inputs += [0.1 * normal(*shape, seed=5)] if residual else []
    options = {"activation": activation, "epsilon": 1e-3, **BOUNDS.get(activation, {})} if activation else {}
    names = list("abcdef")[: len(inputs)]
    outputs = ["y0", "running_mean", "running_variance", "mean", "variance"]  # statistics carry no gradient
    node = helper.make_node("BatchNormalization", names, outputs, domain="onnxtrain", **options)
    infos = [helper.make_tensor_value_info(n, 11, a.shape) for n, a in zip(names, inputs, strict=True)]
    graph = helper.make_graph([node], "training", infos, [helper.make_tensor_value_info("y0", 11, shape)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("onnxtrain", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    label = f"fused-{activation}-{shape}{'-residual' * residual}"
    return Case(f"BatchNormalization-{label}", model, inputs, wrt=["a", "b", "c", *["f"] * residual])


CASES = [
    *[normalized(activation, 2, 3, 4) for activation in ("", "Relu", "Clip", "HardSwish")],
    normalized("HardSwish", 5, 3),
    normalized("Relu", 2, 3, 2, 3),
    normalized("HardSwish", 1, 3, 2, 2, 2),
    normalized("Relu", 2, 3, 4, residual=True),
]
