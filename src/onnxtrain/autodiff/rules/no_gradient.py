"""Operators through which no gradient flows, each with the reason; StopGradient."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.fused import emit, register_fused
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import no_gradient, only_straight_through
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.graph.shapes import register_inference

STEPS = ("Ceil", "Floor", "Round", "Sign", "QuantizeLinear")
"""Operators that round: their derivative is zero; :mod:`onnxtrain.autodiff.rules.quantization` has the
rules that replace it where one trains through them."""

no_gradient(*STEPS, reason="the output is constant between steps: the derivative is zero wherever it exists")
no_gradient("Hardmax", reason="the output is constant between jumps: the derivative is zero wherever it exists")
no_gradient(
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf"),
    reason="the output is a truth value",
)
no_gradient(
    *("And", "Or", "Xor", "Not", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "BitCast"),
    reason="it works on truth values or on bits",
)
no_gradient(
    *("Shape", "Size", "ConstantOfShape", "EyeLike"),
    reason="the output depends on shapes only, not on the values",
)
no_gradient(
    *("ArgMax", "ArgMin", "NonZero", "NonMaxSuppression"),
    reason="the output is positions, which are integers",
)
no_gradient(
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    reason="the output is sampled at random, independent of the input's values",
)
no_gradient(
    *("Bernoulli", "Multinomial"),
    reason="the output is a random choice, which jumps when the probabilities vary",
)
for operator, quantized in {
    "ConvInteger": (0, 1),
    "DynamicQuantizeLinear": (0,),
    "MatMulInteger": (0, 1),
    "QLinearConv": (0, 3),
    "QLinearMatMul": (0, 3),
}.items():
    only_straight_through(operator, *quantized)
no_gradient(
    *("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"),
    reason="the input is text or tokens",
)
no_gradient(
    *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"),
    domain=MACHINE_LEARNING_DOMAIN,
    reason="the output is constant between the thresholds of the trees",
)
no_gradient(
    *("SVMClassifier", "SVMRegressor"),
    domain=MACHINE_LEARNING_DOMAIN,
    reason="support vectors are examples, which are chosen and not learned",
)
no_gradient(
    *("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
    reason="the output is a table that depends on sizes; the edges of a filter bank fall on whole bins",
)
no_gradient(
    *("Constant", "ImageDecoder", "OptionalHasElement", "SequenceEmpty", "SequenceLength"),
    reason="its output depends on no floating-point value",
)


_STOP = "StopGradient"

no_gradient(_STOP, domain=ONNXTRAIN_DOMAIN, reason="it blocks gradients by definition")


@register_fused(_STOP, has_kernel=None)
def stop_gradient(node: Node) -> list[Value | None]:
    """y = x."""
    return [node.op.Identity(node.x).with_shape(node.x.shape)]


def stopped(op: Builder, x: Value) -> Value:
    """The value as a constant to the gradient."""
    return emit(op, _STOP, x, like=[x])[0]


def infer_stopped(node: ir.Node) -> bool:
    """Copy the type and shape of x to the output of StopGradient, which files of training models may have."""
    if (node.domain, node.op_type) != (ONNXTRAIN_DOMAIN, _STOP) or (x := node.inputs[0]) is None:
        return False
    output, learned = node.outputs[0], False
    if output.type is None and x.type is not None:
        output.type, learned = x.type, True
    if output.shape is None and x.shape is not None:
        output.shape, learned = x.shape.copy(), True
    return learned


register_inference(infer_stopped, lambda node: [])
