"""The rules: one function per operator, its first docstring line the formula.

``x y`` are a node's values, ``dx dy`` their gradients. A rule emits for all inputs; what nobody asked for is
removed afterwards. Broadcasting, accumulation and zero gradients are the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping

OPERATORS: Mapping[str, str] = {
    "activation": "Celu Dropout Elu Gelu GeluGradient HardSigmoid HardSwish LeakyRelu Mish PRelu Relu "
    "ReluGradient Selu Shrink Sigmoid Softplus Softsign Swish ThresholdedRelu",
    "arithmetic": "Add Div Max Mean Min Mod Mul Pow Sub Sum Where",
    "branches": "If",
    "conv": "Conv ConvInputGradient ConvTranspose ConvWeightGradient",
    "cumulative": "CumProd CumSum Range",
    "deformable": "Col2Im DeformConv",
    "dropout": "CountedDropout",
    "einsum": "Einsum",
    "elementwise": "Abs Acos Acosh Asin Asinh Atan Atanh Cast CastLike Clip ClipGradient Cos Cosh Erf Exp "
    "Identity Log Neg Reciprocal Sin Sinh Sqrt Tan Tanh",
    "fused_attention": "Attention AttentionGradient",
    "fused_linear": "Linear LinearGradient LinearWeightGradient",
    "fused_recurrent": "GRU GRUGradient LSTM LSTMGradient RNN RNNGradient",
    "gated": "GRU LSTM",
    "grid_sample": "AffineGrid GridSample",
    "grouped_attention": "GroupQueryAttention",
    "indexing": "Compress Gather GatherElements GatherGradient GatherND OneHot TensorScatter TopK Unique",
    "loops": "Loop Scan",
    "loss": "NegativeLogLikelihoodLoss SoftmaxCrossEntropyGradient SoftmaxCrossEntropyLoss",
    "matmul": "Det Gemm MatMul",
    "matmul_nbits": "GatherBlockQuantized MatMulNBits MatMulNBitsGradient",
    "microsoft": "BiasGelu EmbedLayerNormalization FastGelu FusedConv FusedGemm FusedMatMul Gelu QuickGelu "
    "SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization",
    "microsoft_attention": "Attention MultiHeadAttention RotaryEmbedding",
    "no_gradient": "And ArgMax ArgMin Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor "
    "BlackmanWindow Ceil Constant ConstantOfShape ConvInteger DynamicQuantizeLinear Equal EyeLike Floor Greater "
    "GreaterOrEqual HammingWindow HannWindow Hardmax ImageDecoder IsInf IsNaN Less LessOrEqual MatMulInteger "
    "MelWeightMatrix Multinomial NonMaxSuppression NonZero Not OptionalHasElement Or QLinearConv QLinearMatMul "
    "QuantizeLinear RandomNormal RandomNormalLike RandomUniform RandomUniformLike RegexFullMatch Round "
    "SVMClassifier SVMRegressor SequenceEmpty SequenceLength Shape Sign Size StringConcat StringNormalizer "
    "StringSplit TfIdfVectorizer TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor Xor",
    "normalization": "BatchNormalization BatchNormalizationGradient GroupNormalization InstanceNormalization "
    "LRN LayerNormalization LayerNormalizationGradient LpNormalization MeanVarianceNormalization RMSNormalization "
    "RMSNormalizationGradient",
    "placement": "",
    "pool": "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool MaxPoolGradient MaxUnpool",
    "quantization": "DequantizeLinear",
    "quantized": "DequantizeLinear DynamicQuantizeMatMul MatMulIntegerToFloat QGemm QLinearAdd "
    "QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMatMul "
    "QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere QuantizeLinear",
    "recurrent": "RNN",
    "recurrent_activations": "",
    "reduction": "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare",
    "resize": "Resize",
    "roi": "MaxRoiPool RoiAlign",
    "rotary": "RotaryEmbedding",
    "scattering": "ScatterElements ScatterND",
    "sequence": "ConcatFromSequence Optional OptionalGetElement SequenceAt SequenceConstruct SequenceErase "
    "SequenceInsert SplitToSequence",
    "shape": "Concat DepthToSpace Expand Flatten Reshape ReverseSequence SpaceToDepth Split Squeeze Tile "
    "Transpose Trilu Unsqueeze",
    "signal": "DFT STFT",
    "slicing": "Pad Slice",
    "softmax": "LogSoftmax LogSoftmaxGradient Softmax SoftmaxGradient",
    "stop": "StopGradient",
    "straight_through": "Cast CastLike Ceil ConvInteger DequantizeLinear DynamicQuantizeLinear Flatten Floor "
    "Identity MatMulInteger QuantizeLinear Reshape Round Sign Squeeze Transpose Unsqueeze",
}
"""What the files register, whatever the domain: a file is loaded as soon as a graph has an operator of its row.

A file without a row is loaded with the first rule that is looked up. A test compares the rows with the files.
"""
