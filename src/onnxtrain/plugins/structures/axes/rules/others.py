"""Operators without an axis rule, each with the reason: all axes of their inputs and outputs stay."""

from __future__ import annotations

from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.plugins.structures.axes.registry import no_rule

no_rule("If", "Loop", "Scan", reason="it has a body, and structures are not followed into bodies")
no_rule("RoiAlign", "MaxRoiPool", reason="its regions lie on the image axes of a detector")
no_rule(
    *("SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "SplitToSequence", "ConcatFromSequence"),
    *("Optional", "OptionalGetElement", "OptionalHasElement", "SequenceEmpty", "SequenceLength"),
    reason="structures are not followed through sequences",
)
no_rule("DFT", "STFT", reason="a transform mixes all entries of its axis")
no_rule(
    *("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", "EyeLike", "ImageDecoder"),
    reason="its result depends on sizes",
)
no_rule("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", reason="a loss counts all classes")
no_rule(
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"),
    reason="fewer entries would sample others",
)
no_rule("BitCast", "Constant", reason="its sizes are those of its data")
no_rule(
    *("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"),
    reason="its input is text or tokens",
)
no_rule(
    *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", "SVMClassifier", "SVMRegressor"),
    "ArrayFeatureExtractor",
    domain=MACHINE_LEARNING_DOMAIN,
    reason="its features are columns of the data",
)
no_rule("StopGradient", domain=ONNXTRAIN_DOMAIN, reason="it is a part of training graphs, not of model files")
