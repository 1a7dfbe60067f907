"""Registry of axis rules, by operator, domain and opset range; operators without a rule, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from onnxtrain.errors import OptionError
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.graph.rule_registry import NEWEST, RuleRegistry, canonical, for_each
from onnxtrain.plugins.structures.axes.node import Node, Outputs

Rule = Callable[[Node], Outputs]
"""Gets the node, returns the axes of its outputs: one list per output, or the list of the only one."""


class Entry(NamedTuple):
    """A registered rule."""

    operator: str
    domain: str
    since: int
    until: int
    function: Rule | None
    reason: str = ""


RULES: Final[RuleRegistry[Entry]] = RuleRegistry("An axis rule", OptionError)


def axes_of(*operators: str, domain: str = "", since: int = 1, until: int = NEWEST) -> Callable[[Rule], Rule]:
    """Register a function as the axis rule of operators."""
    return for_each(operators, lambda name, rule: RULES.add(Entry(name, canonical(domain), since, until, rule)))


def no_rule(*operators: str, domain: str = "", reason: str) -> None:
    """List operators whose inputs and outputs keep all their axes."""
    for operator in operators:
        RULES.add(Entry(operator, canonical(domain), 1, NEWEST, None, reason))


no_rule("If", "Loop", "Scan", reason="it has a body, and structures are not followed into bodies")
no_rule("Col2Im", reason="it sums blocks that overlap")
no_rule("DeformConv", reason="its offsets have channels of their own")
no_rule("Det", reason="a determinant mixes both axes of its matrices")
no_rule("DFT", "STFT", reason="a transform mixes all entries of its axis")
no_rule("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", reason="a loss counts all classes")
no_rule("RoiAlign", "MaxRoiPool", reason="its regions lie on the image axes of a detector")
no_rule("MaxUnpool", reason="its positions count channels")
no_rule("AffineGrid", reason="its output is positions")
no_rule("NonZero", "NonMaxSuppression", reason="it lists positions")
no_rule(
    *("GatherElements", "GatherND", "Compress", "Unique", "OneHot", "TensorScatter", "ScatterElements", "ScatterND"),
    reason="its positions may lie on any axis",
)
no_rule(
    *("SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "SplitToSequence", "ConcatFromSequence"),
    *("Optional", "OptionalGetElement", "OptionalHasElement", "SequenceEmpty", "SequenceLength"),
    reason="structures are not followed through sequences",
)
no_rule(
    *("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", "EyeLike", "ImageDecoder", "Range", "Size"),
    reason="its result depends on sizes",
)
no_rule("BitCast", "Constant", reason="its sizes are those of its data")
no_rule(
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"),
    reason="fewer entries would sample others",
)
no_rule(
    *("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"),
    reason="its input is text or tokens",
)
no_rule(
    *("QLinearConv", "QLinearMatMul"),
    reason="it has quantized weights of its own; write the model with QuantizeLinear and DequantizeLinear",
)
no_rule(
    *("QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearAveragePool"),
    *("QLinearGlobalAveragePool", "QLinearConcat", "QLinearWhere", "QGemm", "MatMulIntegerToFloat"),
    "DynamicQuantizeMatMul",
    domain=MICROSOFT_DOMAIN,
    reason="it has quantized inputs; write the model with QuantizeLinear and DequantizeLinear",
)
no_rule(
    *("MatMulNBits", "GatherBlockQuantized"),
    domain=MICROSOFT_DOMAIN,
    reason="its weights are packed in low-bit blocks; remove structures before the model is quantized",
)
no_rule(
    *("Attention", "MultiHeadAttention", "GroupQueryAttention", "FusedMatMul", "FusedGemm", "FusedConv"),
    domain=MICROSOFT_DOMAIN,
    reason="it joins several layers in one operator; export the model without ONNX Runtime's fusions",
)
no_rule("RotaryEmbedding", domain=MICROSOFT_DOMAIN, reason="its heads have no axis of their own")
no_rule(
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    domain=MICROSOFT_DOMAIN,
    reason="it normalizes over the width of the residual stream",
)
no_rule("EmbedLayerNormalization", domain=MICROSOFT_DOMAIN, reason="it normalizes over the width of the embeddings")
no_rule(
    *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", "SVMClassifier", "SVMRegressor"),
    "ArrayFeatureExtractor",
    domain=MACHINE_LEARNING_DOMAIN,
    reason="its features are columns of the data",
)
no_rule(
    *("Attention", "BatchNormalization", "CountedDropout", "GatherGradient", "GRU", "Linear", "LSTM", "MatMulNBits"),
    *("PackedAttention", "RNN", "StopGradient"),
    domain=ONNXTRAIN_DOMAIN,
    reason="it is a part of training graphs, not of model files",
)
