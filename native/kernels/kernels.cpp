// All kernels for one instruction set: the build compiles this file once per set, with the matching compiler flags and
// ONNXTRAIN_INSTRUCTION_SET as its name.
//
// Everything but the table is in unnamed namespaces, and the standard library is not called: a function that the linker
// merges across instruction sets could contain instructions that the CPU lacks.
#include "activations/gelu_kernels.h"
#include "activations/kernels.h"
#include "attention/table.h"
#include "elementwise/kernels.h"
#include "gather/kernels.h"
#include "kernels/instruction_set.h"
#include "kernels/kernel_table.h"
#include "kernels/stream.h"
#include "normalization/batch_kernels.h"
#include "normalization/layer_kernels.h"
#include "optimizers/bfloat16_states.h"
#include "optimizers/blockwise_states.h"
#include "optimizers/prepare_gradient.h"
#include "optimizers/rule.h"
#include "pooling/kernels.h"
#include "reduction/kernels.h"
#include "resize/kernels.h"
#include "softmax/kernels.h"

namespace onnxtrain {

extern const AttentionKernels ONNXTRAIN_OF_SET(kAttention_)[kElementTypes];
extern const Bfloat16Convolution ONNXTRAIN_OF_SET(kBfloat16Convolution_);
extern const Bfloat16Kernels ONNXTRAIN_OF_SET(kBfloat16_);
extern const ConvolutionTable ONNXTRAIN_OF_SET(kConvolution_);
extern const OptimizerKernels ONNXTRAIN_OF_SET(kOptimizers_)[];
extern const MatmulTable ONNXTRAIN_OF_SET(kProduct_);
extern const RecurrentTable ONNXTRAIN_OF_SET(kRecurrent_);
extern const SparseTable ONNXTRAIN_OF_SET(kSparse_);
extern const TransformTable ONNXTRAIN_OF_SET(kTransforms_);
extern const KernelTable ONNXTRAIN_OF_SET(kKernels_);

const KernelTable ONNXTRAIN_OF_SET(kKernels_) = {
    .instruction_set = ONNXTRAIN_TEXT(ONNXTRAIN_INSTRUCTION_SET),
    .optimizers = ONNXTRAIN_OF_SET(kOptimizers_),
    .prepare_gradient = {prepare_gradient<float>, prepare_gradient<double>},
    .widen_states = widen_states,
    .round_states = round_states,
    .decode_states = decode_states,
    .encode_states = encode_states,
    .elementwise = {elementwise<float>, elementwise<double>},
    .relu_gradient = {relu_gradient<float>, relu_gradient<double>},
    .clip_gradient = {{clip_gradient<float, false>, clip_gradient<double, false>},
     {clip_gradient<float, true>, clip_gradient<double, true>}},
    .gelu_gradient = {{gelu_gradient<float, GeluKind::kExact, false>, gelu_gradient<double, GeluKind::kExact, false>},
     {gelu_gradient<float, GeluKind::kExact, true>, gelu_gradient<double, GeluKind::kExact, true>}},
    .gelu_tanh_gradient = {{gelu_gradient<float, GeluKind::kTanh, false>, gelu_gradient<double, GeluKind::kTanh, false>},
     {gelu_gradient<float, GeluKind::kTanh, true>, gelu_gradient<double, GeluKind::kTanh, true>}},
    .gelu_logistic_gradient = {{gelu_gradient<float, GeluKind::kLogistic, false>, gelu_gradient<double, GeluKind::kLogistic, false>},
     {gelu_gradient<float, GeluKind::kLogistic, true>, gelu_gradient<double, GeluKind::kLogistic, true>}},
    .batch_normalization = {batch_normalization<float>, batch_normalization<double>},
    .batch_normalization_gradient = {batch_normalization_gradient<float>, batch_normalization_gradient<double>},
    .layer_normalization_gradient = {layer_normalization_gradient<float>, layer_normalization_gradient<double>},
    .max_pool_gradient = {max_pool_gradient<float>, max_pool_gradient<double>},
    .reduce_columns =
        {{reduce_columns<ReductionKind::kSum, float>, reduce_columns<ReductionKind::kSum, double>},
         {reduce_columns<ReductionKind::kMean, float>, reduce_columns<ReductionKind::kMean, double>},
         {reduce_columns<ReductionKind::kSumOfSquares, float>, reduce_columns<ReductionKind::kSumOfSquares, double>},
         {reduce_columns<ReductionKind::kProduct, float>, reduce_columns<ReductionKind::kProduct, double>}},
    .multiply_rows = {multiply_rows<float>, multiply_rows<double>},
    .scan = {{scan<false, float>, scan<false, double>}, {scan<true, float>, scan<true, double>}},
    .resize = {resize<float>, resize<double>},
    .log_softmax = {log_softmax<float>, log_softmax<double>},
    .softmax_gradient = {softmax_gradient<float, false>, softmax_gradient<double, false>},
    .log_softmax_gradient = {softmax_gradient<float, true>, softmax_gradient<double, true>},
    .cross_entropy_gradient = {cross_entropy_gradient<float>, cross_entropy_gradient<double>},
    .row_sums = {row_sums<float>, row_sums<double>},
    .stream = stream,
    .convolution = &ONNXTRAIN_OF_SET(kConvolution_),
    .attention = ONNXTRAIN_OF_SET(kAttention_),
    .product = &ONNXTRAIN_OF_SET(kProduct_),
    .bfloat16 = &ONNXTRAIN_OF_SET(kBfloat16_),
    .bfloat16_convolution = &ONNXTRAIN_OF_SET(kBfloat16Convolution_),
    .recurrent = &ONNXTRAIN_OF_SET(kRecurrent_),
    .sparse = &ONNXTRAIN_OF_SET(kSparse_),
    .transforms = &ONNXTRAIN_OF_SET(kTransforms_),
};

}  // namespace onnxtrain
