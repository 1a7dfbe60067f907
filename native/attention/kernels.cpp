// The kernels of attention for one instruction set: compiled like convolution.cpp, once per set, with fused
// multiplications and additions.
#include "attention/attention_kernels.h"
#include "kernels/instruction_set.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {

extern const AttentionKernels ONNXTRAIN_OF_SET(kAttention_)[kElementTypes];

namespace {

template <typename T>
constexpr AttentionKernels kKernels = {
    .score_stride = score_stride<T>,
    .scratch = attention_scratch<T>,
    .attend = attend<T>,
    .gradient = attention_gradient<T>,
};

}  // namespace

const AttentionKernels ONNXTRAIN_OF_SET(kAttention_)[kElementTypes] = {
    kKernels<float>,
    kKernels<double>,
};

}  // namespace onnxtrain
