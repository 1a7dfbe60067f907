"""Linear layers as an operator of this project's domain, which a graph pass emits."""

import numpy as np

from autodiff.case import Case, case, normal

FEW, MANY = 3, 5


def linear(label: str, *leading: int, transposed: int = 0, bias: bool = True, **options) -> Case:
    w = normal(*((MANY, FEW) if transposed else (FEW, MANY)), seed=1)
    b = normal(MANY, seed=2) if bias else None
    inputs = [normal(*leading, FEW), w, *([] if b is None else [b])]
    return case("Linear", *inputs, domain="onnxtrain", label=f"fused-{label}", transB=transposed, **options)


def with_relu(label: str, *leading: int, **options) -> Case:
    """Keep the sums away from zero, where the slope changes."""
    b = np.where(np.arange(MANY) % 2 == 0, 20.0, -20.0)
    w = normal(*((MANY, FEW) if options.get("transB") else (FEW, MANY)), seed=1)
    options = {"domain": "onnxtrain", "activation": "Relu", **options}
    return case("Linear", normal(*leading, FEW), w, b, label=f"fused-relu-{label}", **options)


def gradient(label: str, *leading: int, outputs: int = 3, transposed: int = 0, **options) -> Case:
    """From dy, w and x, whose positive elements are not near zero."""
    x = np.abs(normal(*leading, FEW, seed=2)) + 0.5
    w = normal(*((MANY, FEW) if transposed else (FEW, MANY)), seed=1)
    options = {"domain": "onnxtrain", "outputs": outputs, "transB": transposed, **options}
    return case("LinearGradient", normal(*leading, MANY), w, x, label=f"fused-{label}", **options)


def weight_gradient(label: str, *leading: int, outputs: int = 2, transposed: int = 0) -> Case:
    inputs = normal(*leading, MANY), normal(*leading, FEW, seed=1)
    options = {"outputs": outputs, "transB": transposed}
    return case("LinearWeightGradient", *inputs, domain="onnxtrain", label=f"fused-{label}", **options)


CASES = [
    linear("rows", 4),
    linear("transposed", 4, transposed=1),
    linear("no-bias", 4, bias=False),
    linear("no-bias-transposed", 4, bias=False, transposed=1),
    linear("positions", 2, 4),
    linear("positions-transposed", 2, 4, transposed=1),
    linear("positions-no-bias", 2, 4, bias=False),
    linear("five-axes", 2, 1, 3, 2, opset=17),
    linear("one-row", 1, 1, transposed=1),
    linear("frozen-weight", 2, 4, wrt="ac"),
    linear("frozen-input", 2, 4, wrt="bc", transposed=1),
    linear("weight-alone", 2, 4, wrt="b"),
    linear("bias-alone", 2, 4, wrt="c"),
    linear("bias-alone-rows", 4, wrt="c", transposed=1),
    linear("frozen-bias", 2, 4, wrt="ab"),
    # Without the gradient by the weight: the reference evaluator cannot flatten an empty tensor. And ONNX Runtime fails
    # to multiply one whose shape it knows and to add a bias.
    linear("empty", 2, 0, wrt="ac", shapes=("dynamic", "unknown")),
    case(
        "Linear", normal(2, 1), normal(1, 1, seed=1), np.ones(1), domain="onnxtrain", label="fused-one-feature"
    ),  # without the attribute
    with_relu("rows", 4),
    with_relu("transposed", 2, 4, transB=1),
    with_relu("frozen-weight", 4, wrt="ac"),
    with_relu("frozen-input", 4, wrt="bc"),
    with_relu("bias-alone", 4, wrt="c"),
    gradient("rows", 4),
    gradient("transposed", 4, transposed=1),
    gradient("positions", 2, 4),
    gradient("relu", 4, activation="Relu"),
    gradient("relu-positions-transposed", 2, 4, transposed=1, activation="Relu"),
    gradient("relu-input-alone", 4, outputs=1, activation="Relu"),
    gradient("relu-no-bias", 2, 4, outputs=2, activation="Relu"),
    weight_gradient("rows", 4),
    weight_gradient("rows-alone", 4, outputs=1),
    weight_gradient("transposed", 4, transposed=1),
    weight_gradient("positions", 2, 4),
    weight_gradient("positions-transposed-alone", 2, 4, outputs=1, transposed=1),
]
